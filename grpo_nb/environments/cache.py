"""Keep completions in a file, so that no prompt is answered twice under the same settings."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_nb.environments.contract import Environment
from grpo_nb.environments.play import answer
from grpo_nb.files import atomic_path
from grpo_nb.models import Engine, Sample
from grpo_nb.rewards.prompts import json_key


def answer_cached(
    path: Path,
    settings: dict[str, Any],
    rows: Sequence[dict],
    environment: Environment | None,
    opened: Callable[[], Engine],
    **sampling: Any,
) -> list[list[Sample]]:
    """Return completions of all rows; sample those that the file lacks, and add them to it.

    Rows with the same prompt, and the same columns for the environment, share their completions.

    Args:
        path: The Parquet file, with one record per completion.
        settings: Everything that the completions depend on, except the prompts, as JSON types. A
            file that was written with other settings is not read.
        rows: Rows with a prompt, and the columns that the environment reads.
        environment: The environment of the task, if there is one.
        opened: Returns the engine; called only if a completion is missing.
        sampling: Fields of `Sampling`.
    """
    columns = [environment.columns(row) if environment else {} for row in rows]
    pairs = zip(rows, columns, strict=True)
    keys = [json.dumps([row["prompt"], more], default=json_key) for row, more in pairs]
    samples = _read(path, settings)
    if missing := {k: row for k, row in zip(keys, rows, strict=True) if k not in samples}:
        groups = answer(opened(), list(missing.values()), environment, **sampling)
        bare = [[each._replace(ids=(), mask=()) for each in group] for group in groups]
        samples |= zip(missing, bare, strict=True)
        _write(path, settings, samples)
    return [samples[key] for key in keys]


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
