"""A dry run of the largest step: what it finds, and that it leaves no trace."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from trainings import MATH, comparable, trainer_of

from grpo_nb import models
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve
from grpo_nb.training import preflight

SETTINGS = {"grpo.max_steps": 2, "grpo.per_device_train_batch_size": 16, "train.eval_steps": 0}
CONFIG = resolve("tiny-cpu", SETTINGS)
ASKED = {a: build_prompt(f"What is {a} + {a + 3}?", MATH.form.system_prompt) for a in range(3, 60)}
ROWS = [{"prompt": prompt, "answer": str(2 * a + 3)} for a, prompt in ASKED.items()]


@pytest.fixture(scope="module")
def policy():
    return models.load_policy(CONFIG)


@pytest.fixture
def build(policy, runs_dir):
    """(rows, **settings) -> a trainer over the policy."""
    run = Run("flight")
    return lambda rows=ROWS, **more: trainer_of(run, policy, rows=rows, **SETTINGS | more)


@pytest.fixture
def trainer(policy, build):
    """A new trainer over the adapter as it was at the start."""
    named = list(policy.model.named_parameters())
    before = [(p, p.detach().clone(), p.requires_grad) for name, p in named if "lora_" in name]
    yield build()
    for parameter, value, trained in before:
        parameter.data, parameter.requires_grad, parameter.grad = value, trained, None


def line(found, name):
    return next(check for check in found if check.name == name)


def test_a_sound_training_passes_and_is_predicted(trainer, capsys):
    found = preflight.preflight(trainer)
    told = r"preflight: the largest step is tried …\npreflight: 6 checks passed in \d+ s\n"
    assert re.search(told, capsys.readouterr().out)
    assert {c.state for c in found} == {"ok"} and {c.fix for c in found} == {""}
    names = "context, end of turn, sampling, memory, gradient, time"
    assert ", ".join(check.name for check in found) == names
    assert line(found, "gradient").evidence == "reaches 28 of 28 trained matrices"
    assert re.match(r"longest prompt \d+ \+ completion 48 = ", line(found, "context").evidence)
    said = line(found, "time").evidence
    [times] = re.findall(r"at most ([\d.]+) s .*; 2 steps ([\d.]+) min", said)
    seconds, minutes = map(float, times)
    assert 0 < seconds < 60 and minutes == pytest.approx(2 * seconds / 60, abs=0.1)
    assert 0.1 < float(line(found, "memory").evidence.partition(" GiB")[0]) < 8
    found.refuse()


@pytest.fixture
def passes(policy):
    """[(tokens, is its first layer checkpointed?)] of each forward pass that trains."""
    noted, layer = [], policy.model.get_base_model().model.layers[0]

    def note(module, args, kwargs):
        if torch.is_grad_enabled():
            is_checkpointed = layer.gradient_checkpointing and layer.training
            noted.append((kwargs["input_ids"].numel(), is_checkpointed))

    with policy.model.register_forward_pre_hook(note, with_kwargs=True):
        yield noted
    policy.model.gradient_checkpointing_disable()


def test_a_training_after_it_is_bit_for_bit_the_same_and_has_no_larger_step(
    trainer, policy, build, passes
):
    """TRL's trainer on a CPU; in tests/gpu_on_cpu is what Unsloth's checkpoints.

    The rows of the trial share as many prompts as those of a real micro-batch.
    """
    adapter = [p for name, p in policy.model.named_parameters() if "lora_" in name]
    start = [parameter.detach().clone() for parameter in adapter]
    outcomes = []
    for flown in (False, True):
        for parameter, value in zip(adapter, start, strict=True):
            parameter.data = value.clone()
        policy.model.updated_in = None  # its weights are those of a policy that was just loaded
        again = build()
        again.args.gradient_checkpointing = True
        passes.clear()
        if flown:
            preflight.preflight(again)
            assert all(parameter.grad is None for parameter in adapter)
        again.train()
        lines = comparable(again.stage.run)
        outcomes.append((lines, [parameter.detach().clone() for parameter in adapter]))
        shutil.rmtree(again.folder)  # else the next one would have nothing to train
    (plain, weights), (after, weights_after) = outcomes
    assert [line["step"] for line in plain] == [1, 2]
    assert plain == after
    assert all(map(torch.equal, weights, weights_after))
    (trial, *sizes), flags = zip(*passes, strict=True)
    assert trial / 2 < max(sizes) <= trial and all(flags)


@pytest.mark.parametrize(("rows", "epochs", "iterations"), [(11, 1, 1), (9, 1.5, 2)])
def test_the_steps_of_epochs_are_counted_as_the_training_counts_them(
    build, rows, epochs, iterations
):
    more = {"grpo.num_iterations": iterations, "grpo.gradient_accumulation_steps": 2}
    again = build(ROWS[:rows], **more)
    again.args.max_steps, again.args.num_train_epochs = -1, epochs
    evidence = line(preflight.preflight(again), "time").evidence
    *_, steps = again.set_initial_training_values(again.args, again.get_train_dataloader())
    assert f"; {steps} steps " in evidence


def test_a_frozen_adapter_stops(trainer, policy):
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad = False
    found = preflight.preflight(trainer)
    assert line(found, "gradient").state == "stop"
    assert line(found, "gradient").evidence == "reaches 0 of 28 trained matrices"
    with pytest.raises(ValueError, match="gradient: reaches 0 of 28"):
        found.refuse()
    found.refuse(force=True)


@pytest.mark.parametrize(
    ("words", "do"), [(150, r"set max_seq_length = \d+"), (400, "the model reads no more")]
)
def test_a_prompt_longer_than_the_context_stops_before_the_step(build, words, do):
    long = {"prompt": [{"role": "user", "content": "12 " * words}], "answer": "1"}
    found = preflight.preflight(build([*ROWS, long], **{"model.max_seq_length": 304}))
    assert line(found, "context").state == "stop"
    assert re.search(do, line(found, "context").fix)
    assert "gradient" not in [check.name for check in found]


def test_too_small_a_memory_says_what_to_lower(trainer, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    memory = line(preflight.preflight(trainer), "memory")
    assert memory.state in ("stop", "warning")
    assert memory.fix.startswith("lower per_device_train_batch_size and raise")
    assert memory.fix.endswith("; see docs/troubleshooting.md#memory")


TRAINED = """
import json, resource
from test_preflight import ROWS, SETTINGS, Run, line, preflight, trainer_of
settings = SETTINGS | {"grpo.max_steps": 10, "policy.backend": "transformers"}
trainer = trainer_of(Run("peak"), rows=ROWS, **settings)
said = line(preflight.preflight(trainer), "memory").evidence
trainer.train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([float(said.partition(" GiB")[0]), peak]))
"""


def test_the_memory_that_is_said_is_the_peak_of_a_training(runs_dir):
    """In a process of its own: this one holds what other tests left, a fork lacks the libraries."""
    folders = [PROJECT_ROOT, PROJECT_ROOT / "tests", PROJECT_ROOT / "tests/training"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    (runs_dir / "trained.py").write_text(TRAINED)
    command = [sys.executable, str(runs_dir / "trained.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said, peak = json.loads(done.stdout.splitlines()[-1])
    assert 0.8 * peak <= said <= 1.2 * peak, f"said {said:.2f} GiB, peak {peak:.2f} GiB"


@pytest.mark.parametrize("part", ["the update", "generation"])
def test_an_out_of_memory_error_becomes_a_line(trainer, policy, part):
    def full(module, inputs):
        if torch.is_grad_enabled() == (part == "the update"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer.samples_densely = False  # the hook is on the policy
    with policy.model.get_input_embeddings().register_forward_pre_hook(full):
        found = preflight.preflight(trainer)
    memory = line(found, "memory")
    assert memory.state == "stop"
    assert memory.evidence.startswith(f"{part} ran out of memory")
    assert memory.fix.startswith(preflight.SMALLER)
    assert "time" not in [check.name for check in found]


def test_any_other_error_is_raised_and_leaves_no_trace(trainer, policy):
    def broken(module, inputs, output):
        raise RuntimeError("shapes differ")

    random_state = torch.get_rng_state()
    with (
        policy.model.get_input_embeddings().register_forward_hook(broken),
        pytest.raises(RuntimeError, match="shapes differ"),
    ):
        preflight.preflight(trainer)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert trainer._metrics["train"] == {}
    assert not hasattr(trainer, "current_gradient_accumulation_steps")


def test_completions_that_cannot_end_are_found(policy):
    def found(stops, template=policy.tokenizer.chat_template):
        tokenizer = copy.deepcopy(policy.tokenizer)
        tokenizer.chat_template = template
        trainer = SimpleNamespace(processing_class=tokenizer, eos_token_ids=stops)
        return preflight._end_of_turn(trainer, ROWS[0])[0].state

    end = policy.tokenizer.eos_token_id
    without = policy.tokenizer.chat_template.replace("<|im_end|>", "")
    assert found([end], without) == found([None]) == found([end + 1]) == "stop"
    assert found([end + 1, end]) == "ok", "either ends a turn"
