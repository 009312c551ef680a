"""The pilot: completions of the base model, sampled once, scored as often as you like.

`rewards/pilot.parquet` keeps them, a line a completion, with what they were sampled with.
Sampling again with the same model, lengths, temperature and seed reads the file; only
prompts that it lacks are sampled.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import models
from grpo_nb.models import chat
from grpo_nb.reward_lab.intervals import pass_at_k
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import Run, atomic_path
from grpo_nb.runs.config import RunConfig

Row = dict[str, Any]
Sampler = Callable[[Sequence[list[Message]]], list[list[models.Sample]]]
KEPT_AT = "rewards/pilot.parquet"
SPARE = 1.25  # how much longer than almost all pilot completions the cap should be
FORWARDS = 4  # an update costs about: log-probabilities 1, backward with its forward 3


class Pilot(NamedTuple):
    """Prompts, their sampled completions, and how long they took.

    rows: [prompts] dataset rows.
    samples_P_G: [prompts][group].
    generation_seconds: for a completion.
    forward_seconds: for a completion, without gradient.
    """

    rows: list[Row]
    samples_P_G: list[list[models.Sample]]
    generation_seconds: float
    forward_seconds: float

    @property
    def completions_P_G(self) -> list[list[str]]:
        return [[sample.text for sample in group] for group in self.samples_P_G]

    @property
    def repeated_rows(self) -> list[Row]:
        """The row of each sample."""
        return [row for row, of in zip(self.rows, self.samples_P_G, strict=True) for _ in of]

    @property
    def samples(self) -> list[models.Sample]:
        return [sample for group in self.samples_P_G for sample in group]

    def step_seconds(self, completions: int) -> float:
        """Rough duration of a training step on so many completions, without the rewards'."""
        return completions * (self.generation_seconds + FORWARDS * self.forward_seconds)


def sample(
    run: Run, rows: Sequence[Row], config: RunConfig, sampler: Sampler | None = None
) -> Pilot:
    """Completions for each row, from the cache where it has them.

    Args:
        run: Where the cache is.
        rows: [prompts] dataset rows.
        config: The base model, how it samples, `rewards.pilot_completions` a prompt.
        sampler: Another engine: prompts in, [prompts][group] samples out; the base model, by
            vLLM where that is found, where it is left out.
    """
    settings = _settings(config)
    cached, seconds = _read(run, settings)
    missing = [row for row in rows if _key(row) not in cached]
    if missing:
        prompts = [row["prompt"] for row in missing]
        if sampler is None:
            sampled, seconds = _sample_base(prompts, config)
        else:
            started = time.perf_counter()
            sampled = sampler(prompts)
            count = sum(map(len, sampled))
            seconds = [(time.perf_counter() - started) / count, 0.0]
        cached |= {_key(row): group for row, group in zip(missing, sampled, strict=True)}
        _write(run, cached, settings, seconds)
    return Pilot(list(rows), [cached[_key(row)] for row in rows], *seconds)


def _sample_base(
    prompts: list[list[Message]], config: RunConfig
) -> tuple[list[list[models.Sample]], list[float]]:
    """Samples of the base model, and seconds a completion for generation and a forward."""
    model, group = config.model, config.rewards.pilot_completions
    base = models.open_engine(model.model_path, adapter=None, quantization=model.quantization)
    try:
        started = time.perf_counter()
        samples = base.generate(
            prompts,
            max_completion_length=config.train.max_completion_length,
            temperature=config.train.temperature,
            num_generations=group,
            seed=config.seed,
            batch_size=config.step_completions,  # as many at once as in training
        )
        seconds = (time.perf_counter() - started) / (len(prompts) * group)
        texts = [
            chat.render(base.tokenizer, prompt) + one.text
            for prompt, of_prompt in zip(prompts, samples, strict=True)
            for one in of_prompt
        ][: config.train.per_device_train_batch_size]
        return samples, [seconds, base.forward_seconds(texts) / len(texts)]
    finally:
        base.close()


def _settings(config: RunConfig) -> dict[str, Any]:
    """What the samples depend on, a local model's files among it."""
    weights = sorted(Path(chat.find_model(config.model.model_path)).glob("*.safetensors"))
    return {
        "model_path": config.model.model_path,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime] for file in weights],
        "quantization": config.model.quantization,
        "max_completion_length": config.train.max_completion_length,
        "temperature": config.train.temperature,
        "pilot_completions": config.rewards.pilot_completions,
        "seed": config.seed,
    }


def _key(row: Row) -> str:
    return hashlib.sha256(json.dumps(row["prompt"]).encode()).hexdigest()


def _read(run: Run, settings: dict) -> tuple[dict[str, list[models.Sample]], list[float]]:
    import pyarrow.parquet as pq

    path = run / KEPT_AT
    if not path.exists():
        return {}, [0.0, 0.0]
    file = pq.ParquetFile(path)
    kept = json.loads(file.schema_arrow.metadata.get(b"grpo_nb", b"{}"))
    if kept.get("settings") != settings:
        return {}, [0.0, 0.0]
    cached: dict[str, list[models.Sample]] = {}
    for line in file.read().to_pylist():
        cached.setdefault(line.pop("prompt_sha256"), []).append(models.Sample(**line))
    return cached, kept["seconds"]


def _write(run: Run, cached: dict, settings: dict, seconds: list[float]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [
        {"prompt_sha256": key, **one._asdict()} for key, group in cached.items() for one in group
    ]
    about = {"grpo_nb": json.dumps({"settings": settings, "seconds": seconds})}
    with atomic_path(run / KEPT_AT) as temporary:
        pq.write_table(pa.Table.from_pylist(lines).replace_schema_metadata(about), temporary)


def passed(table: pd.DataFrame, preset: RewardSet) -> np.ndarray:
    """Which completions earn the first reward, correctness, in full: [completions]."""
    return np.isclose(table[preset.names[0]], preset.full)


def pass_rates(pilot: Pilot, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """A line a prompt: question, pass_rate, keep (whether it is neither 0 nor 1)."""
    rates = passed(table, preset).reshape(len(pilot.rows), -1).mean(axis=1)
    frame = pd.DataFrame({"question": [row["question"] for row in pilot.rows]})
    return frame.assign(pass_rate=rates, keep=(rates > 0) & (rates < 1))


def flagged(pilot: Pilot, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """The score table with each completion's tokens, and whether it is correct and truncated."""
    samples = pilot.samples
    return table.assign(
        correct=passed(table, preset),
        truncated=[one.truncated for one in samples],
        tokens=[one.tokens for one in samples],
    )


def summary(
    pilot: Pilot, table: pd.DataFrame, preset: RewardSet, config: RunConfig
) -> dict[str, Any]:
    """Figures that say, before training, what training will meet.

    Args:
        pilot: The samples.
        table: Their score table.
        preset: Its first reward says "correct".
        config: Batch and `max_completion_length` of the training to come.
    """
    rates = pass_rates(pilot, table, preset)
    group = len(pilot.samples_P_G[0])
    right = passed(table, preset).reshape(-1, group)
    tokens = np.array([one.tokens for one in pilot.samples])
    length, why = recommended_length(pilot.samples, config.train.max_completion_length)
    return {
        "prompts": len(pilot.rows),
        "completions per prompt": group,
        **{f"pass@{k}": float(pass_at_k(right, k).mean()) for k in (1, 2, 4, 8, 16) if k <= group},
        "prompts never solved": int((rates["pass_rate"] == 0).sum()),
        "prompts always solved": int((rates["pass_rate"] == 1).sum()),
        "prompts to keep": int(rates["keep"].sum()),
        "share of groups without signal": float(1 - table["signal"].mean()),
        "share truncated": float(np.mean([one.truncated for one in pilot.samples])),
        "completion tokens, mean": float(tokens.mean()),
        "completion tokens, p95": float(np.quantile(tokens, 0.95)),
        "completion tokens, max": int(tokens.max()),
        "predicted seconds per step": pilot.step_seconds(config.step_completions),
        "max_completion_length": config.train.max_completion_length,
        "recommended max_completion_length": length,
        "because": why,
    }


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
