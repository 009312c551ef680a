"""Cases: your own attacks, and completions whose scores must stay as they were saved."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb.reward_lab.attacks import Attack
from grpo_nb.reward_lab.table import TIE, Bench, Row
from grpo_nb.runs import Check


def read_cases(*paths: Path) -> tuple[list[Attack], list[dict[str, Any]]]:
    """(attacks of your own, saved cases) of JSONL files; nothing where one does not exist.

    An attack: `{"attack": NAME, "completion": TEXT}`, in which {answer}, {other} (a wrong
    gold) and {question} are filled in for each row. A saved case: `{"case": NAME, "row": {…},
    "completion": TEXT, "scores": {REWARD: SCORE}}`.
    """
    own, saved = [], []
    for path in filter(Path.is_file, paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                entry = json.loads(line or "{}")
                keys = entry.keys()
            except (json.JSONDecodeError, AttributeError):
                keys = {line}
            if keys == {"attack", "completion"}:
                own.append(Attack(entry["attack"], "wrong", entry["completion"]))
            elif {"case", "row", "completion", "scores"} <= keys:
                saved.append(entry)
            elif keys:
                raise ValueError(
                    f'{path}, line {number}: {line[:80]!r} is no case: write {{"attack": …, '
                    '"completion": …}, or save one in the Reward Lab'
                )
    return own, saved


def save_case(bench: Bench, path: Path, name: str, row: Row, completion: str) -> dict[str, Any]:
    """Append a completion with the scores it has now; from then on they must stay."""
    (scores,) = bench.score([row], [completion]).tolist()
    kept = {key: value for key, value in row.items() if key != "prompt_tokens"}
    named = zip(bench.preset.names, [s if np.isfinite(s) else None for s in scores], strict=True)
    case = {"case": name, "row": kept, "completion": completion, "scores": dict(named)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(case, ensure_ascii=False) + "\n")
    return case


def changed_cases(bench: Bench, cases: Sequence[dict[str, Any]]) -> list[Check]:
    """A check for each saved case that earns something else than when it was saved."""
    fix = "correct the reward; or, where the change is meant, save the case again"
    checks = []
    for case in cases:
        (scores,) = bench.score([case["row"]], [case["completion"]])
        now = dict(zip(bench.preset.names, scores, strict=True))
        changed = [
            f"{name} was {then}, is {now[name]:.3g}"
            for name, then in case["scores"].items()
            if name in now and not _equal(then, now[name])
        ]
        if changed:
            checks.append(Check(f"case {case['case']!r}", "stop", ", ".join(changed), fix))
    return checks


def _equal(then: float | None, now: float) -> bool:
    return bool(np.isclose(np.nan if then is None else then, now, atol=TIE, equal_nan=True))
