"""TRL's arguments: unknown ones refused, all of them shown, silent changes named."""

import json
import os
import subprocess
import sys

import pytest
from rich.console import Console
from trainings import MATH, arguments_of

from grpo_nb.models import Policy, checkpoint
from grpo_nb.pipeline import notebooks as pipeline
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import parse_assignment, resolve
from grpo_nb.training import arguments

NOBODY = Policy(None, None, False)
SET_HERE = {"train.max_steps": 7, "trl.epsilon": 0.1}


@pytest.fixture
def stage(runs_dir):
    config = resolve("l4-24gb", {"task": "code", "seed": 3}, SET_HERE)
    return Stage(Run("a"), "03", config)


@pytest.fixture
def table(stage):
    from trl import GRPOConfig

    args = GRPOConfig(**arguments.grpo_arguments(stage, NOBODY, MATH))
    return arguments.effective(args, stage, NOBODY, MATH).set_index("argument")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trl.epsilom=0.1", r"'trl.epsilom': did you mean 'trl.epsilon'"),
        ("trl.max_stepz=3", r"'trl.max_stepz': did you mean 'train.max_steps'"),
        ("trl.max_steps=3", "trl.max_steps is decided by train.max_steps: set that instead"),
        ("trl.seed=3", "decided by seed"),
        ("trl.max_prompt_length=64", "decided by data.max_prompt_tokens"),
        ("trl.output_dir=x", "the stages need it as it is"),
        ("trl.epsilon=0,1", r"trl.epsilon = \(0, 1\): Input should be a valid number"),
        ("trl.epsilon=True", "Input should be a valid number"),
        ("trl.top_k=0.5", "Input should be a valid integer"),
        ("trl.fp16=true", "trl.fp16 = 'true': Input should be a valid boolean"),
        (
            "trl.chat_template_kwargs=[1]",
            "valid dictionary; Input should be a valid string",
        ),
        ("trl.max_grad_norm=1e999", "trl.max_grad_norm = inf: Input should be a finite number"),
    ],
)
def test_an_argument_that_trl_does_not_take_is_refused(assignment, message):
    config = resolve("tiny-cpu", dict([parse_assignment(assignment)]))
    with pytest.raises(ValueError, match=message):
        arguments.refuse_unknown_trl(config)


@pytest.mark.parametrize(
    "assignment",
    [
        "trl.epsilon_high=0.28",
        "trl.epsilon=1",
        "trl.top_entropy_quantile=0.2",
        "trl.fp16=True",
        "trl.lr_scheduler_type=cosine",
        "trl.chat_template_kwargs={'enable_thinking': False}",
        "trl.importance_sampling_level=sequence",
    ],
)
def test_an_argument_of_trl_reaches_it(assignment, runs_dir):
    from trl import GRPOConfig

    name, value = parse_assignment(assignment)
    config = resolve("tiny-cpu", {name: value})
    arguments.refuse_unknown_trl(config)
    if value is not True:  # fp16 wants a GPU
        built = GRPOConfig(**arguments_of(config))
        assert getattr(built, name.removeprefix("trl.")) == value


def test_the_pipeline_refuses_it_before_anything_starts(runs_dir):
    with pytest.raises(ValueError, match=r"did you mean 'trl.epsilon'"):
        pipeline.run_pipeline("x", "tiny-cpu", {"trl.epsilom": 0.1}, console=Console(quiet=True))
    assert not (runs_dir / "x/notebooks").exists()


def test_every_argument_is_there_with_who_decided_it(table):
    from dataclasses import fields

    from trl import GRPOConfig

    assert set(table.index) == {field.name for field in fields(GRPOConfig)}
    decided = {
        "max_steps": (7, "set here"),
        "epsilon": (0.1, "set here"),
        "seed": (3, "config.yaml"),
        "learning_rate": (1e-5, "profile l4-24gb"),
        "beta": (0.0, "grpo_nb"),
        "disable_tqdm": (True, "grpo_nb"),
        "weight_decay": (0.0, "TRL's default"),
    }
    for name, value_and_source in decided.items():
        assert tuple(table.loc[name, ["value", "from"]]) == value_and_source, name


def test_what_trl_itself_changes_is_named(table):
    changed = table["changed"]
    assert changed["generation_batch_size"] == "None → 32"
    assert changed["steps_per_generation"] == "None → 4"
    assert changed["max_steps"] == changed["report_to"] == ""


def test_what_a_cell_changes_is_named(stage):
    from trl import GRPOConfig

    args = GRPOConfig(**arguments.grpo_arguments(stage, NOBODY, MATH))
    args.weight_decay = 0.5
    table = arguments.effective(args, stage, NOBODY, MATH).set_index("argument")
    assert table["changed"]["weight_decay"] == "0.0 → 0.5"


def test_the_short_form_leaves_out_the_defaults(table):
    short = arguments.notable(table.reset_index())
    assert len(short) < 45
    assert {"max_steps", "generation_batch_size"} <= set(short["argument"])
    assert "adam_beta1" not in set(short["argument"])


UNSLOTHS = """
import json, sys
import unsloth
from unsloth.models import rl  # on a GPU `import unsloth` does it; this makes the same class
import trl
from grpo_nb.models import Policy
from grpo_nb.rewards import load_preset
from grpo_nb.runs.config import resolve
from grpo_nb.runs import Run, Stage
from grpo_nb.training import arguments
found = {}
for loss in ("dapo", "bnpo", "dr_grpo", "cispo"):
    for extra in ({}, {"trl.epsilon_high": 0.3, "trl.mask_truncated_completions": False}):
        stage = Stage(Run("u"), "03", resolve("tiny-cpu", {"train.loss_type": loss, **extra}))
        policy, rewards = Policy(None, None, False), load_preset("math")
        args = trl.GRPOConfig(**arguments.grpo_arguments(stage, policy, rewards))
        table = arguments.effective(args, stage, policy, rewards)
        found[loss + " set" * bool(extra)] = dict(table.set_index("argument")["changed"])
print(json.dumps(found))
"""


@pytest.mark.gpu  # Unsloth's own GRPOConfig is made where triton is
def test_what_unsloth_changes_on_a_gpu_is_named(tmp_path):
    """By the class that it builds there; it can be built on a CPU, though not trained with."""
    places = {"UNSLOTH_COMPILE_LOCATION": str(tmp_path / "c"), "GRPO_NB_RUNS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", UNSLOTHS, str(tmp_path / "train")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **places},
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    papers = {"epsilon_high", "mask_truncated_completions", "scale_rewards", "beta"}
    kept = {n: {k: v for k, v in was.items() if v and k in papers} for n, was in found.items()}
    assert kept == {
        "dapo": {
            "epsilon_high": "None → 0.28",
            "mask_truncated_completions": "False → True",
        },
        "cispo": {"epsilon_high": "None → 5.0"},
        "dr_grpo": {"scale_rewards": "group → none"},
        "dr_grpo set": {"scale_rewards": "group → none"},
        **{"bnpo": {}, "dapo set": {}, "cispo set": {}, "bnpo set": {}},
    }
    for was in found.values():
        assert was["vllm_importance_sampling_correction"] == "True → False"
        assert was["weight_decay"] == "0.0 → 0.001"


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp16")])
def test_precision_is_what_the_gpu_computes_in(native, precision, monkeypatch, runs_dir):
    import torch

    for module in (arguments, checkpoint):
        monkeypatch.setattr(module, "cuda_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation
    )
    passed = arguments_of(resolve("t4-16gb"), vllm=True)
    assert [name for name in ("bf16", "fp16") if passed[name]] == [precision]
    passed = arguments_of(resolve("t4-16gb", {"trl.fp16": True}), vllm=True)
    assert ("bf16" in passed, passed["fp16"]) == (False, True)


@pytest.mark.parametrize("native", [True, False])
def test_on_a_cpu_it_is_bf16_or_fp32_as_the_policy_s_weights(native, monkeypatch, runs_dir):
    """bf16 is emulated by most CPUs, several times slower than fp32; TRL's default is bf16."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": native})
    passed = arguments_of(resolve("tiny-cpu"))
    assert (passed["bf16"], passed["fp16"]) == (native, False)
    assert checkpoint.weights_dtype() == (torch.bfloat16 if native else torch.float32)
