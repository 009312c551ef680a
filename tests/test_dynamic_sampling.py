"""Groups without signal give their place to fresh prompts, and nothing else changes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_resume import session  # noqa: F401 (a fixture)

from grpo_nb import models, training
from grpo_nb.rewards import Adaptive, reward, reward_set
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs.config import resolve
from grpo_nb.training import dynamic
from grpo_nb.training import trainer as trainer_module
from grpo_nb.training.dynamic import Draw, DynamicSampling

GROUP, GROUPS = 4, 4
# Equal totals, and not in 32 bit: 0.7 and 0.1 + 0.6, which TRL takes for a signal.
WEIGHTS = [0.7, 0.1, 0.6]


def every_other(kind, of_even, of_odd):
    """Scores that differ in every group of a `teaching` row, and tie or are missing elsewhere."""
    scores = []
    for place, one in enumerate(kind):
        tied = None if one == "unscored" else (of_even if place % 2 else of_odd)
        scores.append(float(place % 2) if one == "teaching" else tied)
    return scores


def first(completions, kind, log_extra=None, **_):
    if log_extra:
        log_extra("kind", list(kind))
    return every_other(kind, 1.0, 0.0)


def second(completions, kind, **_):
    return every_other(kind, 0.0, 1.0)


def third(completions, kind, **_):
    return every_other(kind, 0.0, 1.0)


TIED = reward_set(list(zip((first, second, third), WEIGHTS, strict=True)))


def row(number, kind):
    return {"prompt": build_prompt(f"What is {number} + 2?"), "answer": "0", "kind": kind}


@pytest.fixture(scope="module")
def policy():
    return models.load_policy(resolve("tiny-cpu").model, seed=0)


@pytest.fixture
def trainer(policy, tmp_path):
    """(kinds of the rows) -> a trainer over them that is in the middle of a training."""

    def build(kinds, rewards=TIED, rounds=2, **settings):
        known = {"train.dynamic_sampling": rounds, "train.num_generations": GROUP}
        known |= {"train.per_device_train_batch_size": GROUP * GROUPS, "data.order": "easy_to_hard"}
        known |= {"train.max_completion_length": 8, **settings}
        rows = [row(number, kind) for number, kind in enumerate(kinds)]
        built = training.build_trainer(policy, rewards, rows, resolve("tiny-cpu", known), tmp_path)
        built.model.train()
        return built

    return build


def first_rows(trainer):
    return [dict(trainer.train_dataset[n]) for n in range(GROUPS) for _ in range(GROUP)]


def numbers(prompts):
    """The number in each group's question."""
    return [int(prompt[-1]["content"].split()[2]) for prompt in prompts[::GROUP]]


@pytest.mark.parametrize("dull", ["tied", "unscored"])
def test_the_update_is_made_of_groups_that_teach(trainer, dull):
    one = trainer([dull, "teaching", dull, "teaching"] + ["teaching"] * 12)
    batch = one._generate_and_score_completions(first_rows(one))
    assert (batch["advantages"].abs() > 0.5).all()
    assert len(batch["completion_ids"]) == len(batch["prompt_ids"]) == GROUP * GROUPS
    trained = numbers(list(one._logs["prompt"]))
    assert trained[1::2] == [1, 3], "a group that taught was replaced"
    assert len(set(trained)) == GROUPS and min(trained[::2]) >= 4
    assert set(one._logs["extra"]["kind"]) == {"teaching"}
    assert list(one._logs["advantages"]) == batch["advantages"].tolist()
    told = {name: values for name, values in one._metrics["train"].items() if values}
    assert told["dynamic/replaced"] == [0.5] and told["dynamic/without_signal"] == [0]
    assert {len(values) for values in told.values()} == {1}
    assert told["seconds/generation"][0] > 0 and told["dynamic/seconds"][0] > 0
    assert told["num_tokens"] == [one.state.num_input_tokens_seen]


def test_metrics_are_of_the_first_draw(trainer):
    """As the same step without this logs them, though the update is of other groups."""
    told = []
    for rounds in (0, 2):
        torch.manual_seed(0)
        one = trainer(["tied", "teaching"] + ["tied"] * 2 + ["teaching"] * 12, rounds=rounds)
        one._generate_and_score_completions(first_rows(one))
        told.append({name: list(values) for name, values in one._metrics["train"].items()})
    off, on = told
    own = {name for name in on if name.startswith("dynamic/")}
    assert set(off) == set(on) - own and len(own) == 3
    for name in [name for name in off if "seconds" not in name and name != "num_tokens"]:
        assert off[name] == on[name], name
    assert on["num_tokens"] > off["num_tokens"]


@pytest.mark.parametrize(("others", "drawn"), [(12, 3), (2, 2), (0, 1)])
def test_after_the_last_round_or_row_what_has_no_signal_stays(trainer, others, drawn):
    one = trainer(["tied"] * (GROUPS + others))
    generate, sizes = one._generate_single_turn, []
    one._generate_single_turn = lambda ids, *rest: sizes.append(len(ids)) or generate(ids, *rest)
    batch = one._generate_and_score_completions(first_rows(one))
    assert len(sizes) == drawn
    assert numbers(list(one._logs["prompt"])) == list(range(GROUPS))
    assert batch["advantages"].abs().max() < 0.01
    told = one._metrics["train"]
    assert told["dynamic/replaced"] == [0] and told["dynamic/without_signal"] == [1]


def test_fresh_prompts_follow_from_seed_and_step_alone(trainer):
    kinds = ["tied"] * 40
    one = trainer(kinds)
    used = first_rows(one)

    def order(of):
        return [number for row in of._fresh(used) for number in numbers([row["prompt"]])]

    known = order(one)
    torch.manual_seed(7)
    assert order(trainer(kinds)) == known
    assert len(set(known)) == len(known) >= 2 * GROUPS and min(known) >= GROUPS
    one.state.global_step = 1
    assert order(one) != known
    assert order(trainer(kinds, seed=1)) != known


@pytest.mark.parametrize(
    ("aggregation", "scores", "teaches", "why"),
    [
        ("sum_then_normalize", [[0, 0, 0], [0, 0, 0]], False, "nothing earned"),
        ("sum_then_normalize", [[1, 0, 0], [0, 1, 1]], False, "equal but for rounding"),
        ("sum_then_normalize", [[1, 0, 0], [0, 1, 0]], True, "totals differ"),
        ("sum_then_normalize", [[np.nan] * 3, [np.nan] * 3], False, "not scored"),
        ("sum_then_normalize", [[0, np.nan, 0], [np.nan, 0, 0]], False, "None counts 0"),
        ("normalize_then_sum", [[1, 1, 0], [1, 1, 0]], False, "every reward is constant"),
        ("normalize_then_sum", [[1, 0, 0], [0, 0.5, 1]], True, "each reward is scaled first"),
    ],
)
def test_what_teaches(aggregation, scores, teaches, why):
    known = SimpleNamespace(
        reward_weights=torch.tensor(WEIGHTS),
        num_generations=2,
        multi_objective_aggregation=aggregation,
    )
    # beside it a group that teaches, for the scaling over the batch
    beside = [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    draw = Draw([], (), torch.tensor(scores + beside, dtype=torch.float32), {})
    assert DynamicSampling._teaching(known, draw).tolist() == [teaches, True], why


def test_an_adaptive_factor_moves_once_a_step_and_the_reference_is_asked_once(trainer):
    @reward()
    def never(response: str) -> float:
        return 0.0

    factor = Adaptive(never, change=2.0, greatest=100.0)
    one = trainer(["teaching"] * 16, reward_set([(factor, 1.0)]), **{"train.beta": 0.1})
    asked, log_p = [], one._get_per_token_logps_and_entropies
    one._get_per_token_logps_and_entropies = lambda *a, **k: asked.append(1) or log_p(*a, **k)
    batch = one._generate_and_score_completions(first_rows(one))
    assert factor.value == 2.0
    assert len(asked) == 1 and len(batch["ref_per_token_logps"]) == GROUP * GROUPS
    one.model.eval()
    one._generate_and_score_completions(first_rows(one))
    assert "dynamic/replaced" not in one._metrics["eval"], "it belongs to the training alone"


def trained(trainer):
    trainer.train()
    weights = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([weight.flatten() for weight in weights])


def test_off_or_without_need_the_training_is_the_same_to_the_bit(policy, trainer, monkeypatch):
    fresh = {k: v.clone() for k, v in policy.model.state_dict().items() if "lora_" in k}
    found = []
    for rounds, mixin in ((0, type("Nothing", (), {})), (0, DynamicSampling), (3, DynamicSampling)):
        policy.model.load_state_dict(fresh, strict=False)
        monkeypatch.setattr(trainer_module, "DynamicSampling", mixin)
        kinds = ["teaching"] * 16
        found.append(trained(trainer(kinds, rounds=rounds, **{"train.max_steps": 2})))
    policy.model.load_state_dict(fresh, strict=False)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0].abs().sum() > 0


def test_several_processes_are_refused(monkeypatch):
    dynamic.refuse_with_processes(2)
    monkeypatch.setattr(dynamic.ranks, "count", lambda: 2)
    dynamic.refuse_with_processes(0)
    with pytest.raises(ValueError, match="dynamic_sampling = 2 works in one process, and there ar"):
        dynamic.refuse_with_processes(2)
