"""Baseline rollouts: completions of the base model, sampled once, scored as often as you like.

`rewards/baseline.parquet` keeps them, a line a completion, with what they were sampled with.
Sampling again with the same model, lengths, temperature and seed reads the file; only
prompts that it lacks are sampled.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import data, environments, models
from grpo_nb.models import chat
from grpo_nb.reward_lab.table import Row, bench_of
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import Completion
from grpo_nb.runs import Check, Run, Stage, atomic_path, write_json
from grpo_nb.runs.config import DataConfig, RunConfig

KEPT_AT = "rewards/baseline.parquet"
SPARE = 1.25  # how much longer than almost all baseline completions the cap should be


class Baseline(NamedTuple):
    """Prompts and their sampled completions.

    rows: [prompts] dataset rows.
    samples_P_G: [prompts][group].
    """

    rows: list[Row]
    samples_P_G: list[list[models.Sample]]

    @property
    def completions_P_G(self) -> list[list[Completion]]:
        return [[sample.completion for sample in group] for group in self.samples_P_G]

    @property
    def repeated_rows(self) -> list[Row]:
        """The row of each sample."""
        return [row for row, of in zip(self.rows, self.samples_P_G, strict=True) for _ in of]

    @property
    def samples(self) -> list[models.Sample]:
        return [sample for group in self.samples_P_G for sample in group]


def sample(
    run: Run, rows: Sequence[Row], config: RunConfig, engine: models.Engine | None = None
) -> Baseline:
    """Completions of the base model for each row, from the cache where it has them.

    Args:
        run: Where the cache is.
        rows: [prompts] dataset rows.
        config: The base model, how it samples, `rewards.baseline_completions` a prompt.
        engine: A loaded policy's, below whose adapter the base answers; None: it is loaded.
    """
    settings, environment = _settings(config), environments.of(config)
    cached = _read(run, settings)
    keys = [_key(row, environment) for row in rows]
    if missing := {key: row for key, row in zip(keys, rows, strict=True) if key not in cached}:
        groups = _sample_base(list(missing.values()), config, engine)
        bare = [[one._replace(ids=(), mask=()) for one in group] for group in groups]
        cached |= zip(missing, bare, strict=True)
        _write(run, cached, settings)
    return Baseline(list(rows), [cached[key] for key in keys])


def _sample_base(
    rows: list[Row], config: RunConfig, engine: models.Engine | None
) -> list[list[models.Sample]]:
    with nullcontext(engine) if engine else closing(open_base(config)) as base:
        return environments.answer(
            base,
            rows,
            environments.of(config),
            max_completion_length=config.train.max_completion_length,
            temperature=config.train.temperature,
            num_generations=config.rewards.baseline_completions,
            seed=config.seed,
            batch_size=config.step_completions,  # as many at once as in training
            adapter=False,
        )


def open_base(config: RunConfig) -> models.Engine:
    """The base model, loaded."""
    model = config.model
    how = {"quantization": model.quantization, "chat_template_kwargs": model.chat_template_kwargs}
    return models.open_engine(model.model_path, adapter=None, **how)


def _settings(config: RunConfig) -> dict[str, Any]:
    """What the samples depend on, a local model's files among it."""
    return {
        "model_path": config.model.model_path,
        "weights": weight_files(chat.find_model(config.model.model_path)),
        "quantization": config.model.quantization,
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "max_completion_length": config.train.max_completion_length,
        "temperature": config.train.temperature,
        "baseline_completions": config.rewards.baseline_completions,
        "seed": config.seed,
        "environment": environments.identity(environments.of(config)),
    }


def weight_files(*folders: str | Path) -> list[list[Any]]:
    """What tells weights from others: name, size and time of each of their files."""
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.safetensors"))]
    return [[file.name, file.stat().st_size, file.stat().st_mtime] for file in files]


def _key(row: Row, environment: environments.Environment | None) -> str:
    """By which a row's samples are found: what the model reads, and what the environment does."""
    begins = environment.columns(row) if environment else {}
    return json.dumps([row["prompt"], begins], default=str)


def _read(run: Run, settings: dict) -> dict[str, list[models.Sample]]:
    path = run / KEPT_AT
    kept = pd.read_parquet(path) if path.exists() else pd.DataFrame()
    cached: dict[str, list[models.Sample]] = {}
    if kept.attrs.get("settings") == settings:
        for line in kept.to_dict("records"):
            line["messages"] = tuple(json.loads(line["messages"]))
            cached.setdefault(line.pop("prompt"), []).append(models.Sample(**line))
    return cached


def _write(run: Run, cached: dict[str, list[models.Sample]], settings: dict) -> None:
    samples = [(key, one) for key, group in cached.items() for one in group]
    lines = [{"prompt": key, **one._asdict()} for key, one in samples]
    for line in lines:
        line["messages"] = json.dumps(line["messages"])
    frame = pd.DataFrame(lines).drop(columns=["ids", "mask"])
    frame.attrs = {"settings": settings}
    with atomic_path(run / KEPT_AT) as temporary:
        frame.to_parquet(temporary)


def passed(table: pd.DataFrame, preset: RewardSet) -> np.ndarray:
    """Which completions earn the first reward, correctness, in full: [completions]."""
    return np.isclose(table[preset.names[0]], preset.full)


def pass_at_k(passed_P_G: np.ndarray, k: int) -> np.ndarray:
    """The chance that one of k samples of a prompt is right, for each prompt.

    Args:
        passed_P_G: [prompts, group] of booleans.
        k: At most the size of the group.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1 (unbiased).

    >>> pass_at_k(np.array([[True, False, False, False]]), 2)
    array([0.5])
    """
    group = passed_P_G.shape[1]
    chances = [1 - math.comb(wrong, k) / math.comb(group, k) for wrong in range(group + 1)]
    return np.array(chances)[group - passed_P_G.sum(axis=1)]


def pass_rates(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """A line a prompt: question, pass_rate, keep (whether it is neither 0 nor 1)."""
    rates = passed(table, preset).reshape(len(baseline.rows), -1).mean(axis=1)
    frame = pd.DataFrame({"question": [row["question"] for row in baseline.rows]})
    return frame.assign(pass_rate=rates, keep=(rates > 0) & (rates < 1))


def flagged(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """The score table with each completion's tokens, and whether it is correct and truncated."""
    samples = baseline.samples
    return table.assign(
        correct=passed(table, preset),
        truncated=[one.truncated for one in samples],
        tokens=[one.tokens for one in samples],
    )


def summary(
    baseline: Baseline, table: pd.DataFrame, preset: RewardSet, config: RunConfig
) -> dict[str, Any]:
    """Figures that say, before training, what training will meet.

    Args:
        baseline: Baseline rollouts.
        table: Their score table.
        preset: Its first reward says "correct".
        config: `max_completion_length` of the training to come.
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


def checks(figures: Mapping[str, Any]) -> list[Check]:
    """Whether there is something to learn, and room to answer, by the figures of `summary`."""
    rate, silent = figures["pass@1"], figures["share of zero-advantage groups"]
    learns = "stop" if silent == 1 else "ok" if 0 < rate < 1 else "warning"
    base = f"right in {rate:.1%} of its samples; {silent:.0%} zero-advantage groups"
    if silent == 1:
        base += "; every group of the baseline rollouts has zero advantage"
    easier = "" if learns == "ok" else "take easier or harder rows, or another base"
    cap, best = figures["max_completion_length"], figures["recommended max_completion_length"]
    cut, p95 = figures["share truncated"], figures["completion tokens, p95"]
    fits = cap >= best or (cut <= 0.05 and cap >= p95)
    long = f"95 % of its completions have at most {p95:.0f} tokens, {cut:.0%} were cut; cap {cap}"
    raised = "" if fits else f"set train.max_completion_length = {best}"
    return [
        Check("base model", learns, base, easier),
        Check("completion length", "ok" if fits else "warning", long, raised),
    ]


def recommended_length(samples: Sequence[models.Sample], cap_tokens: int) -> tuple[int, str]:
    """(max_completion_length, why), from the lengths that completions had.

    >>> recommended_length([models.Sample("", 20, False)] * 99, 100)
    (32, '99 % of the completions that ended took at most 20 tokens')
    """
    truncated = sum(one.truncated for one in samples) / len(samples)
    if truncated > 0.05:
        return 2 * cap_tokens, f"{truncated:.0%} of the completions ran into {cap_tokens} tokens"
    longest = float(np.quantile([one.tokens for one in samples if not one.truncated], 0.99))
    length = 8 * math.ceil(SPARE * longest / 8)
    return length, f"99 % of the completions that ended took at most {longest:.0f} tokens"


def by_difficulty(
    stage: Stage, preset: RewardSet, report: dict[str, Any], engine: models.Engine | None = None
) -> dict[str, Any]:
    """Try `data.difficulty_prompts` prompts, drop those out of the band, and order the rest.

    A prompt that is always or never solved gives its group no advantage: its completions cost
    time and teach nothing. What is sampled for this serves notebook 2 as well.

    Args:
        stage: Stage 01, after `data.prepare`.
        preset: Its first reward says whether a completion passed.
        report: What `data.prepare` gave.
        engine: As `sample` takes it.

    Returns:
        The report with "difficulty", written to data/report.json too; as it was where no
        prompt is to be tried.

    Raises:
        ValueError: No prompt lies in the band.
    """
    config = stage.config.data
    if not config.difficulty_prompts:
        return report
    rows = data.load(stage.run, "train")
    tried = sample(stage.run, rows[: config.difficulty_prompts], stage.config, engine)
    model = stage.config.model
    tokenizer = chat.load_tokenizer(model.model_path, model.chat_template_kwargs)
    bench = bench_of(stage.config, preset, tokenizer)
    table = bench.table(tried.rows, tried.completions_P_G)
    rates = pass_rates(tried, table, preset).set_index("question")["pass_rate"].to_dict()
    kept, found = keep_band(rows, rates, config)
    data.replace_train(stage.run, kept)
    report = {**report, "train_rows": len(kept), "difficulty": found}
    write_json(stage.run / "data/report.json", report)
    return report


def keep_band(
    rows: Sequence[Row], rates: Mapping[str, float], config: DataConfig
) -> tuple[list[Row], dict[str, int]]:
    """The rows of middling difficulty, in the order that is asked for, and how many left.

    Args:
        rows: Dataset rows.
        rates: {question: share of its completions that passed}; a row without one is kept, and
            counts as of mean difficulty.
        config: The band, and the order.
    """
    low, high = config.min_pass_rate, config.max_pass_rate
    kept = [row for row in rows if low < rates.get(row["question"], (low + high) / 2) < high]
    hard, easy = (sum(map(out, rates.values())) for out in (low.__ge__, high.__le__))
    if not kept:
        raise ValueError(
            f"no prompt has a pass rate between {low} and {high}: {hard} are too hard, {easy} too "
            "easy. Widen the band, take another model or data, or teach the format first "
            "(data.sft_rows)"
        )
    if config.order == "easy_to_hard":
        mean = sum(rates.values()) / len(rates)
        kept.sort(key=lambda row: -rates.get(row["question"], mean))
    return kept, {"judged": len(rates), "too_hard": hard, "too_easy": easy, "kept": len(kept)}
