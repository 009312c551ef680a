"""Batches that divide, profiles that fit their GPU, and the choice among them."""

import importlib.util
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb import machine
from grpo_nb.pipeline import doctor
from grpo_nb.runs import PROJECT_ROOT, config, profiles
from grpo_nb.runs.batch import Batch, solve_batch

GPUS = [profile for profile in profiles.PROFILES if profile != "tiny-cpu"]
# Qwen2.5's public figures: parameters and those of the embeddings [10^9], layers, hidden and
# MLP width, width of keys and values.
QWEN = {
    "0.5B": (0.49, 0.14, 24, 896, 4864, 128),
    "1.5B": (1.54, 0.23, 28, 1536, 8960, 256),
    "7B": (7.61, 1.09, 28, 3584, 18944, 512),
    "14B": (14.8, 1.56, 48, 5120, 13824, 1024),
}
VOCABULARY = 151_936
PLAIN = {"policy.backend": "transformers"}


@given(*(st.integers(1, 64), st.integers(2, 32), st.integers(1, 300), st.integers(1, 8)))
def test_a_solved_batch_is_the_step_and_the_largest_that_fits(prompts, group, rows, processes):
    completions = prompts * group
    if completions % processes:
        with pytest.raises(ValueError, match="cannot be shared") as refusal:
            solve_batch(prompts, group, rows, processes)
        nearest = int(str(refusal.value).rpartition("take ")[2].split()[0])
        solve_batch(nearest, group, rows, processes)
        return
    batch = solve_batch(prompts, group, rows, processes)
    share = completions // processes
    assert batch.per_device_train_batch_size * batch.gradient_accumulation_steps == share
    larger = range(batch.per_device_train_batch_size + 1, min(rows, share) + 1)
    assert batch.per_device_train_batch_size <= rows
    assert all(share % size for size in larger)


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [
        ((8, 8, 64), Batch(64, 1)),  # all at once
        ((8, 8, 63), Batch(32, 2)),
        ((4, 8, 8, 2), Batch(8, 2)),
        ((1, 7, 6), Batch(1, 7)),  # a prime group goes whole or one by one
    ],
)
def test_batches(arguments, batch):
    assert solve_batch(*arguments) == batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 5, 8, 4), r"3 prompts x 5 .* = 15 cannot be shared by 4 processes: take 4 prompts"),
        ((3, 4, 8, 8), "take 4 prompts"),
        ((0, 8, 8), "0 prompts x 8"),
        ((4, 1, 8), "a group has at least 2"),
        ((4, 8, 0), "in passes of 0"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_with_the_nearest(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve_batch(*arguments)


@pytest.mark.parametrize("task", profiles.TASKS)
@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_every_profile_with_every_task_is_valid_and_divides(profile, task):
    train = config.resolve(profile, {"task": task}).train
    rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
    prompts, rest = divmod(rows, train.num_generations)
    assert rest == 0
    assert solve_batch(prompts, train.num_generations, train.per_device_train_batch_size) == (
        train.per_device_train_batch_size,
        train.gradient_accumulation_steps,
    )


def estimate(settings):
    """(update, generation): what either needs at its worst [GiB], from public figures.

    Weights (embeddings stay in 16 bit, the rest at 2 bytes or NF4's 0.56 with its scales), the
    adapter in fp32 with gradient and 8-bit Adam (10 bytes), a pass's activations (a checkpoint
    a layer, one layer's inside, fp32 logits of one row), and a step's keys and values.
    """
    size = settings.model.model_path.removeprefix("Qwen/Qwen2.5-").removesuffix("-Instruct")
    parameters, embeddings, layers, hidden, mlp, kv = QWEN[size]
    inner = {"4bit": 0.56, "16bit": 2}[settings.model.quantization]
    weights = embeddings * 2e9 + (parameters - embeddings) * 1e9 * inner
    ends = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + mlp)  # q o, k v, the MLP
    lora = settings.model.lora_rank * layers * ends * 10
    train = settings.train
    tokens = settings.data.max_prompt_tokens + train.max_completion_length
    rows = train.per_device_train_batch_size
    activations = 2 * rows * tokens * (layers * hidden + 4 * hidden + 3 * mlp)
    logits = 3 * 4 * train.max_completion_length * VOCABULARY
    cache = 2 * 2 * layers * kv * tokens * rows * train.gradient_accumulation_steps
    return tuple(
        part / 2**30 for part in (weights + lora + activations + logits, weights + lora + cache)
    )


@pytest.mark.parametrize("profile", GPUS)
def test_a_profile_fits_its_gpu(profile):
    settings = config.resolve(profile)
    update, generation = estimate(settings)
    memory, share = profiles.MEMORY_GIB[profile], settings.policy.gpu_memory_utilization
    if settings.policy.standby:  # of 40 GB and more: unsloth_zoo/vllm_utils.py 2026.10.9, load_vllm
        share = 0.925 * 0.95
    reserved = 0 if settings.policy.standby else generation
    assert generation < share * memory, "keys and values of a step do not fit into vLLM's share"
    assert update + reserved + 2 < memory, "CUDA and vLLM's own take some 2 GiB"


@pytest.mark.parametrize(("more", "shown"), [({}, "set by Unsloth"), (PLAIN, 0.5)])
def test_a_share_that_unsloth_decides_is_not_shown_as_ours(more, shown):
    rows = config.describe(config.resolve("a100-80gb", more), {}, "policy")
    assert next(r["value"] for r in rows if r["setting"].endswith("utilization")) == shown


def test_full_fine_tuning_in_32_bit_needs_what_the_settings_page_says():
    """Weights and gradients in fp32, 8-bit Adam, and the bf16 copies that autocast keeps."""
    page = (PROJECT_ROOT / "docs/settings.md").read_text(encoding="utf-8")
    for size, (parameters, *_) in QWEN.items():
        gib = parameters * 1e9 * (4 + 4 + 2 + 2) / 2**30
        assert f"{size.replace('B', ' B')} {gib:.0f} GiB" in page


@pytest.mark.parametrize(
    ("found", "profile"),
    [
        ("", "tiny-cpu"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU, 6144 MiB", "tiny-cpu"),
        ("NVIDIA GeForce RTX 3060, 12288 MiB", "tiny-cpu"),
        ("Tesla T4, 15360 MiB", "t4-16gb"),
        ("NVIDIA L4, 23034 MiB", "l4-24gb"),
        ("NVIDIA A10G, 23028 MiB", "l4-24gb"),
        ("NVIDIA GeForce RTX 4090, 24564 MiB", "l4-24gb"),
        ("NVIDIA GeForce RTX 5090, 32607 MiB", "l4-24gb"),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB", "a100-40gb"),
        ("NVIDIA L40S, 46068 MiB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3, 81559 MiB", "h100-80gb"),
        ("NVIDIA GH200 480GB, 97871 MiB", "a100-80gb"),
        ("NVIDIA H200, 143771 MiB", "h200-141gb"),
        ("NVIDIA B200, 183359 MiB", "h200-141gb"),
        ("NVIDIA GB10, [N/A]", "tiny-cpu"),  # shares the machine's memory: nothing to go by
    ],
)
def test_the_profile_is_the_largest_that_fits(found, profile, monkeypatch):
    monkeypatch.setattr(profiles, "gpu_name", lambda: found)
    assert profiles.detect_profile() == profile
    assert config.resolve("auto").profile == profile


def answer_as_nvidia_smi(answers, folder, monkeypatch):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def doctors(name):
    return next(check for check in doctor.examine() if check.name == name)


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
    driver, capability, fault, tmp_path, monkeypatch
):
    answers = f"*driver*) echo {driver};; *cap*) echo {capability};; *) echo Tesla T4, 15360 MiB;;"
    answer_as_nvidia_smi(answers, tmp_path, monkeypatch)
    assert machine.gpu_fault().endswith(fault) and bool(machine.gpu_fault()) == bool(fault)
    assert profiles.detect_profile() == ("tiny-cpu" if fault else "t4-16gb")
    line = doctors("gpu")
    assert line.state == ("stop" if fault else "ok")
    assert line.evidence.endswith(fault or "Tesla T4, 15360 MiB")


def test_the_doctor_names_the_plugin_for_4_bit_and_the_way_to_one_gpu(tmp_path, monkeypatch):
    """Two GPUs are claimed; which packages are there is this machine's own."""
    answer_as_nvidia_smi("*) echo NVIDIA L4; echo NVIDIA L4;;", tmp_path, monkeypatch)
    told = doctors("gpu").evidence
    assert "2 GPUs are visible: for Unsloth export CUDA_VISIBLE_DEVICES=0" in told
    plugin = doctors("engine vllm_bnb_plugin")
    there = importlib.util.find_spec("vllm_bnb_plugin") is not None
    assert (plugin.state, plugin.fix) == (("ok", "") if there else ("stop", "make install GPU=1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "visible" not in doctors("gpu").evidence
