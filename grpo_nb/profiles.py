"""Profiles, which suit a machine, and tasks, which say what is taught: settings by dotted name."""

import difflib
import shutil
import subprocess
from typing import Any

PROFILES: dict[str, dict[str, Any]] = {
    # The shipped 0.85 M-parameter model; the defaults above are made for it.
    "tiny-cpu": {},
    # One 24 GB GPU (L4, RTX 3090/4090): a 1.5 B model learns grade-school mathematics.
    "l4-24gb": {
        "data.source": "openai/gsm8k",
        "data.subset": "main",
        "data.max_prompt_tokens": 320,
        "model.model_path": "Qwen/Qwen2.5-1.5B-Instruct",
        "model.max_seq_length": 1024,
        "model.lora_rank": 32,
        "model.lora_alpha": 64,
        "train.max_steps": 250,
        "train.learning_rate": 1e-5,
        "train.warmup_steps": 10,
        "train.per_device_train_batch_size": 8,
        "train.gradient_accumulation_steps": 4,
        "train.max_completion_length": 512,
    },
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


def gpu_name() -> str:
    """Name and memory of the first NVIDIA GPU, as nvidia-smi says them; "" without one."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return ""
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""


def detect_profile() -> str:
    """The profile for this machine: `l4-24gb` where there is an NVIDIA GPU, else `tiny-cpu`."""
    return "l4-24gb" if gpu_name() else "tiny-cpu"


def task_settings(task: str, profile: str) -> dict[str, Any]:
    """What a task sets: data and rewards, and on the tiny profile its tiny base as well."""
    refuse_unknown("task", task, list(TASKS))
    settings = TASKS[task].items()
    return {k: v for k, v in settings if profile == "tiny-cpu" or k in OF_EVERY_PROFILE}


def refuse_unknown(what: str, name: str, known: list[str]) -> None:
    """Raise ValueError with the nearest known name if `name` is not known."""
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    raise ValueError(f"unknown {what} {name!r}: {hint}")
