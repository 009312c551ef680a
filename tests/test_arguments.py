"""TRL's arguments: unknown ones refused, all of them shown, silent changes named."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest
from rich.console import Console

from grpo_nb.models import checkpoint
from grpo_nb.pipeline import notebooks as pipeline
from grpo_nb.runs import Run, Stage, trl_arguments
from grpo_nb.runs.config import parse_assignment, resolve
from grpo_nb.training import arguments

SET_HERE = {"train.max_steps": 7, "trl.epsilon": 0.1}


@pytest.fixture
def stage(runs_dir):
    config = resolve("l4-24gb", {"task": "code", "seed": 3}, SET_HERE)
    return Stage(Run("a"), "03", config, SET_HERE)


@pytest.fixture
def table(stage):
    from trl import GRPOConfig

    passed = arguments.grpo_arguments(stage.config, stage.run / "train", vllm=False)
    args = GRPOConfig(**passed), arguments.alone(passed)
    return arguments.effective(*args, passed, stage).set_index("argument")


def test_the_fields_read_from_source_are_those_of_the_class():
    from dataclasses import fields

    from trl import GRPOConfig

    assert set(trl_arguments.trl_fields()) == {field.name for field in fields(GRPOConfig)}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trl.epsilom=0.1", r"'trl.epsilom': did you mean 'trl.epsilon'"),
        ("trl.max_stepz=3", r"'trl.max_stepz': did you mean 'train.max_steps'"),
        ("trl.max_steps=3", "trl.max_steps is decided by train.max_steps: set that instead"),
        ("trl.seed=3", "decided by seed"),
        ("trl.max_prompt_length=64", "decided by data.max_prompt_tokens"),
        ("trl.output_dir=x", "the stages need it as it is"),
        ("trl.epsilon=0,1", r"trl.epsilon = \(0, 1\) is of type tuple, and TRL wants float"),
        ("trl.epsilon=True", "of type bool, and TRL wants float"),
        ("trl.top_k=0.5", "of type float, and TRL wants int"),
        ("trl.fp16=true", "trl.fp16 = 'true' is of type str, and TRL wants bool"),
        ("trl.chat_template_kwargs=[1]", r"of type list, and TRL wants dict \| str \| None"),
        ("trl.max_grad_norm=1e999", "trl.max_grad_norm = inf: write a finite number"),
    ],
)
def test_an_argument_that_trl_does_not_take_is_refused(assignment, message):
    config = resolve("tiny-cpu", dict([parse_assignment(assignment)]))
    with pytest.raises(ValueError, match=message):
        trl_arguments.refuse_unknown_trl(config)


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
def test_an_argument_of_trl_reaches_it(assignment, tmp_path):
    from trl import GRPOConfig

    name, value = parse_assignment(assignment)
    config = resolve("tiny-cpu", {name: value})
    trl_arguments.refuse_unknown_trl(config)
    if value is not True:  # fp16 wants a GPU
        built = GRPOConfig(**arguments.grpo_arguments(config, tmp_path, vllm=False))
        assert getattr(built, name.removeprefix("trl.")) == value


def test_the_check_needs_neither_torch_nor_trl():
    """Imported before Unsloth, TRL would be without Unsloth's patches."""
    probe = (
        "from grpo_nb.runs.trl_arguments import refuse_unknown_trl; import sys\n"
        "from grpo_nb.runs.config import resolve\n"
        "refuse_unknown_trl(resolve('tiny-cpu', {'trl.epsilon': 0.1})); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "trl", "transformers", "unsloth"}


def test_the_pipeline_refuses_it_before_anything_starts(runs_dir):
    with pytest.raises(ValueError, match=r"did you mean 'trl.epsilon'"):
        pipeline.run_pipeline("x", "tiny-cpu", {"trl.epsilom": 0.1}, console=Console(quiet=True))
    assert not (runs_dir / "x/notebooks").exists()


def test_every_argument_is_there_with_who_decided_it(table):
    assert set(table.index) == set(trl_arguments.trl_fields())
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
    assert changed["generation_batch_size"] == "TRL: None → 32"
    assert changed["steps_per_generation"] == "TRL: None → 4"
    assert changed["epsilon_high"] == "TRL reads epsilon: 0.1"
    assert changed["max_steps"] == changed["report_to"] == ""


def test_what_a_trainer_changes_afterwards_is_named(stage):
    from trl import GRPOConfig

    passed = arguments.grpo_arguments(stage.config, stage.run / "train", vllm=False)
    args = GRPOConfig(**passed)
    args.weight_decay = 0.5
    table = arguments.effective(args, arguments.alone(passed), passed, stage)
    table = table.set_index("argument")
    assert table["changed"]["weight_decay"] == "the trainer: 0.0 → 0.5"


def test_the_short_form_leaves_out_the_defaults_and_the_long_one_is_written(table, stage):
    short = arguments.notable(table.reset_index())
    assert len(short) < 45
    assert {"max_steps", "generation_batch_size"} <= set(short["argument"])
    assert "adam_beta1" not in set(short["argument"])
    path = arguments.write_arguments(stage.run, table.reset_index())
    assert path == stage.run / "train/arguments.csv"
    assert len(pd.read_csv(path)) == len(table)


UNSLOTHS = """
import json, sys
import unsloth
from unsloth.models import rl  # on a GPU `import unsloth` does it; this makes the same class
import trl
from pathlib import Path
from grpo_nb.runs.config import resolve
from grpo_nb.runs import Run, Stage
from grpo_nb.training import arguments
found = {}
for loss in ("dapo", "bnpo", "dr_grpo", "cispo"):
    for extra in ({}, {"trl.epsilon_high": 0.3, "trl.mask_truncated_completions": False}):
        stage = Stage(Run("u"), "03", resolve("tiny-cpu", {"train.loss_type": loss, **extra}), {})
        passed = arguments.grpo_arguments(stage.config, Path(sys.argv[1]), vllm=False)
        both = trl.GRPOConfig(**passed), arguments.alone(passed)
        table = arguments.effective(*both, passed, stage)
        changed = table.set_index("argument")["changed"]
        name = loss + " set" * bool(extra)
        found[name] = {k: v for k, v in changed.items() if "Unsloth" in v}
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
    kept = {name: {k: v for k, v in was.items() if k in papers} for name, was in found.items()}
    assert kept == {
        "dapo": {
            "epsilon_high": "Unsloth: None → 0.28",
            "mask_truncated_completions": "Unsloth: False → True",
        },
        "cispo": {"epsilon_high": "Unsloth: None → 5.0"},
        "dr_grpo": {"scale_rewards": "Unsloth: group → none"},
        "dr_grpo set": {"scale_rewards": "Unsloth: group → none"},
        **{"bnpo": {}, "dapo set": {}, "cispo set": {}, "bnpo set": {}},
    }
    for was in found.values():
        assert was["vllm_importance_sampling_correction"] == "Unsloth: True → False"
        assert was["weight_decay"] == "Unsloth: 0.0 → 0.001"


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp16")])
def test_precision_is_what_the_gpu_computes_in(native, precision, monkeypatch, tmp_path):
    import torch

    for module in (arguments, checkpoint):
        monkeypatch.setattr(module, "cuda_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation
    )
    passed = arguments.grpo_arguments(resolve("t4-16gb"), tmp_path, vllm=True)
    assert [name for name in ("bf16", "fp16") if passed[name]] == [precision]
    passed = arguments.grpo_arguments(resolve("t4-16gb", {"trl.fp16": True}), tmp_path, vllm=True)
    assert ("bf16" in passed, passed["fp16"]) == (False, True)


@pytest.mark.parametrize("native", [True, False])
def test_on_a_cpu_it_is_bf16_or_fp32_as_the_policy_s_weights(native, monkeypatch, tmp_path):
    """bf16 is emulated by most CPUs, several times slower than fp32; TRL's default is bf16."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": native})
    passed = arguments.grpo_arguments(resolve("tiny-cpu"), tmp_path, vllm=False)
    assert (passed["bf16"], passed["fp16"]) == (native, False)
    assert checkpoint.weights_dtype() == (torch.bfloat16 if native else torch.float32)


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(tmp_path):
    config = resolve("tiny-cpu", {"train.report_to": "no_such_tracker, none"})
    with pytest.raises(RuntimeError, match="pip install no_such_tracker, or set it to 'none'"):
        arguments.grpo_arguments(config, tmp_path, vllm=False)
