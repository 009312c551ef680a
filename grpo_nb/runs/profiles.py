"""Profiles, which suit a machine, and tasks, which say what is taught: settings by dotted name."""

import difflib
import re
from typing import Any

from grpo_nb.machine import gpu_fault, gpu_name
from grpo_nb.runs.batch import solve_batch


def _gpu(size: str, prompts: int, rows: int, prompt: int, completion: int) -> dict[str, Any]:
    """A GPU's profile: Qwen2.5 on GSM8K, groups of 8.

    Args:
        size: Of the model, as in its name; those under Apache-2.0 are taken (3B is not).
        prompts: Per step.
        rows: Completions that one pass may hold.
        prompt: At most [tokens].
        completion: At most [tokens].
    """
    batch = solve_batch(prompts, 8, rows)
    return {
        "data.source": "openai/gsm8k",
        "data.subset": "main",
        "data.max_prompt_tokens": prompt,
        "model.model_path": f"Qwen/Qwen2.5-{size}-Instruct",
        "model.max_seq_length": max(1024, prompt + completion),
        "model.lora_rank": 32,
        "model.lora_alpha": 64,
        "train.max_steps": 250,
        "train.learning_rate": 1e-5,
        "train.warmup_steps": 10,
        **{f"train.{name}": value for name, value in batch._asdict().items()},
        "train.max_completion_length": completion,
    }


_16BIT = {"model.quantization": "16bit"}
# From 7 B parameters on vLLM and the update take turns in the memory; with standby Unsloth sets
# vLLM's share.
_LARGE = {"train.learning_rate": 5e-6, "policy.standby": True}
# The GPUs' have not been measured on those GPUs: their memory is estimated in
# tests/test_profiles.py, and the preflight checks it before a training starts.
PROFILES: dict[str, dict[str, Any]] = {
    # The shipped 0.85 M-parameter model; the settings' defaults are made for it.
    "tiny-cpu": {"evaluate.eval_batch_size": 256},
    # One 16 GB GPU (T4), slow and without bfloat16: 0.5 B parameters in 16 bit.
    "t4-16gb": _gpu("0.5B", prompts=4, rows=8, prompt=320, completion=384)
    | _16BIT
    | {"model.lora_rank": 16, "model.lora_alpha": 32, "train.learning_rate": 2e-5},
    # One 24 GB GPU (L4, A10, RTX 3090/4090): 1.5 B parameters in 4 bit.
    "l4-24gb": _gpu("1.5B", prompts=4, rows=8, prompt=320, completion=512),
    # One 40 or 48 GB GPU (A100, L40S, A6000): 7 B parameters in 4 bit.
    "a100-40gb": _gpu("7B", prompts=8, rows=8, prompt=320, completion=768) | _LARGE,
    # One 80 GB A100: 7 B parameters in 16 bit.
    "a100-80gb": _gpu("7B", prompts=8, rows=16, prompt=320, completion=1024) | _LARGE | _16BIT,
    # One 80 GB H100, which is faster: 7 B parameters in 16 bit, twice the step.
    "h100-80gb": _gpu("7B", prompts=16, rows=16, prompt=320, completion=1024) | _LARGE | _16BIT,
    # One 141 GB H200: 14 B parameters in 16 bit, and completions twice as long.
    "h200-141gb": _gpu("14B", prompts=8, rows=16, prompt=512, completion=2048) | _LARGE | _16BIT,
}
# What the driver says that such a GPU has, at least [GiB]; of two equal ones its name decides.
MEMORY_GIB = {
    **{"t4-16gb": 14, "l4-24gb": 22, "a100-40gb": 39, "a100-80gb": 78, "h100-80gb": 78},
    "h200-141gb": 138,
}


def _task(name: str, answer_kind: str) -> dict[str, Any]:
    """Data, rewards and the kind of gold, and what the tiny base of these tasks needs."""
    return {
        "data.source": name,
        "data.answer_kind": answer_kind,
        "rewards.preset": name,
        "data.eval_rows": 128,
        "data.max_prompt_tokens": 64,
        "model.model_path": "data/task_base",
        "model.max_seq_length": 96,
        "train.max_steps": 60,
        "train.max_completion_length": 32,
    }


TASKS: dict[str, dict[str, Any]] = {
    "math": {},
    "code": _task("code", "code"),
    "summarization": _task("summarization", "text"),
    "qa": _task("qa", "text"),
    "json_extraction": _task("json_extraction", "json"),
}
# What a task sets on every profile; the rest is for the tiny base.
OF_EVERY_PROFILE = ("data.source", "data.answer_kind", "rewards.preset")


def detect_profile() -> str:
    """The profile for this machine's first GPU: of those that fit into it, the largest.

    A GPU with less than 14 GiB or too old for CUDA 13, or none, gets `tiny-cpu`, whose model
    trains anywhere.
    """
    name, _, memory = ("" if gpu_fault() else gpu_name()).rpartition(",")
    found = re.match(r"\s*(\d+) MiB", memory)
    gib = int(found[1]) / 1024 if found else 0
    fitting = [profile for profile, need in MEMORY_GIB.items() if need <= gib]
    if not fitting:
        return "tiny-cpu"
    largest = [p for p in fitting if MEMORY_GIB[p] == MEMORY_GIB[fitting[-1]]]
    named = [profile for profile in largest if profile.partition("-")[0] in name.lower()]
    return (named or largest)[0]


def task_settings(task: str, profile: str) -> dict[str, Any]:
    """What a task sets: data and rewards, and on the tiny profile its tiny base as well."""
    refuse_unknown("task", task, list(TASKS))
    settings = TASKS[task].items()
    return {k: v for k, v in settings if profile == "tiny-cpu" or k in OF_EVERY_PROFILE}


def refuse_unknown(what: str, name: str, known: list[str]) -> None:
    """Raise ValueError with the nearest known name if `name` is not known."""
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    raise ValueError(f"unknown {what} {name!r}: {hint}")
