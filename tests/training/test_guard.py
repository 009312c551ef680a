"""A training whose samples are not the policy's is stopped before it learns from them.

Each fault is put into the path by which a real trainer of the tiny base samples.
"""

import copy
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import LoraLayer
from sampling_faults import FAULTS, RARER, leaves_the_adapter_out
from test_monitor import stock as plain
from trainings import comparable, make_run, trainer_of

import grpo_nb
from grpo_nb.stages.trainer import RunTrainer
from grpo_nb.training import guard, stock

WHOLE = {"grpo.per_device_train_batch_size": 64, "grpo.gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One trainer for all faults, with an adapter that does something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        trainer = trainer_of(make_run("here"), **WHOLE, **{"train.guard_steps": 50})
        torch.manual_seed(0)
        for weight in guard.changeable(trainer):
            weight.data.normal_(std=0.05)
        yield trainer


@pytest.fixture
def one(trained):
    trained.samples_densely, trained._dense, trained.guard.looks = True, None, []
    trained.guard.noise = guard.NOISE
    torch.manual_seed(0)
    return trained


@pytest.mark.parametrize("name", FAULTS)
def test_samples_that_are_not_the_policys_stop_the_training(one, monkeypatch, name):
    fault, words = FAULTS[name]
    fault(one, monkeypatch)
    with pytest.raises(RuntimeError, match=f"^stopped before step 1: .*{words}.*leave out the gu"):
        one.guard()


@pytest.mark.parametrize(("rounded", "true"), [(1.9, False), (9.0, True)])
def test_an_accusation_must_hold_with_less_noise(one, monkeypatch, rounded, true):
    """Large noise amplifies what a GPU's kernels round, and so the samples seem too rare."""
    seen = iter([(5.1, 8.7), (4.9, 4.4), (rounded, 2.2)])

    def look(*_):
        score, change = next(seen)
        return guard.Evidence(score, float("nan"), change, entropy=2.0, tokens=640, gain=1.0)

    monkeypatch.setattr(one.guard, "_look", look)
    with pytest.raises(RuntimeError, match=r"score 9\.0") if true else nullcontext():
        one.guard()
    assert next(seen, None) is None
    assert one.guard.noise == guard.NOISE / 4


@pytest.mark.parametrize("copied", [True, False])
def test_the_policys_own_samples_do_not(one, copied):
    one.samples_densely = copied
    one.guard()
    seen = one.guard.looks[-1]
    assert abs(seen.score) < guard.SCORE
    assert seen.tokens > 300 and seen.change > guard.CHANGE and seen.entropy > guard.ENTROPY


def test_dropout_is_named_and_is_no_reason_to_stop(tmp_path, capsys):
    trainer = plain(tmp_path, max_steps=1)
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    assert dict((c.name, c.state) for c in grpo_nb.preflight(trainer))["sampling"] == "warning"
    one = guard.Guard(trainer)
    trainer.train()
    assert "warning: before step 1: dropout = 0.3: each pass" in capsys.readouterr().out
    assert all(abs(look.score) < guard.SCORE for look in one.looks)
    assert trainer.model.training


DISTORTIONS = {  # arguments of the trainer
    "top_p = 0.9": ("top_p", 0.9),
    "repetition_penalty = 1.2": ("repetition_penalty", 1.2),
    "temperature = 0.7": ("generation_kwargs", {"temperature": 0.7}),
    "min_p = 0.1": ("vllm_sampling_params", SimpleNamespace(min_p=0.1, top_p=1.0, top_k=-1)),
}


@pytest.mark.parametrize("name", DISTORTIONS)
def test_an_argument_that_distorts_samples_has_a_name(one, monkeypatch, name):
    monkeypatch.setattr(one.args, *DISTORTIONS[name], raising=False)
    assert stock.distorted(one.args) == name


def test_samples_that_are_cut_as_asked_are_likelier_but_not_rarer(one, monkeypatch, capsys):
    """By transformers' own generate; another policy's samples are found all the same."""
    monkeypatch.setattr(one.args, "top_p", 0.8)
    FAULTS["top_p"][0](one, monkeypatch)
    states = {each.name: each for each in grpo_nb.preflight(one)}
    assert (states["sampling"].state, states["gradient"].state) == ("warning", "ok")
    cut = "top_p = 0.8, and so the samples are not quite"
    assert states["sampling"].evidence.startswith(cut)
    one.guard()
    assert f"before step 1: {cut}" in capsys.readouterr().out
    assert one.guard.looks[-1].score < -guard.SCORE
    one.samples_densely = True
    leaves_the_adapter_out(one, monkeypatch)
    with pytest.raises(RuntimeError, match=RARER):
        one.guard()


def padded(trainer, prompts, completions):
    """A batch as TRL makes it."""
    batch = {}
    for part, ids, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        rows = {"input_ids": ids}
        found = trainer._tokenizer.pad(rows, padding_side=side, return_tensors="pt")
        batch |= {f"{part}_ids": found["input_ids"], f"{part}_mask": found["attention_mask"]}
    return batch


def test_an_engine_whose_log_probabilities_are_others_stops_it(one, monkeypatch):
    """vLLM's come with its samples; a None is TRL's for what vLLM could not tell."""
    sample = RunTrainer._generate_single_turn

    def other(self, prompts, *rest):
        ids, _ = sample(self, prompts, *rest)
        exact = stock.log_probabilities(self, padded(self, prompts, ids)).split(
            [len(row) for row in ids]
        )
        return ids, [[None, *(row[1:] + off).tolist()] for row in exact]

    monkeypatch.setattr(RunTrainer, "_generate_single_turn", other)
    off = 0.02
    one.guard()
    assert one.guard.looks[-1].difference == pytest.approx(off, abs=1e-3)
    off = -0.6 * one.guard.looks[-1].change  # nearer to the policy without the noise
    with pytest.raises(RuntimeError, match=rf"log-probabilities are off by {-off:.2f}"):
        one.guard()
    monkeypatch.setattr(guard, "changeable", lambda trainer: [])
    off = -0.2
    with pytest.raises(RuntimeError, match=r"log-probabilities are off by 0\.20"):
        one.guard()


def test_there_is_no_noise_where_trl_would_merge_it_into_vllms_weights(one, monkeypatch):
    """By Unsloth there is: tests/gpu_on_cpu."""
    assert guard.changeable(one)
    monkeypatch.setattr(one, "use_vllm", True)
    assert guard.changeable(one) == []


def test_a_score_that_is_no_number_accuses_nobody_and_is_a_warning(one, monkeypatch, capsys):
    monkeypatch.setattr(guard, "fisher", lambda p: float("nan"))
    one.guard()
    assert "warning: before step 1: the score" in capsys.readouterr().out


def test_an_adapter_that_changes_nothing_stops_it(one, monkeypatch):
    monkeypatch.setattr(guard, "MOST", 0.5)
    for layer in one.model.modules():
        if isinstance(layer, LoraLayer):
            monkeypatch.setitem(layer.scaling, "default", 0.0)
    with pytest.raises(RuntimeError, match="nothing would be learnt"):
        one.guard()


def test_a_training_with_the_guard_is_the_one_without(start, monkeypatch):
    settings = {"grpo.max_steps": 3, "train.eval_steps": 0}
    found = []
    for every in (0, 2):
        trainer = start(**settings, **{"train.guard_steps": every})
        trainer.train()
        weights = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
        found.append((comparable(trainer.stage.run), weights, torch.get_rng_state()))
        shutil.rmtree(trainer.folder)
        looks = trainer.guard.looks if every else []
        assert len(looks) == (3 if every else 0), "steps 1 and 3, and the end"
    (lines, weights, state), (guarded_lines, guarded, guarded_state) = found
    assert lines == guarded_lines
    assert all(map(torch.equal, weights, guarded))
    assert torch.equal(state, guarded_state)


@pytest.mark.parametrize(
    ("steps", "every", "last_sound", "said"),
    [
        (4, 2, 1, "stopped before step 3"),
        (3, 50, 2, "stopped after step 3: the completions"),
    ],
)
def test_a_fault_that_comes_later_stops_it_then_and_a_resumed_one_at_once(
    start, monkeypatch, steps, every, last_sound, said
):
    settings = {"grpo.max_steps": steps, "train.eval_steps": 0, "train.guard_steps": every}
    first = start(**settings)

    def spoil(update):
        if update.line["step"] == last_sound:
            leaves_the_adapter_out(first, monkeypatch)

    first.monitor.watchers.append(spoil)
    with pytest.raises(RuntimeError, match=said) as caught:
        first.train()
    if every == 2:
        assert "kept up to step 2" in caught.value.__notes__[0]
        with pytest.raises(RuntimeError, match="stopped before step 3"):
            start(**settings).train()


def test_full_fine_tuning_is_guarded_too(start, monkeypatch):
    full = {"model.full_finetuning": True, "policy.backend": "transformers"}
    one = start(**full, **WHOLE, **{"model.load_in_4bit": False, "train.guard_steps": 50})
    one.guard()
    assert one.guard.looks[0].change > guard.CHANGE
    sample = RunTrainer._generate_single_turn
    stale = copy.deepcopy(one.model.state_dict())

    def other(self, *args):
        now = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(stale)
        sampled = sample(self, *args)
        self.model.load_state_dict(now)
        return sampled

    monkeypatch.setattr(RunTrainer, "_generate_single_turn", other)
    with pytest.raises(RuntimeError, match=RARER):
        one.guard()
