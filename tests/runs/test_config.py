"""Settings and their layers, profiles and tasks, batches that divide, the choice of a profile."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb import machine, runs
from grpo_nb.__main__ import main
from grpo_nb.files import write_json
from grpo_nb.runs import Run, config
from grpo_nb.runs.config import resolve
from grpo_nb.training.stock import solve_batch

GPUS = [profile for profile in config.PROFILES if config.MEMORY_GIB[profile]]
# Public figures: parameters and those of the embeddings [10^9], layers, hidden and MLP width, width
# of queries, and of keys and values.
QWEN = {
    "Qwen3-0.6B": (0.6, 0.16, 28, 1024, 3072, 2048, 1024),
    "Qwen3-1.7B": (1.72, 0.31, 28, 2048, 6144, 2048, 1024),
    "Qwen3-8B": (8.19, 1.24, 36, 4096, 12288, 4096, 1024),
    "Qwen3-14B": (14.8, 1.56, 40, 5120, 17408, 5120, 1024),
    "Qwen2.5-7B-Instruct": (7.61, 1.09, 28, 3584, 18944, 3584, 512),
    # With 0.41 to 0.58 of the vision tower, which stays in 16 bit as the embeddings do.
    "Qwen3-VL-2B-Instruct": (2.13, 0.72, 28, 2048, 6144, 2048, 1024),
    "Qwen3-VL-4B-Instruct": (4.44, 0.80, 36, 2560, 9728, 4096, 1024),
    "Qwen3-VL-8B-Instruct": (8.77, 1.82, 36, 4096, 12288, 4096, 1024),
}
VOCABULARY = 151_936
SIZES = {
    *("model.model_name", "model.max_seq_length", "grpo.max_steps", "grpo.learning_rate"),
    *("grpo.per_device_train_batch_size", "grpo.gradient_accumulation_steps"),
    *("grpo.warmup_steps", "grpo.max_completion_length"),
}
VLLM, WHOLE = {"model.fast_inference": "vllm"}, {"model.full_finetuning": True}
BY_TRL = {"grpo.vllm_mode": "server", "policy.backend": "transformers"}
REFUSED = [  # settings; what the refusal says
    ({"grpo.max_stepz": 3}, "'grpo.max_stepz': did you mean 'grpo.max_steps'"),
    ({"trian.beta": 3}, "'trian.beta': did you mean 'grpo.beta'"),
    ({"task": "jsonextraction"}, "task 'jsonextraction': did you mean 'json_extraction'"),
    ({"grpo.max_steps": "many"}, "grpo.max_steps = 'many': input should be a valid int"),
    ({"grpo.learning_rate": -1.0}, "grpo.learning_rate = -1.0: input should be"),
    ({"grpo.temperature": 1e-30}, "grpo.temperature = 1e-30: input should be"),
    ({"seed": 2**32}, "seed = 4294967296: input should be"),
    ({"grpo.per_device_train_batch_size": 1}, "accumulation_steps 1 = 1; take a batch of 8"),
    ({"model.max_seq_length": 64}, "max_completion_length = 304; raise it to 304"),
    (WHOLE, "trains no 4-bit weights: set model.load_in_4bit = False"),
    (VLLM | {"policy.backend": "transformers"}, "needs policy.backend = 'unsloth' .*: set model.f"),
    (VLLM | WHOLE | {"model.load_in_4bit": False}, "and LoRA on .*: set model.fast_inf"),
    (BY_TRL, "vllm_mode needs policy.backend = .*: set both, or leave grpo.vllm_mode out"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_with_what_would_do(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve("tiny-cpu", settings)


def test_a_prepared_run_whose_rows_do_not_do_is_refused_as_a_stage_starts(runs_dir):
    run = Run("x")
    run.write_config(resolve("tiny-cpu"))
    write_json(run / "data/report.json", {"train_rows": 7})
    with pytest.raises(ValueError, match=r"7 rows to train on .* fewer than the 8 prompts"):
        runs.start("03", "x", force=True)
    with pytest.raises(ValueError, match=r"train\.sft_steps has no rows .*: set data\.sft_r"):
        runs.start("02", "x", {"train.sft_steps": 3}, force=True)
    assert run.manifest() == {}
    for fewer in ({"grpo.per_device_train_batch_size": 8}, {"grpo.steps_per_generation": 1}):
        runs.start("03", "x", fewer, force=True)


def test_each_value_has_its_source_which_it_keeps_and_an_edited_one_was_set():
    """A task sets data and rewards, and on the tiny profile the model, too."""
    own = {"task": "json_extraction", "grpo.beta": 0.1, "grpo.max_steps": 9}
    resolved = resolve("l4-24gb", own, {"grpo.max_steps": 5, "data.source": "mine.jsonl"})
    rows = {row["setting"]: row for row in config.describe(resolved, "seed", *config.SECTIONS)}
    assert all(row["meaning"] for row in rows.values())
    assert {
        "grpo.max_steps": (5, "set"),
        "data.source": ("mine.jsonl", "set"),
        "grpo.beta": (0.1, "set"),
        "data.answer_kind": ("json", "task json_extraction"),
        "data.subset": ("main", "profile l4-24gb"),
        "model.model_name": (resolve("l4-24gb").model.model_name, "profile l4-24gb"),
        "grpo.temperature": (1.0, "default"),
        "seed": (0, "default"),
    }.items() <= {name: (row["value"], row["from"]) for name, row in rows.items()}.items()
    assert resolve("tiny-cpu", {"task": "json_extraction"}).model.model_name == "data/task_base"
    stored = config.stored(resolve("l4-24gb", {"grpo.beta": 0.1, "grpo.temperature": 1.0}))
    stored["grpo.max_steps"] = 7, stored["grpo.max_steps"][1]
    again = resolve("l4-24gb", {"train.eval_steps": 5}, stored=stored)
    edited = {"grpo.beta": 0.1, "grpo.temperature": 1.0, "grpo.max_steps": 7}
    assert config.set_values(again) == edited | {"train.eval_steps": 5}
    assert again.sources["grpo.learning_rate"] == "profile l4-24gb"
    assert again.sources["grpo.save_steps"] == "default"


@pytest.mark.parametrize("task", config.TASKS)
@pytest.mark.parametrize("profile", config.PROFILES)
def test_every_profile_with_every_task_is_valid_divides_and_survives_being_stored(profile, task):
    resolved = resolve(profile, {"task": task})
    assert (resolved.profile, resolved.task) == (profile, task)
    assert [size for size in SIZES if resolved.sources[size] == "default"] == []
    assert resolve(profile, stored=config.stored(resolved)) == resolved
    grpo = resolved.grpo
    prompts = resolved.step_completions // grpo.num_generations
    assert solve_batch(prompts, grpo.num_generations, grpo.per_device_train_batch_size) == (
        grpo.per_device_train_batch_size,
        grpo.gradient_accumulation_steps,
    )


@given(*(st.integers(1, 64), st.integers(2, 32), st.integers(1, 300), st.integers(1, 8)))
def test_a_solved_batch_is_the_step_and_the_largest_that_fits(prompts, group, rows, processes):
    completions = prompts * group
    if completions % processes:
        with pytest.raises(ValueError, match="do not divide evenly") as refusal:
            solve_batch(prompts, group, rows, processes)
        multiple = int(str(refusal.value).rpartition("multiple of ")[2].split()[0])
        solve_batch(5 * multiple, group, rows, processes)
        return
    batch = solve_batch(prompts, group, rows, processes)
    share = completions // processes
    assert batch.per_device_train_batch_size * batch.gradient_accumulation_steps == share
    larger = range(batch.per_device_train_batch_size + 1, min(rows, share) + 1)
    assert batch.per_device_train_batch_size <= rows
    assert all(share % size for size in larger)


def estimate(settings):
    """(update, generation): what either needs at its worst [GiB], from public figures.

    Weights (embeddings stay in 16 bit, the rest at 2 bytes or NF4's 0.56 with its scales), the
    adapter in fp32 with gradient and 8-bit Adam (10 bytes), a pass's activations (a checkpoint
    a layer, one layer's inside, fp32 logits of one row), and a step's keys and values.
    """
    name = settings.model.model_name.removeprefix("Qwen/")
    parameters, embeddings, layers, hidden, mlp, queries, kv = QWEN[name]
    inner = {"4bit": 0.56, "16bit": 2}[settings.model.quantization]
    weights = embeddings * 2e9 + (parameters - embeddings) * 1e9 * inner
    ends = 2 * (hidden + queries) + 2 * (hidden + kv) + 3 * (hidden + mlp)  # q o, k v, the MLP
    lora = settings.lora.r * layers * ends * 10
    grpo = settings.grpo
    tokens = settings.data.max_prompt_tokens + grpo.max_completion_length
    rows = grpo.per_device_train_batch_size
    activations = 2 * rows * tokens * (layers * hidden + 4 * hidden + 3 * mlp)
    logits = 3 * 4 * grpo.max_completion_length * VOCABULARY
    cache = 2 * 2 * layers * kv * tokens * rows * grpo.gradient_accumulation_steps
    always = weights + lora
    return (always + activations + logits) / 2**30, (always + cache) / 2**30


@pytest.mark.parametrize("profile", GPUS)
def test_a_profile_fits_its_gpu(profile):
    settings = resolve(profile)
    update, generation = estimate(settings)
    memory, share = config.MEMORY_GIB[profile], settings.model.gpu_memory_utilization
    standby = settings.model.unsloth_vllm_standby
    if standby:  # of 40 GB and more: unsloth_zoo/vllm_utils.py 2026.10.9, load_vllm
        share = 0.925 * 0.95
    reserved = 0 if standby else generation
    assert generation < share * memory, "keys and values of a step do not fit into vLLM's share"
    assert update + reserved + 2 < memory, "CUDA and vLLM's own take some 2 GiB"


@pytest.mark.parametrize(
    ("found", "profile"),
    [
        ("", "tiny-cpu"),
        ("NVIDIA GeForce RTX 3060, 12288 MiB", "tiny-cpu"),
        ("Tesla T4, 15360 MiB", "t4-16gb"),
        ("NVIDIA L4, 23034 MiB", "l4-24gb"),
        ("NVIDIA GeForce RTX 5090, 32607 MiB", "l4-24gb"),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3, 81559 MiB", "h100-80gb"),
        ("NVIDIA GH200 480GB, 97871 MiB", "a100-80gb"),
        ("NVIDIA H200, 143771 MiB", "h200-141gb"),
        ("NVIDIA GB10, [N/A]", "tiny-cpu"),  # shares the machine's memory: nothing to go by
    ],
)
def test_the_profile_is_the_largest_that_fits(found, profile, monkeypatch):
    monkeypatch.setattr(config, "gpu_name", lambda: found)
    assert config.detect_profile() == profile
    assert resolve("auto").profile == profile
    real = "smollm2-cpu" if profile == "tiny-cpu" else profile
    assert config.detect_profile("me/my-model") == real


def test_a_real_model_without_a_gpu_gets_sizes_for_one(monkeypatch):
    monkeypatch.setattr(config, "gpu_name", lambda: "")
    chosen = resolve("auto", {"model.model_name": "earlier"}, {"model.model_name": "/models/mine"})
    assert (chosen.profile, chosen.model.model_name) == ("smollm2-cpu", "/models/mine")
    sources = {chosen.sources[setting] for setting in SIZES - {"model.model_name"}}
    assert sources == {"profile smollm2-cpu"} and chosen.sources["model.model_name"] == "set"


@pytest.mark.parametrize(
    ("driver", "capability", "fault"),
    [
        ("580.65.06", "7.5", ""),
        ("[N/A]", "[N/A]", ""),
        ("575.57", "9.0", "the NVIDIA driver 575.57 is too old: CUDA 13 needs 580 or later"),
        ("580.95", "7.0", "this GPU, 7.0 is too old: CUDA 13 needs 7.5 or later"),  # a V100
    ],
)
def test_what_cuda_13_cannot_use_is_said_and_gets_the_cpus_profile(
    driver, capability, fault, tmp_path, monkeypatch, capsys
):
    answers = f"*driver*) echo {driver};; *cap*) echo {capability};; *) echo Tesla T4, 15360 MiB;;"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.gpu_fault().endswith(fault) and bool(machine.gpu_fault()) == bool(fault)
    assert config.detect_profile() == ("tiny-cpu" if fault else "t4-16gb")
    main(["doctor"])
    assert (fault or "Tesla T4, 15360 MiB") in capsys.readouterr().out
