"""`grpo_nb.placebo` and `grpo_nb.sample` beside a trainer of TRL's."""

import asyncio
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from test_monitor import says, short, stock

import grpo_nb
from grpo_nb import models
from grpo_nb.rewards.prompts import build_prompt


def numbered(completions, **kwargs):
    return [float(number) for number in range(len(completions))]


def doubled(completions, **kwargs):
    return [2 * score for score in numbered(completions)]


async def later(completions, **kwargs):
    return numbered(completions)


def at(step):
    return {"completions": ["a"] * 12, "trainer_state": SimpleNamespace(global_step=step)}


def test_the_scores_of_a_completion_stay_together_and_in_their_group():
    first, second = grpo_nb.placebo([numbered, doubled], 4)
    scores = np.array([first(**at(3)), second(**at(3))])
    assert (scores[1] == 2 * scores[0]).all()
    assert (np.sort(scores[0].reshape(3, 4)) == np.arange(12).reshape(3, 4)).all()
    assert first(**at(3)) == scores[0].tolist() != first(**at(4))
    assert grpo_nb.placebo(numbered, 4, seed=1)[0](**at(3)) != scores[0].tolist()
    assert first.__name__ == "numbered"  # TRL's logs keep their names


def test_each_completion_earns_its_groups_mean_on_average():
    [paid] = grpo_nb.placebo(numbered, 4)
    mean = np.mean([paid(**at(step)) for step in range(2000)], axis=0)
    assert np.allclose(mean.reshape(3, 4), [[1.5] * 4, [5.5] * 4, [9.5] * 4], atol=0.15)


def test_an_async_reward_stays_async():
    [paid] = grpo_nb.placebo(later, 4)
    assert asyncio.iscoroutinefunction(paid)
    assert asyncio.run(paid(**at(3))) == grpo_nb.placebo(numbered, 4)[0](**at(3))


@pytest.mark.parametrize(
    ("funcs", "words"), [("a/reward-model", "write a function"), (numbered, "no whole groups of 5")]
)
def test_what_cannot_be_shuffled_is_refused(funcs, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        grpo_nb.placebo([funcs], 5)[0](**at(1))


@pytest.mark.parametrize(("group", "fits"), [(2, False), (4, True), (6, False), (12, False)])
def test_a_group_size_that_is_not_the_trainers_is_refused(group, fits):
    """Two of three prompts side by side are equal, as rows may be."""
    batch = at(3) | {"prompts": ["a"] * 8 + ["b"] * 4}
    paid = grpo_nb.placebo(numbered, group)[0]
    with nullcontext() if fits else pytest.raises(ValueError, match=r"num_generations, 4$"):
        paid(**batch)


def test_a_stock_trainer_is_paid_the_placebo(tmp_path):
    trainer = stock(tmp_path, grpo_nb.placebo([says, short], 4), max_steps=1)
    monitor = grpo_nb.Monitor(trainer)
    trainer.train()
    [line] = monitor.watch.lines
    assert {"rewards/says/mean", "rewards/short/mean"} <= line.keys()
    assert monitor.failure == ""


def test_samples_are_groups_of_texts_for_the_verdict():
    tokenizer = models.load_tokenizer("data/tiny_base")
    model = models.load_checkpoint("data/tiny_base", adapter=None, quantization="16bit")
    rows = [
        {"prompt": build_prompt(f"What is {a} + 2?"), "answer": str(a + 2)} for a in range(10, 30)
    ]
    groups = grpo_nb.sample(model, tokenizer, rows, 3, prompts=4, max_completion_length=40)
    assert [len(group) for group in groups] == [3] * 4
    assert all("<answer>" in text for group in groups for text in group)

    def right(completions, answer, **kwargs):
        texts = [one[0]["content"] for one in completions]
        return [float(f"<answer>{a}</answer>" in t) for a, t in zip(answer, texts, strict=True)]

    verdict = grpo_nb.check_rewards(right, rows, groups)
    assert verdict.passed or verdict.findings
    with pytest.raises(ValueError, match="is not a chat"):
        grpo_nb.sample(model, tokenizer, [{"prompt": "What is 1 + 2?"}])
