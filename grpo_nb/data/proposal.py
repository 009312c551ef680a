"""Propose settings for a file from its first rows, before anything starts.

problem(config, preset)  # "problems.csv has no column 'question'; did you mean 'prompt_text'?"
proposal(config)         # {"data.question_column": "prompt_text", "data.answer_kind": "text"}
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_nb.data import sources
from grpo_nb.data.references import plain_answer
from grpo_nb.data.sources import LIKELY, Row
from grpo_nb.data.validate import validate_rows
from grpo_nb.rewards import PRESETS, RewardSet, call, load_rewards
from grpo_nb.runs.config import RunConfig, flatten, resolve

ROWS = 10
# The built-in preset for each kind of answer, and what its reference answers look like.
PRESET_OF = {"choice": "qa", "number": "math", "math": "math", "json": "json_extraction"}
PRESET_OF |= {"code": "code", "text": "qa"}
MARKS = {"boxed": "\\boxed{", "tag": "<answer>"}  # by data.answer_format


def problem(config: RunConfig, preset: RewardSet) -> str:
    """Say why the first rows or their answers cannot be used; "" if they can.

    If the preset is built in and needs no sandbox, each reference has to earn its first reward.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file cannot be read.
    """
    if not (rows := _first(config)) or config.data.environment:
        return ""
    try:
        data, _, _ = sources.read_columns(config.data.model_copy(update={"max_rows": ROWS}))
    except ValueError as error:
        return str(error)
    prepared, faults, _ = validate_rows(list(enumerate(rows, 1)), data, lambda prompts: [0])
    if 2 * len(faults) > len(rows):
        return f"{len(faults)} of the first {len(rows)} rows cannot be used: {faults[0]}"
    if config.rewards.preset not in PRESETS or config.rewards.preset == "code":
        return ""
    return _unread([each.row for each in prepared], preset, config.rewards.preset)


def _first(config: RunConfig) -> list[Row | str]:
    """Return the first rows, or none if the source is built in or on the hub."""
    if not sources.is_local(config.data.source):
        return []
    data = config.data.model_copy(update={"max_rows": ROWS})
    rows = [row for batch in sources.read(data) for _, row in batch]
    if not rows:
        raise ValueError(f"{config.data.source} holds no rows: give a data.source that does")
    return rows


def _unread(rows: Sequence[Row], preset: RewardSet, name: str) -> str:
    """Name a reference answer that does not earn the first reward, if most do not."""
    first, references = preset.reward_funcs[0], [preset.reference(row) for row in rows]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    messages = [[{"role": "assistant", "content": text}] for text in references]
    scores = call(first, prompts=[row["prompt"] for row in rows], completions=messages, **columns)
    full = np.isclose([score or 0.0 for score in scores], preset.full)
    if 2 * full.sum() >= len(rows):
        return ""
    answer = rows[int(full.argmin())]["answer"]
    problem = f"the preset {name!r} cannot read these answers: the reference answer {answer!r}"
    return f"{problem} does not earn {first.__name__}"


def proposal(config: RunConfig) -> dict[str, Any]:
    """Return settings with which the first rows can be used; {} if there are none."""
    rows = [row for row in _first(config) if isinstance(row, dict)]
    if not rows:
        return {}
    names, settings = list(rows[0]), {}
    for setting, last in (("question_column", False), ("answer_column", True)):
        others = [name for name in names if name not in settings.values()]
        settings[f"data.{setting}"] = _column(config, setting, others, rows, last)
    cells = [row.get(settings["data.answer_column"]) for row in rows]
    texts = [str(cell) for cell in cells if cell not in (None, "")]
    fit = (name for name, mark in MARKS.items() if all(mark in text for text in texts))
    settings["data.answer_format"] = next(fit, "auto")
    for kind in ["choice"] if "choices" in names else PRESET_OF:
        settings["data.answer_kind"] = kind
        if config.rewards.preset in PRESETS:
            settings["rewards.preset"] = PRESET_OF[kind]
            settings["rewards.form"] = config.rewards.form or PRESETS[PRESET_OF[kind]].form.name
        if _fits(config, settings, texts, kind):
            current = flatten(config)
            return {name: value for name, value in settings.items() if value != current[name]}
    return {}


def _fits(config: RunConfig, settings: dict[str, Any], texts: list[str], kind: str) -> bool:
    """Return whether the rows can be used with these settings."""
    if kind == "json" and not all(text.lstrip()[:1] in "{[" for text in texts):
        return False  # a bare number or word is JSON, too
    if kind == "code" and not all("def " in text and plain_answer(text, kind) for text in texts):
        return False
    config = resolve(config.profile, flatten(config), settings)
    return not problem(config, load_rewards(config.rewards))


def _column(
    config: RunConfig, setting: str, names: list[str], rows: Sequence[Row], last: bool
) -> str:
    """Return the column that is set, else one with a likely name, one with texts, or the last."""
    column = getattr(config.data, setting)
    likely = [name for name in names if name.strip().lower() in LIKELY[setting]]
    matches = [name for name in names if name == column] or likely
    matches = matches or sources.near_columns(column, names)
    if not (matches or last):
        matches = [name for name in names if all(" " in str(row.get(name)) for row in rows)]
    return (matches or [names[-1] if last else names[0]])[0]
