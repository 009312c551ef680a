"""Open a test of rewards: a stage, its rows, baseline rollouts, and the rewards that score them.

test = open_test(stage, rewards.load_rewards(stage.config.rewards))
verdict = reward_lab.judge(test)
"""

from typing import NamedTuple

import pandas as pd

from grpo_nb import data, models
from grpo_nb.reward_lab.baseline import Baseline, sample
from grpo_nb.reward_lab.table import Bench, Row, bench_of
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Stage

REFERENCE_ROWS = 512  # rows whose reference answers are scored


class RewardTest(NamedTuple):
    """Hold rewards and everything that they are tested on.

    stage: Stage 02, with the settings of the run.
    rows: Dataset rows, whose references must win.
    baseline: Baseline rollouts for the first rows.
    bench: The rewards, and the conditions under which they are scored.
    """

    stage: Stage
    rows: list[Row]
    baseline: Baseline
    bench: Bench

    def using(self, preset: RewardSet) -> "RewardTest":
        """Return the same test with other rewards."""
        return self._replace(bench=self.bench._replace(preset=preset))

    def table(self) -> pd.DataFrame:
        """Return the score table of the baseline rollouts, with the images of each prompt."""
        table = self.bench.table(self.baseline.rows, self.baseline.completions_P_G)
        if "images" in self.rows[0]:
            table["images"] = [row["images"] for row in self.baseline.repeated_rows]
        return table


def open_test(
    stage: Stage,
    preset: RewardSet,
    engine: models.Engine | None = None,
    progress: models.Progress | None = None,
) -> RewardTest:
    """Return a test of rewards on baseline rollouts; sample those that the cache lacks.

    Args:
        stage: Stage 02, started or not.
        preset: The rewards.
        engine: A loaded engine, as `baseline.sample` takes it.
        progress: Called with the number of completions done, their total, and a note.
    """
    config, rows = stage.config, data.load(stage.run, "train")
    first_rows = rows[: config.rewards.baseline_prompts]
    baseline = sample(stage.run, first_rows, config, engine, progress)
    model = config.model
    tokenizer = models.load_tokenizer(model.model_path, model.chat_template_kwargs)
    return RewardTest(stage, rows, baseline, bench_of(config, preset, tokenizer))
