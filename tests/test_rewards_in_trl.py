"""Our rewards inside a real GRPO run, and other people's rewards inside our harness."""

import re
from functools import partial

import numpy as np
import pandas as pd

from grpo_nb import bench, chat, data, models, training
from grpo_nb.config import resolve
from grpo_nb.rewards import Adaptive, Scheduled, load_preset, reward, reward_set
from grpo_nb.rewards.presets import built_in
from grpo_nb.runs import Run

ROWS = [
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "question": "1 + 1?", "answer": "2"},
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "question": "2 + 2?", "answer": "4"},
]
TEXTS = ["<reasoning>1+1=2</reasoning><answer>2</answer>", r"<think>so</think>\boxed{4}"]
CHATS = [[{"role": "assistant", "content": text}] for text in TEXTS]


# Three in the style that circulates: a chat's text by [0]["content"], weights baked in.
def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    extracted = [r.split("<answer>")[-1].split("</answer>")[0].strip() for r in responses]
    return [2.0 if e == a else 0.0 for e, a in zip(extracted, answer, strict=True)]


def int_reward_func(completions, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if re.sub(r"\D", "", r).isdigit() else 0.0 for r in responses]


def count_xml(text) -> float:
    return 0.125 * sum(text.count(tag) == 1 for tag in ("<reasoning>", "</answer>"))


def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [count_xml(completion[0]["content"]) for completion in completions]


@reward()
async def patient_judge(response: str) -> float:
    return 0.5


def test_foreign_rewards_run_unchanged_in_our_harness():
    from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

    foreign = [correctness_reward_func, int_reward_func, xmlcount_reward_func]
    foreign += [think_format_reward]
    scores = bench.Bench(reward_set([(func, 1.0) for func in foreign])).score(ROWS, CHATS)
    np.testing.assert_array_equal(scores, [[2.0, 0.5, 0.25, 0.0], [0.0, 0.5, 0.0, 1.0]])
    assert callable(get_soft_overlong_punishment(10, 5))
    solutions = [{**row, "solution": f"${row['answer']}$"} for row in ROWS]
    accuracy = bench.Bench(reward_set([(accuracy_reward, 1.0)])).score(solutions, CHATS)
    assert accuracy[1, 0] == 1.0


def test_ours_run_inside_trl(runs_dir):
    """Two real optimizer steps with every reward that needs no other column than `answer`."""
    ours = [func for func in built_in().values() if set(func.columns) <= {"answer"}]
    skipped = {"json_fields_reward", "regex_match_reward"}  # their golds are JSON and patterns
    ours = [func for func in ours if func.__name__ not in skipped]
    adaptive = Adaptive(built_in()["strict_xml_format_reward"].configured("adaptive_format"))
    scheduled = Scheduled(built_in()["min_length_reward"].configured("warmed_up"), {0: 0, 2: 1})
    pairs = [(func, 1.0) for func in [*ours, adaptive, scheduled, patient_judge]]
    chosen = reward_set([*pairs, (correctness_reward_func, 0.5)])
    settings = {"train.max_steps": 2, "train.per_device_train_batch_size": 16}
    config = resolve("tiny-cpu", settings)
    tokenizer = chat.load_tokenizer(config.model.model_path)
    data.prepare(Run("all"), config.data, 0, partial(chat.count_tokens, tokenizer))
    rows = data.load(Run("all"), "train", max_rows=32)
    policy = models.load_policy(config.model, seed=0)
    trainer = training.build_trainer(policy, chosen, rows, config, Run("all") / "train")
    trainer.train()
    table = pd.read_parquet(sorted((runs_dir / "all/train/completions").glob("*.parquet"))[-1])
    assert set(chosen.names) <= set(table.columns)
    for func in ours:
        low, high = func.range
        assert table[func.__name__].between(low, high).all(), func.__name__
    assert (table["patient_judge"] == 0.5).all()
    assert adaptive.step == 1
    assert 0 < table["warmed_up"].max() <= 0.5
    assert any(name.endswith("/reason") for name in table.columns)


def test_the_math_preset_agrees_with_itself_through_the_harness():
    preset = load_preset("math")
    scores = bench.Bench(preset).score(ROWS, CHATS)
    np.testing.assert_array_equal(scores[0], [1.0] * 4)
