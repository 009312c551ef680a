"""Sample baseline rollouts from the base once, and test rewards on them as often as needed.

    test = open_test(stage, rewards.load_rewards(stage.config.rewards))
    verdict = reward_lab.judge(test)

`rewards/baseline.parquet` stores one line per completion, with the sampling settings. A later call
with the same settings reads this file, and samples only for prompts that are not in it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import data, environments, models
from grpo_nb.data.images import variants
from grpo_nb.environments.cache import Cache, answer_cached
from grpo_nb.models import hub
from grpo_nb.reward_lab.table import Bench, Row, bench_of
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import Completion, question_key
from grpo_nb.runs import Check, Run, Stage, write_json
from grpo_nb.runs.config import DataConfig, RunConfig
from grpo_nb.runs.files import digests, read_json

KEPT_AT = "rewards/baseline.parquet"
WARMED = "rewards/warm_up"  # folder of the weights after the SFT warm-up, from which GRPO starts
BASE = "base model"  # the name of the check on the base model
EASIER = (
    "{} SFT warm-up (data.sft_rows = 64 and train.sft_steps = 12, or more), easier rows "
    "(data.source), or another base (model.model_path)"
)
HARDER = "harder rows (data.source)"
MOSTLY = 0.5  # share of zero-advantage groups above which a base that is never right learns little
REFERENCE_ROWS = 512  # rows whose reference answers are scored
SPARE = 1.25  # recommended cap, relative to the 99th percentile of the baseline's lengths


class Baseline(NamedTuple):
    """Hold prompts and their sampled completions.

    rows: Dataset rows, [prompts].
    samples_P_G: Samples, [prompts][group].
    unseen: Samples with swapped and with blank images, {kind of image: samples}; {} without images.
    """

    rows: list[Row]
    samples_P_G: list[list[models.Sample]]
    unseen: dict[str, list[list[models.Sample]]] = {}  # noqa: RUF012 (never changed)

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

    stage: Stage
    rows: list[Row]
    baseline: Baseline
    bench: Bench

    def using(self, preset: RewardSet) -> "RewardTest":
        """Return the same test with other rewards."""
        return self._replace(bench=self.bench._replace(preset=preset))

    def table(self) -> pd.DataFrame:
        """Return the score table of the baseline rollouts, with the prompts' images, if any."""
        table = self.bench.table(self.baseline.rows, self.baseline.completions_P_G)
        if "images" in self.rows[0]:
            table["images"] = [row["images"] for row in self.baseline.repeated_rows]
        return table


def sample(
    run: Run,
    rows: Sequence[Row],
    config: RunConfig,
    engine: models.Engine | None = None,
    progress: models.Progress | None = None,
    warmed: bool = True,
    unseen: bool = True,
) -> Baseline:
    """Return completions of the model that training starts from, from the cache if possible.

    The cache is written after each batch, so an interruption loses only the last batch.

    Args:
        run: The run with the cache.
        rows: Dataset rows, [prompts].
        config: The base model, its sampling settings, and `rewards.baseline_completions`.
        engine: The engine of a loaded policy, which samples without its adapter unless there was
            an SFT warm-up; None loads the model.
        progress: A function of the number of completions done, their total, and a note.
        warmed: Whether to use the weights after the SFT warm-up, if there was one.
        unseen: Whether to sample again with swapped and with blank images, if the rows have any.
    """
    others, count = variants(rows) if unseen else {}, len(rows)
    folder = warm_folder(run, config) if warmed else None
    with ExitStack() as stack:
        groups = answer_cached(
            Cache(run / KEPT_AT, _settings(config, folder)),
            list(chain(rows, *others.values())),
            environments.of(config),
            lambda: engine or stack.enter_context(closing(open_base(config, folder))),
            max_completion_length=config.train.max_completion_length,
            temperature=config.train.temperature,
            num_generations=config.rewards.baseline_completions,
            seed=config.seed,
            batch_size=config.step_completions,  # the same batch as in training
            adapter=folder is not None,
            progress=progress,
            show="the first completion" if progress else "",
        )
    parts = {way: groups[n * count :][:count] for n, way in enumerate(others, start=1)}
    return Baseline(list(rows), groups[:count], parts)


def warm_folder(run: Run, config: RunConfig) -> Path | None:
    """Return the folder of the weights after the SFT warm-up, if there is one."""
    folder = run / WARMED
    return folder if config.train.sft_steps and folder.is_dir() else None


def open_base(config: RunConfig, warmed: Path | None) -> models.Engine:
    """Return an engine for the base model, or for the weights in the folder `warmed`, if given."""
    model, whole = config.model, warmed and config.policy.finetuning == "full"
    return models.open_engine(
        str(warmed) if whole else model.model_path,
        adapter=None if whole else warmed,
        quantization=model.quantization,
        chat_template_kwargs=model.chat_template_kwargs,
    )


def _settings(config: RunConfig, warmed: Path | None) -> dict[str, Any]:
    """Return all settings that the samples depend on, and the digests of a local model's files."""
    return {
        "model_path": config.model.model_path,
        "warm_up": warmed and read_json(warmed / "about.json")["of"],
        "weights": digests(Path(hub.find_model(config.model.model_path)), "*"),
        "quantization": config.model.quantization,
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "max_completion_length": config.train.max_completion_length,
        "temperature": config.train.temperature,
        "baseline_completions": config.rewards.baseline_completions,
        "seed": config.seed,
        "environment": environments.identity(environments.of(config)),
    }


def open_test(
    stage: Stage,
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
    rows = data.load(stage.run, "train")
    first_rows = rows[: stage.config.rewards.baseline_prompts]
    baseline = sample(stage.run, first_rows, stage.config, engine, progress)
    return _test_on(stage, preset, rows, baseline)


def _test_on(stage: Stage, preset: RewardSet, rows: list[Row], baseline: Baseline) -> RewardTest:
    """Return a test of rewards under the conditions of the stage's training."""
    model = stage.config.model
    tokenizer = models.load_tokenizer(model.model_path, model.chat_template_kwargs)
    return RewardTest(stage, rows, baseline, bench_of(stage.config, preset, tokenizer))


def passed(table: pd.DataFrame, preset: RewardSet) -> np.ndarray:
    """Return whether completions earn the first reward (correctness) in full, [completions]."""
    return np.isclose(table[preset.names[0]], preset.full)


def pass_at_k(passed_P_G: np.ndarray, k: int) -> np.ndarray:
    """Estimate the probability that at least one of k samples is correct, for each prompt.

    Args:
        passed_P_G: Whether each completion is correct, [prompts, group].
        k: Number of samples, at most the group size.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1 (unbiased).

    >>> pass_at_k(np.array([[True, False, False, False]]), 2)
    array([0.5])
    """
    group = passed_P_G.shape[1]
    chances = [1 - math.comb(wrong, k) / math.comb(group, k) for wrong in range(group + 1)]
    return np.array(chances)[group - passed_P_G.sum(axis=1)]


def pass_rates(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Return a table with one line per prompt: question, pass_rate, and keep (0 < pass_rate < 1).

    The column question contains the results of `question_key`.
    """
    rates = passed(table, preset).reshape(len(baseline.rows), -1).mean(axis=1)
    frame = pd.DataFrame({"question": [question_key(row) for row in baseline.rows]})
    return frame.assign(pass_rate=rates, keep=(rates > 0) & (rates < 1))


def flagged(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Return the score table with the columns correct, truncated and tokens added."""
    samples = baseline.samples
    return table.assign(
        correct=passed(table, preset),
        truncated=[each.truncated for each in samples],
        tokens=[each.tokens for each in samples],
    )


def summary(
    baseline: Baseline, table: pd.DataFrame, preset: RewardSet, config: RunConfig
) -> dict[str, Any]:
    """Return figures that describe the model before training.

    Args:
        baseline: Baseline rollouts.
        table: Their score table.
        preset: The rewards; the first one decides what counts as correct.
        config: The run's configuration, with the `max_completion_length` of training.
    """
    lines, group = flagged(baseline, table, preset), len(baseline.samples_P_G[0])
    right, tokens = lines["correct"].to_numpy().reshape(-1, group), lines["tokens"]
    solved = right.mean(axis=1)
    length, why = recommended_length(baseline.samples, config.train.max_completion_length)
    return {
        "prompts": len(baseline.rows),
        "completions per prompt": group,
        **{f"pass@{k}": float(pass_at_k(right, k).mean()) for k in (1, 2, 4, 8, 16) if k <= group},
        "prompts never solved": int((solved == 0).sum()),
        "prompts always solved": int((solved == 1).sum()),
        "prompts to keep": int(((solved > 0) & (solved < 1)).sum()),
        "share of zero-advantage groups": float(1 - table["signal"].mean()),
        "share truncated": float(lines["truncated"].mean()),
        "completion tokens, mean": float(tokens.mean()),
        "completion tokens, p95": float(tokens.quantile(0.95)),
        "completion tokens, max": int(tokens.max()),
        "max_completion_length": config.train.max_completion_length,
        "recommended max_completion_length": length,
        "because": why,
    }


def checks(figures: Mapping[str, Any], warmed: bool = False) -> list[Check]:
    """Check whether there is anything to learn, and whether the maximum length is sufficient.

    Args:
        figures: The figures that `summary` returned.
        warmed: Whether the baseline was sampled after the SFT warm-up.
    """
    rate, silent = figures["pass@1"], figures["share of zero-advantage groups"]
    subject = "the base after its warm-up" if warmed else "the base"
    base, state, fix = "", "ok" if 0 < rate < 1 else "warning", ""
    if silent == 1 or (rate == 0 and silent > MOSTLY):
        state = "stop"
        outcomes = {0: "does not solve this", 1: "always solves this"}
        base = f"{subject} {outcomes.get(rate, 'has one score for each prompt')}: "
    base += f"right in {rate:.1%} of its samples; {silent:.0%} zero-advantage groups"
    if state != "ok":
        fix = HARDER if rate == 1 else EASIER.format("more" if warmed else "an")
    cap, best = figures["max_completion_length"], figures["recommended max_completion_length"]
    cut, p95 = figures["share truncated"], figures["completion tokens, p95"]
    fits = cap >= best or (cut <= 0.05 and cap >= p95)
    usage = f"95 % of its completions have at most {p95:.0f} tokens, {cut:.0%} were cut; cap {cap}"
    length_fix = "" if fits else f"set train.max_completion_length = {best}"
    return [
        Check(BASE, state, base, fix),
        Check("completion length", "ok" if fits else "warning", usage, length_fix),
    ]


def recommended_length(samples: Sequence[models.Sample], cap_tokens: int) -> tuple[int, str]:
    """Recommend (max_completion_length, reason) from the lengths of completions.

    >>> recommended_length([models.Sample("", 20, False)] * 99, 100)
    (32, '99 % of the completions that ended took at most 20 tokens')
    """
    truncated = sum(each.truncated for each in samples) / len(samples)
    if truncated > 0.05:
        return 2 * cap_tokens, f"{truncated:.0%} of the completions were cut at {cap_tokens} tokens"
    longest = float(np.quantile([each.tokens for each in samples if not each.truncated], 0.99))
    length = 8 * math.ceil(SPARE * longest / 8)
    return length, f"99 % of the completions that ended took at most {longest:.0f} tokens"


def by_difficulty(
    stage: Stage, preset: RewardSet, report: dict[str, Any], engine: models.Engine | None = None
) -> dict[str, Any]:
    """Measure the pass rate of `data.difficulty_prompts` prompts, then filter and order the rows.

    A prompt that is always or never solved gives its whole group zero advantage: the completions
    cost time and teach nothing. Notebook 2 reuses these samples.

    Args:
        stage: Stage 01, after `data.prepare`.
        preset: The rewards; the first one decides whether a completion passes.
        report: The report that `data.prepare` returned.
        engine: A loaded engine, as `sample` takes it.

    Returns:
        The report with "difficulty" added, which is also written to data/report.json; the unchanged
        report if `data.difficulty_prompts` is 0.

    Raises:
        ValueError: No prompt has a pass rate between the limits.
    """
    config = stage.config.data
    if not config.difficulty_prompts:
        return report
    rows = data.load(stage.run, "train")
    first_rows = rows[: config.difficulty_prompts]
    baseline = sample(
        stage.run, first_rows, stage.config, engine, stage.progress, warmed=False, unseen=False
    )
    table = _test_on(stage, preset, rows, baseline).table()
    rates = pass_rates(baseline, table, preset).set_index("question")["pass_rate"].to_dict()
    band, counts = keep_band(rows, rates, config)
    data.replace_train(stage.run, band)
    report = {**report, "train_rows": len(band), "difficulty": counts}
    write_json(stage.run / "data/report.json", report)
    return report


def keep_band(
    rows: Sequence[Row], rates: Mapping[str, float], config: DataConfig
) -> tuple[list[Row], dict[str, int]]:
    """Return the rows of medium difficulty in the configured order, and counts for the report.

    Args:
        rows: Dataset rows.
        rates: {`question_key` of a row: share of its completions that passed}. Rows without a rate
            are kept, and ordered as if their rate were the mean.
        config: The settings with the limits of the pass rate, and with the order.
    """
    low, high = config.min_pass_rate, config.max_pass_rate
    band = [row for row in rows if low < rates.get(question_key(row), (low + high) / 2) < high]
    hard, easy = sum(r <= low for r in rates.values()), sum(r >= high for r in rates.values())
    if not band:
        raise ValueError(
            f"no prompt has a pass rate between {low} and {high}: {hard} are too hard, {easy} too "
            "easy. Widen the limits, use another model or other data, or teach the format first "
            "(data.sft_rows)"
        )
    if config.order == "easy_to_hard":
        mean = sum(rates.values()) / len(rates)
        band.sort(key=lambda row: -rates.get(question_key(row), mean))
    return band, {"judged": len(rates), "too_hard": hard, "too_easy": easy, "kept": len(band)}
