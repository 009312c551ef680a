"""How fast does the Reward Lab answer? Figures in docs/figures.md.

    python benchmarks/reward_lab.py

Baseline rollouts of the tiny base model (64 prompts x 8 completions), once sampled and once read
from their cache; then all of them scored by the math preset, the Reward Lab opened on them, another
row and an edit there, and the verdict. Then `check_rewards` on 256 rows of each preset's task.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

os.environ["GRPO_NB_RUNS"] = tempfile.mkdtemp()

from grpo_nb import check_rewards, data, reward_lab, rewards, runs
from grpo_nb.models import hub, template
from grpo_nb.reward_lab import baseline
from grpo_nb.rewards import load_preset
from grpo_nb.runs.config import resolve
from grpo_nb.views import RewardLab

TIMES = 5
TASKS = ("math", "code", "qa", "summarization", "json_extraction")


def seconds(action: Callable[[], object]) -> float:
    """Median of TIMES calls."""
    spent = []
    for _ in range(TIMES):
        started = time.perf_counter()
        action()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def prepare() -> tuple[runs.Stage, list[dict]]:
    first = runs.start("01", "bench", profile="tiny-cpu")
    tokenizer = hub.load_tokenizer(first.config.model.model_name)
    count_tokens = partial(template.count_tokens, tokenizer)
    data.prepare_run(first.run, first.config.data, 0, count_tokens)
    first.finish("data")
    stage = runs.start("02", "bench", {"rewards.baseline_prompts": 64})
    return stage, data.load(stage.run, "train")


def check_seconds(task: str) -> float:
    """Least of TIMES calls of `check_rewards` with a task's preset on its first 256 rows."""
    config, run = resolve("tiny-cpu", {"task": task}), runs.Run(task)
    preset = rewards.load_rewards(config.rewards)
    data.prepare_run(run, config.data, 0, lambda chats: [30] * len(chats), preset)
    rows, weights = data.load(run, "train"), preset.reward_weights
    return min(
        check_rewards(preset.reward_funcs, rows, reward_weights=weights).seconds
        for _ in range(TIMES)
    )


def main() -> None:
    stage, rows = prepare()
    run, config = stage.run, stage.config
    started = time.perf_counter()
    tried = baseline.sample(run, rows[:64], config)
    sampled = time.perf_counter() - started
    tokenizer = hub.load_tokenizer(config.model.model_name)
    bench = reward_lab.Bench(load_preset("math"), config.grpo, tokenizer)
    test = reward_lab.RewardTest(stage, rows, tried, bench)
    lab = RewardLab(**reward_lab.arguments(test))
    texts = iter(f"<answer>{number}</answer>" for number in range(TIMES))
    figures = {
        "rollouts sampled, model loaded": sampled,
        "rollouts read from their cache": seconds(lambda: baseline.sample(run, rows[:64], config)),
        "512 completions scored": seconds(test.table),
        "the Lab opened": seconds(lambda: RewardLab(**reward_lab.arguments(test))),
        "one completion edited": seconds(
            lambda: lab._score(None, {"group": 0, "text": next(texts)}, None)
        ),
        "rewards judged": seconds(lambda: reward_lab.judge(test)),
    }
    figures |= {f"check_rewards, {task}": check_seconds(task) for task in TASKS}
    for what, spent in figures.items():
        print(f"{what:<34}{spent:8.3f} s")


if __name__ == "__main__":
    main()
