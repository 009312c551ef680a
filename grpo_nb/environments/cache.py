"""Keep completions in a file, written batch by batch: an interruption loses one batch at most."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_nb.environments.contract import Environment
from grpo_nb.environments.play import answer
from grpo_nb.files import atomic_path
from grpo_nb.models import Engine, Progress, Sample, part_of
from grpo_nb.rewards.prompts import json_key


def answer_cached(
    path: Path,
    settings: dict[str, Any],
    rows: Sequence[dict],
    environment: Environment | None,
    opened: Callable[[], Engine],
    *,
    num_generations: int,
    seed: int,
    batch_size: int,
    progress: Progress | None = None,
    **sampling: Any,
) -> list[list[Sample]]:
    """Return completions of all rows; sample those that the file lacks.

    The batches and their seeds do not depend on the file. A call that is repeated after an
    interruption therefore gives the same completions as an uninterrupted one. Rows with the same
    key share their completions.

    Args:
        path: The Parquet file, with one record per completion.
        settings: Everything that the completions depend on, except the prompts, as JSON types. A
            file that was written with other settings is not read.
        rows: Rows with a prompt, and the columns that the environment reads.
        environment: The environment of the task, if there is one.
        opened: Returns the engine; called only if a completion is missing.
        num_generations: Completions per prompt.
        seed: The seed of the first batch.
        batch_size: Completions generated at once, over all prompts.
        progress: Called with the number of completions done, their total, and a note.
        sampling: Other fields of `Sampling`.
    """
    keys = [_key(row, environment) for row in rows]
    by_key, samples = dict(zip(keys, rows, strict=True)), _read(path, settings)
    engine = None if by_key.keys() <= samples.keys() else opened()
    together = engine is not None and engine.name == "vllm"  # vLLM makes batches by itself
    size = len(by_key) if together else max(1, batch_size // num_generations)
    for start in range(0, len(by_key), size):
        missing = [key for key in [*by_key][start : start + size] if key not in samples]
        if missing:
            groups = answer(
                engine,
                [by_key[key] for key in missing],
                environment,
                num_generations=num_generations,
                seed=seed + start * num_generations,
                batch_size=batch_size,
                progress=part_of(progress, start * num_generations, len(by_key) * num_generations),
                **sampling,
            )
            bare = [[each._replace(ids=(), mask=()) for each in group] for group in groups]
            samples |= zip(missing, bare, strict=True)
            _write(path, settings, samples)
    return [samples[key] for key in keys]


def _key(row: dict, environment: Environment | None) -> str:
    """Return the key of a row: its prompt, and the columns that its environment reads."""
    columns = environment.columns(row) if environment else {}
    return json.dumps([row["prompt"], columns], default=json_key)


def _read(path: Path, settings: dict[str, Any]) -> dict[str, list[Sample]]:
    """Return the stored completions of each row, by the row's key."""
    stored = pd.read_parquet(path) if path.exists() else pd.DataFrame()
    samples: dict[str, list[Sample]] = {}
    if stored.attrs.get("settings") == settings:
        for line in stored.to_dict("records"):
            line["messages"] = tuple(json.loads(line["messages"]))
            samples.setdefault(line.pop("prompt"), []).append(Sample(**line))
    return samples


def _write(path: Path, settings: dict[str, Any], samples: dict[str, list[Sample]]) -> None:
    lines = [
        {"prompt": key, **each._asdict(), "messages": json.dumps(each.messages)}
        for key, group in samples.items()
        for each in group
    ]
    frame = pd.DataFrame(lines).drop(columns=["ids", "mask"])
    frame.attrs = {"settings": settings}
    with atomic_path(path) as temporary:
        frame.to_parquet(temporary)
