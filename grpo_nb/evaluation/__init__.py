"""The same held-out prompts and seeds through several models: did it get better, and how surely?"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from grpo_nb.evaluation.report import (
    DECODING,
    Evaluation,
    agreement,
    before_after,
    build,
    save,
    table,
)
from grpo_nb.models import Engine, TransformersEngine, chat, open_engine
from grpo_nb.reward_lab import Bench
from grpo_nb.reward_lab.pilot import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import runs_root
from grpo_nb.runs.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "DECODING",
    "Candidate",
    "Evaluation",
    "agreement",
    "before_after",
    "build",
    "evaluate_model",
    "run",
    "save",
    "table",
]


class Candidate(NamedTuple):
    """A model to judge.

    label: Its name in tables and pictures.
    model: Folder or hub name, or a model that is loaded already (it then has the run's
        tokenizer).
    adapter: Folder of the adapter laid over it; None for none, and for the base below the
        adapter of a loaded peft model.
    quantization: "4bit" or "16bit", for a model that is to be loaded.
    """

    label: str
    model: "str | Path | PreTrainedModel"
    adapter: Path | None = None
    quantization: str = "16bit"

    def about(self) -> dict[str, Any]:
        """Where it came from, for the report; folders of runs relative to where runs are."""
        place = self.model if self.is_path else self.model.name_or_path
        return {
            "model": _shown(place),
            "adapter": None if self.adapter is None else _shown(self.adapter),
            "quantization": self.quantization,
        }

    @property
    def is_path(self) -> bool:
        return isinstance(self.model, str | Path)


def _shown(place: str | Path) -> str:
    root = runs_root()
    return str(Path(place).relative_to(root) if Path(place).is_relative_to(root) else place)


def run(
    candidates: Sequence[Candidate],
    rows: Sequence[dict],
    preset: RewardSet,
    config: RunConfig,
    progress: Callable[[int, int, str], None] | None = None,
) -> Evaluation:
    """Every candidate answers every row, greedily once and sampled `evaluate.samples` times.

    Prompts, batches, seeds and decoding are the same for each. Candidates of one base follow
    each other in one loaded model, so list a base just before its adapter.

    Args:
        candidates: The first is what the others are compared with.
        rows: Held-out rows, as `data.load` gives them.
        preset: Its first reward says "correct".
        config: Seed, lengths, samples a prompt.
        progress: Told (done, total, label) before each candidate.

    Raises:
        ValueError: No rows, no candidates, or a label twice.
        FileNotFoundError: A model or adapter that is not there; raised before any is asked.
    """
    _check(candidates, rows)
    for one in candidates:  # a model that is not there is said before any is asked
        chat.load_tokenizer(str(one.model) if one.is_path else config.model.model_path)
    samples, models, engine, key = {}, {}, None, None
    show = progress or (lambda *_: None)
    try:
        for done, one in enumerate(candidates):
            show(done, len(candidates), one.label)
            started = time.perf_counter()
            adapter = one.adapter or _adapter_to_come(candidates[done + 1 :], one)
            if key != (key := (one.model, one.quantization, adapter)):
                engine = engine and engine.close()  # free it before the next is loaded
                engine = _open(one, adapter, config)
            below = one.adapter is None
            samples[one.label] = evaluate_model(engine, rows, preset, config, without_adapter=below)
            seconds = round(time.perf_counter() - started, 1)
            models[one.label] = {**one.about(), "seconds": seconds, "engine": engine.name}
    finally:
        if engine is not None:
            engine.close()
    show(len(candidates), len(candidates), "compared")
    return Evaluation(samples, {"models": models, **build(samples, rows, preset, config)})


def _check(candidates: Sequence[Candidate], rows: Sequence[dict]) -> None:
    labels = [one.label for one in candidates]
    if not rows:
        raise ValueError("no held-out rows to evaluate on: raise data.eval_rows and run 01 again")
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"candidates {labels}: give at least one, each with a label of its own")
    for one in candidates:
        if one.adapter is not None and not (Path(one.adapter) / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"candidate {one.label!r}: {one.adapter} holds no adapter_config.json; give the "
                "folder of a saved adapter, such as a run's train/adapter"
            )


def _adapter_to_come(later: Sequence[Candidate], one: Candidate) -> Path | None:
    """The adapter of the next candidate, if it has the same base: both can share it."""
    if later and (later[0].model, later[0].quantization) == (one.model, one.quantization):
        return later[0].adapter
    return None


def _open(one: Candidate, adapter: Path | None, config: RunConfig) -> Engine:
    if not one.is_path:
        return TransformersEngine(one.model, chat.load_tokenizer(config.model.model_path))
    return open_engine(str(one.model), adapter=adapter, quantization=one.quantization)


def evaluate_model(
    engine: Engine,
    rows: Sequence[dict],
    preset: RewardSet,
    config: RunConfig,
    *,
    without_adapter: bool = False,
) -> pd.DataFrame:
    """Every held-out prompt answered greedily and sampled, and scored.

    Args:
        without_adapter: Judge the base below the adapter, if the model has one.

    Returns:
        A line a completion: row (its place in `rows`), question, gold, decoding, completion,
        answer (as extracted), tokens, truncated, each reward, reward (their weighted total),
        correct (the first reward in full), and "accuracy" and "format", which are the set's
        first reward and its first of format.
    """
    bench, tables = Bench(preset, config.train, engine.tokenizer), []
    for decoding, temperature in DECODING.items():
        groups = engine.generate(
            [row["prompt"] for row in rows],
            max_completion_length=config.train.max_completion_length,
            temperature=temperature,
            num_generations=config.evaluate.samples if temperature else 1,
            seed=config.seed,
            batch_size=config.evaluate.eval_batch_size,
            adapter=not without_adapter,
        )
        places = [place for place, group in enumerate(groups) for _ in group]
        texts = [one.text for group in groups for one in group]
        table = pd.DataFrame({"row": places, "question": [rows[i]["question"] for i in places]})
        table["gold"] = [rows[i]["answer"] for i in places]
        table["decoding"], table["completion"] = decoding, texts
        table["answer"] = pd.Series([preset.extract(text) for text in texts], dtype=object)
        table["tokens"] = [one.tokens for group in groups for one in group]
        table["truncated"] = [one.truncated for group in groups for one in group]
        table[preset.names] = bench.score([rows[i] for i in places], texts)
        table["reward"] = bench.totals(table[preset.names].to_numpy())
        table["correct"] = passed(table, preset)
        table["accuracy"] = table[preset.names[0]]
        table["format"] = table[preset.format_name] if preset.format_name else float("nan")
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
