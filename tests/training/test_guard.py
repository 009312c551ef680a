"""A training whose samples are not the policy's is stopped before it learns from them.

Each fault is put into the path by which a real trainer of the tiny base samples.
"""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from sampling_faults import FAULTS, RARER, leaves_the_adapter_out
from trainings import comparable, make_run, trainer_of

from grpo_nb.training import guard
from grpo_nb.training.trainer import Trainer

WHOLE = {"train.per_device_train_batch_size": 64, "train.gradient_accumulation_steps": 1}


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
    trained.samples_densely, trained._dense, trained.steps.guard.looks = True, None, []
    torch.manual_seed(0)
    return trained


@pytest.mark.parametrize("name", FAULTS)
def test_samples_that_are_not_the_policys_stop_the_training(one, monkeypatch, name):
    fault, words = FAULTS[name]
    fault(one, monkeypatch)
    with pytest.raises(RuntimeError, match=f"^stopped before step 1: .*{words}.*guard_steps = 0"):
        one.steps.guard()


@pytest.mark.parametrize("copied", [True, False])
def test_the_policys_own_samples_do_not(one, copied):
    one.samples_densely = copied
    one.steps.guard()
    seen = one.steps.guard.looks[-1]
    assert abs(seen.score) < guard.SCORE
    assert seen.tokens > 300 and seen.change > guard.CHANGE and seen.entropy > guard.ENTROPY


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("top_p", 0.9, "trl.top_p = 0.9"),
        ("top_k", 20, "trl.top_k = 20"),
        ("min_p", 0.1, "trl.min_p = 0.1"),
        ("repetition_penalty", 1.2, "trl.repetition_penalty = 1.2"),
        ("generation_kwargs", {"min_p": 0.1, "top_k": 0}, "trl.min_p = 0.1"),
        ("generation_kwargs", {"temperature": 0.7}, "trl.temperature = 0.7"),
    ],
)
def test_an_argument_that_distorts_samples_is_refused_by_preflight_and_guard(
    one, monkeypatch, argument, value, named
):
    monkeypatch.setattr(one.args, argument, value)
    states = {each.name: each for each in one.preflight()}
    assert (states["sampling"].state, states["gradient"].state) == ("stop", "ok")
    assert states["sampling"].evidence.startswith(f"{named}, which the trainer's")
    assert "set train.guard_steps = 0 to train anyway; see" in states["sampling"].fix
    with pytest.raises(RuntimeError, match=f"before step 1: {named}: samples are then not"):
        one.steps.guard()


def test_an_engine_whose_log_probabilities_are_others_stops_it(one, monkeypatch):
    """vLLM's come with its samples; a None is TRL's for what vLLM could not tell."""
    sample = Trainer._generate_single_turn

    def other(self, prompts, *rest):
        ids, _ = sample(self, prompts, *rest)
        exact = guard.log_probabilities(self, guard.Samples(prompts, ids)).split(
            [len(row) for row in ids]
        )
        return ids, [[None, *(row[1:] + off).tolist()] for row in exact]

    monkeypatch.setattr(Trainer, "_generate_single_turn", other)
    off = 0.02
    one.steps.guard()
    assert one.steps.guard.looks[-1].difference == pytest.approx(off, abs=1e-3)
    off = -0.6 * one.steps.guard.looks[-1].change  # nearer to the policy without the noise
    with pytest.raises(RuntimeError, match=rf"log-probabilities are off by {-off:.2f}"):
        one.steps.guard()
    monkeypatch.setattr(guard, "changeable", lambda trainer: [])
    off = -0.2
    with pytest.raises(RuntimeError, match=r"log-probabilities are off by 0\.20"):
        one.steps.guard()


def test_there_is_no_noise_where_trl_would_merge_it_into_vllms_weights(one, monkeypatch):
    """By Unsloth there is: tests/gpu_on_cpu."""
    assert guard.changeable(one)
    monkeypatch.setattr(one, "use_vllm", True)
    assert guard.changeable(one) == []


def test_a_score_that_is_no_number_accuses_nobody_and_is_a_warning(one, monkeypatch, capsys):
    monkeypatch.setattr(guard, "fisher", lambda p: float("nan"))
    one.steps.guard()
    checks = {each["name"]: each for each in one.stage.run.manifest()["03"]["checks"]}
    assert checks["policy identity"]["state"] == "warning"
    assert "the score of the samples is NaN" in checks["policy identity"]["evidence"]
    assert "warning: before step 1 the score" in capsys.readouterr().out


def test_an_adapter_that_changes_nothing_stops_it(one, monkeypatch):
    monkeypatch.setattr(guard, "MOST", 0.5)
    for layer in one.model.modules():
        if isinstance(layer, LoraLayer):
            monkeypatch.setitem(layer.scaling, "default", 0.0)
    with pytest.raises(RuntimeError, match="nothing would be learnt"):
        one.steps.guard()


def test_a_training_with_the_guard_is_the_one_without(start, monkeypatch):
    settings = {"train.max_steps": 3, "train.eval_steps": 0, "train.resume": "never"}
    found = []
    for every in (0, 2):
        trainer = start(**settings, **{"train.guard_steps": every})
        trainer.train()
        weights = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
        found.append((comparable(trainer.stage.run), weights, torch.get_rng_state()))
        assert len(trainer.steps.guard.looks) == (3 if every else 0), "steps 1 and 3, and the end"
    (lines, weights, state), (guarded_lines, guarded, guarded_state) = found
    assert lines == guarded_lines
    assert all(map(torch.equal, weights, guarded))
    assert torch.equal(state, guarded_state)


def test_a_fault_that_comes_later_stops_it_then_and_a_resumed_one_at_once(start, monkeypatch):
    settings = {"train.max_steps": 4, "train.eval_steps": 0, "train.guard_steps": 2}
    first = start(**settings)

    def spoil(update):
        if update.line["step"] == 1:
            leaves_the_adapter_out(first, monkeypatch)

    first.watch(spoil)
    with pytest.raises(RuntimeError, match="stopped before step 3") as caught:
        first.train()
    assert "kept up to step 2" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="stopped before step 3"):
        start(**settings).train()


def test_full_fine_tuning_is_guarded_too(start, monkeypatch):
    full = {"policy.finetuning": "full", "policy.backend": "transformers"}
    one = start(**full, **WHOLE, **{"model.quantization": "16bit"})
    one.steps.guard()
    assert one.steps.guard.looks[0].change > guard.CHANGE
    sample = Trainer._generate_single_turn
    stale = one.model.state_dict()
    stale = {name: weight.clone() for name, weight in stale.items()}

    def other(self, *args):
        now = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.model.load_state_dict(stale)
        sampled = sample(self, *args)
        self.model.load_state_dict(now)
        return sampled

    monkeypatch.setattr(Trainer, "_generate_single_turn", other)
    with pytest.raises(RuntimeError, match=RARER):
        one.steps.guard()


def test_a_fault_that_begins_after_the_last_look_is_found_at_the_end(start, monkeypatch):
    settings = {"train.max_steps": 3, "train.eval_steps": 0, "train.resume": "never"}
    trainer = start(**settings, **{"train.guard_steps": 50})

    def begin(update):
        if update.line["step"] == 2:
            leaves_the_adapter_out(trainer, monkeypatch)

    trainer.watch(begin)
    with pytest.raises(RuntimeError, match="stopped after step 3: the completions do not come"):
        trainer.train()
