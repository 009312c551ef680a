"""Sample baseline rollouts from the base once, and test rewards on them as often as needed.

    test = open_test(stage, rewards.load_rewards(stage.config.rewards))
    verdict = reward_lab.judge(test)

`rewards/baseline.json` stores the completions and the sampling settings. A later call
with the same settings reads this file, and samples only for prompts that are not in it.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from grpo_nb import data, environments, models
from grpo_nb.environments.play import answer_cached
from grpo_nb.files import digests, read_json
from grpo_nb.models import hub
from grpo_nb.reward_lab.table import Bench, Row, bench_of
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import Completion

if TYPE_CHECKING:
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import RunConfig

KEPT_AT = "rewards/baseline.json"
WARMED = "rewards/warm_up"  # folder of the weights after the SFT warm-up, from which GRPO starts


class Baseline(NamedTuple):
    """Hold prompts and their sampled completions.

    rows: Dataset rows, [prompts].
    samples_P_G: Samples, [prompts][group].
    """

    rows: list[Row]
    samples_P_G: list[list[models.Sample]]

    @property
    def completions_P_G(self) -> list[list[Completion]]:
        return [[sample.completion for sample in group] for group in self.samples_P_G]

    @property
    def repeated_rows(self) -> list[Row]:
        """Return the row of each sample."""
        return [row for row, group in zip(self.rows, self.samples_P_G, strict=True) for _ in group]

    @property
    def samples(self) -> list[models.Sample]:
        return [sample for group in self.samples_P_G for sample in group]


class RewardTest(NamedTuple):
    """Hold rewards and everything that they are tested on.

    stage: Stage 02, with the settings of the run.
    rows: Dataset rows, which include the reference answers.
    baseline: Baseline rollouts for the first rows.
    bench: The rewards, and the conditions under which they score completions.
    """

    stage: "Stage"
    rows: list[Row]
    baseline: Baseline
    bench: Bench

    def using(self, preset: RewardSet) -> "RewardTest":
        """Return the same test with other rewards."""
        return self._replace(bench=self.bench._replace(preset=preset))

    def table(self) -> pd.DataFrame:
        """Return the score table of the baseline rollouts, with the prompts' images, if any.

        The table also has the columns `truncated` and `tokens`.
        """
        table = self.bench.table(self.baseline.rows, self.baseline.completions_P_G)
        samples = self.baseline.samples
        table["truncated"] = [each.truncated for each in samples]
        table["tokens"] = [each.tokens for each in samples]
        if "images" in self.rows[0]:
            table["images"] = [row["images"] for row in self.baseline.repeated_rows]
        return table


def sample(
    run: "Run",
    rows: Sequence[Row],
    config: "RunConfig",
    engine: models.Engine | None = None,
    progress: models.Progress | None = None,
) -> Baseline:
    """Return completions of the model that training starts with, from the cache if possible.

    Args:
        run: The run with the cache.
        rows: Dataset rows, [prompts].
        config: The base model, its sampling settings, and `rewards.baseline_completions`.
        engine: The engine of a loaded policy; None loads the model. Unless there was an SFT
            warm-up, it samples without its adapter.
        progress: A function of the number of completions done, their total, and a note.
    """
    folder = warm_folder(run, config)
    with ExitStack() as stack:
        groups = answer_cached(
            run / KEPT_AT,
            _settings(config, folder),
            rows,
            environments.of(config),
            lambda: engine or stack.enter_context(closing(open_base(config, folder))),
            max_completion_length=config.grpo.max_completion_length,
            temperature=config.grpo.temperature,
            num_generations=config.rewards.baseline_completions,
            seed=config.seed,
            batch_size=config.step_completions,  # the same batch as in training
            adapter=folder is not None,
            progress=progress,
        )
    return Baseline(list(rows), groups)


def warm_folder(run: "Run", config: "RunConfig") -> Path | None:
    """Return the folder of the weights after the SFT warm-up, if there is one."""
    folder = run / WARMED
    return folder if config.train.sft_steps and folder.is_dir() else None


def open_base(config: "RunConfig", warmed: Path | None) -> models.Engine:
    """Return an engine for the base model, or for the weights in `warmed` if that is a folder."""
    model, whole = config.model, warmed and config.model.full_finetuning
    return models.open_engine(
        str(warmed) if whole else model.model_name,
        adapter=None if whole else warmed,
        quantization=model.quantization,
        chat_template_kwargs=config.grpo.chat_template_kwargs,
    )


def _settings(config: "RunConfig", warmed: Path | None) -> dict[str, Any]:
    """Return all settings that the samples depend on, and the digests of a local model's files."""
    return {
        "model_path": config.model.model_name,
        "warm_up": warmed and read_json(warmed / "about.json")["of"],
        "weights": digests(Path(hub.find_model(config.model.model_name)), "*"),
        "quantization": config.model.quantization,
        "chat_template_kwargs": config.grpo.chat_template_kwargs,
        "max_completion_length": config.grpo.max_completion_length,
        "temperature": config.grpo.temperature,
        "baseline_completions": config.rewards.baseline_completions,
        "seed": config.seed,
        "environment": environments.identity(environments.of(config)),
    }


def open_test(
    stage: "Stage",
    preset: RewardSet,
    engine: models.Engine | None = None,
    progress: models.Progress | None = None,
) -> RewardTest:
    """Return a test of rewards on baseline rollouts; sample the rollouts that the cache lacks.

    Args:
        stage: Stage 02, started or not.
        preset: The rewards.
        engine: A loaded engine, as `sample` takes it.
        progress: A function of the number of completions done, their total, and a note.
    """
    config, rows = stage.config, data.load(stage.run, "train")
    first_rows = rows[: config.rewards.baseline_prompts]
    baseline = sample(stage.run, first_rows, config, engine, progress)
    tokenizer = models.load_tokenizer(config.model.model_name, config.grpo.chat_template_kwargs)
    return RewardTest(stage, rows, baseline, bench_of(config, preset, tokenizer))
