"""Tell what a gain is not: format alone.

A base that solves a prompt and does not write its answer in tags counts as wrong. It gains without
solving anything new once it writes them.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.answers import extract_hash_answer, find_answer, read_answer, read_reference
from grpo_nb.answers.compare import same_number
from grpo_nb.rewards.correctness import normalize

COLUMNS = ("answer", "solution", "ground_truth", "target", "label")  # that hold references
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LENIENT, STRICT = "right, read leniently", "right, in the form"


def reference_of(row: Mapping[str, Any]) -> str | None:
    """Return a row's reference answer; None if there is none."""
    present = [row[name] for name in COLUMNS if row.get(name) is not None]
    if not present:
        return None
    text = str(present[0])
    return extract_hash_answer(text) or text


def is_right(completion: str, reference: str | None) -> float:
    """Return 1.0 if a completion states the reference answer in any form, or as its last number.

    >>> is_right("so there are 18 eggs.", "18"), is_right("I do not know", "18")
    (1.0, 0.0)
    """
    if reference is None:
        return float("nan")
    expected, answer = read_reference(reference), find_answer(completion) or ""
    if expected.kind != "number":
        return float(normalize(answer) == normalize(reference))
    texts = [answer, *NUMBER.findall(completion)[-1:]]
    values = [value for value in map(read_answer, texts) if value.kind == "number"]
    return float(any(same_number(expected, value) for value in values))


def with_readings(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Add whether each answer is right read leniently, and right in the form that is paid for.

    Args:
        tables: {label: table} with the columns correct, completion, reference and format. Where no
            completion has the form, or no reward pays for it, what is correct is in the form.
    """
    if any(not {"format", "completion", "reference"} <= {*lines} for lines in tables.values()):
        return dict(tables)
    formats = np.concatenate([lines["format"].to_numpy(dtype=float) for lines in tables.values()])
    most = np.nanmax(formats) if np.isfinite(formats).any() else np.nan
    results = {}
    for label, lines in tables.items():
        pairs = zip(lines["completion"], lines["reference"], strict=True)
        lenient = np.array([is_right(*pair) for pair in pairs])
        strict = lines["correct"] & ((lines["format"] >= most) | ~(most > 0))
        lenient = np.where(lines["correct"] & ~np.isnan(lenient), 1.0, lenient)
        results[label] = lines.assign(**{LENIENT: lenient, STRICT: strict.astype(float)})
    return results


def sentence(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """Return how much of the gain in right answers is format; "" if form changes nothing.

    Args:
        before: Figures of each prompt, with LENIENT, STRICT and pass@1, greedily decoded.
        after: The same of the other model.
    """
    if LENIENT not in before or before[LENIENT].isna().all():
        return ""
    was, now = (100 * each[[LENIENT, STRICT, "pass@1"]].mean() for each in (before, after))
    if all(np.allclose(each, each["pass@1"]) for each in (was, now)):
        return ""
    gain = now - was
    part = gain["pass@1"] - gain[LENIENT]
    whole = f"{part:.1f} of the {gain['pass@1']:.1f} points are format"
    return (
        f"; read leniently {was[LENIENT]:.1f} % → {now[LENIENT]:.1f} %, in the form "
        f"{was[STRICT]:.1f} % → {now[STRICT]:.1f} %" + (f": {whole}" if part > 0.05 else "")
    )
