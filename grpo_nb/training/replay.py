"""The health of a training that has ended, from what it wrote."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import RunConfig
from grpo_nb.training import expected, health
from grpo_nb.training.plan import TrainStage


def watch_of_last_stage(
    run: Run, config: RunConfig, chosen: RewardSet, lines: Sequence[Mapping[str, Any]]
) -> health.Watch:
    """The watch over the last training stage, as it was at its end.

    Args:
        chosen: The run's rewards; the stage may have some of them, with other weights.
        lines: Of train/metrics.jsonl.
    """
    name = lines[-1]["stage"]
    for path in run.path.glob(f"train/*-{name}/stage.json"):
        weights = json.loads(path.read_text(encoding="utf-8"))["rewards"]
        funcs = [func for func in chosen.reward_funcs if func.__name__ in weights]
        of_stage = [weights[func.__name__] for func in funcs]
        chosen = chosen._replace(reward_funcs=funcs, reward_weights=of_stage)
    stage = TrainStage(1, name, config, chosen, (), 0)
    watch = health.Watch(expected(stage, Stage(run, "03", config, {})), config.health)
    for line in lines:
        if line["stage"] == name:
            watch.feed(line)
    return watch
