"""Probes: the gold must win, and attacks must lose.

What an attack may earn goes by its kind (`attacks.py`), beside two honest completions of the
same prompt: the reference, and a wrong answer in perfect format. A policy climbs whatever
pays more than being honest and wrong, and that is what it does most of the time at first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.reward_lab.attacks import Attack, attacks
from grpo_nb.reward_lab.pilot import passed
from grpo_nb.reward_lab.table import TIE, Bench, Row

PROBED_ROWS = 16
PARTLY = 0.25  # of the way from wrong to right that a graded first reward may pay by chance
WON_SHARE = 0.1  # of the rows on which an attack wins; above it the probe fails


class Probes(NamedTuple):
    """What attacks earned.

    table: A line an attack: attack, kind, each reward (mean), total, won (share of rows),
        because.
    completions: {attack: its text on the first row}.
    """

    table: pd.DataFrame
    completions: dict[str, str]

    @property
    def winners(self) -> list[str]:
        return list(self.table.loc[self.table["won"] > WON_SHARE, "attack"])


def probe(bench: Bench, rows: Sequence[Row], own: Sequence[Attack] = ()) -> Probes:
    """Every attack on up to PROBED_ROWS rows.

    Args:
        bench: The rewards.
        rows: Dataset rows; those whose golds differ serve each other as wrong answers.
        own: Attacks of your own, as `cases.read_cases` gives them.

    Raises:
        ValueError: All golds are the same, so that no answer is wrong.
    """
    chosen = list({row["question"]: row for row in rows}.values())[:PROBED_ROWS]
    tried = [_with_honest(bench, row, _other_gold(rows, row), own) for row in chosen]
    repeated = [row for row, of_row in zip(chosen, tried, strict=True) for _ in of_row]
    flat = [attack for of_row in tried for attack in of_row]
    scores = bench.score(repeated, [attack.completion for attack in flat])
    table = pd.DataFrame(scores, columns=bench.preset.names)
    table["total"] = bench.totals(scores)
    table["row"] = np.repeat(range(len(chosen)), [len(of_row) for of_row in tried])
    table["attack"], table["kind"] = [a.name for a in flat], [a.kind for a in flat]
    table["because"] = _verdicts(bench, table)
    table["won"] = table["because"] != ""
    grouped = table.drop(columns="row").groupby("attack", sort=False)
    means = grouped[[*bench.preset.names, "total", "won"]].mean()
    because = grouped["because"].agg(lambda reasons: next(filter(None, reasons), ""))
    kinds = grouped["kind"].first()
    frame = pd.concat([kinds, means, because], axis=1).reset_index()
    return Probes(frame, {attack.name: attack.completion for attack in tried[0]})


def _other_gold(rows: Sequence[Row], row: Row) -> str:
    for other in rows:
        if str(other["answer"]) != str(row["answer"]):
            return str(other["answer"])
    raise ValueError(
        f"every row has the gold {row['answer']!r}, so no answer is wrong: probe more rows"
    )


def _with_honest(bench: Bench, row: Row, other: str, own: Sequence[Attack]) -> list[Attack]:
    """The reference first, then the built-in attacks, then your own with {answer} filled in."""
    filled = [
        attack._replace(
            completion=attack.completion.replace("{answer}", str(row["answer"]))
            .replace("{other}", other)
            .replace("{question}", row["question"])
        )
        for attack in own
    ]
    reference = Attack("the reference", "reference", bench.preset.reference(row))
    return [reference, *attacks(bench.preset, row, other), *filled]


class Earned(NamedTuple):
    """What one completion earns: in all, by the first reward, and by the others."""

    total: float
    first: float
    others: float


def _verdicts(bench: Bench, table: pd.DataFrame) -> list[str]:
    """Why each line wins, "" where it loses as it has to."""
    first = table[bench.preset.names[0]].fillna(0.0)
    others = table["total"] - bench.preset.reward_weights[0] * first
    earned = [Earned(*of) for of in zip(table["total"], first, others, strict=True)]
    known = dict(zip(zip(table["row"], table["attack"], strict=True), earned, strict=True))
    formed = bool(bench.preset.format_name)
    names = ("the reference", "wrong, in perfect format", "empty completion")
    return [
        _because(kind, of, [known[row, name] for name in names], formed)
        for kind, of, row in zip(table["kind"], earned, table["row"], strict=True)
    ]


def _because(kind: str, of: Earned, honest: list[Earned], formed: bool) -> str:
    """Why it wins beside what honest completions earn: reference, wrong answer, nothing."""
    gold, wrong, silent = honest
    correct = of.first > gold.first - TIE
    if kind == "reference":
        return ""
    if of.total > gold.total + TIE:
        return "earns more than the reference"
    if of.total > gold.total - TIE and (kind != "right" or formed):
        return "earns as much as the reference"
    if kind not in ("right", "partial") and correct:
        return "counts as correct: the first reward in full"
    if kind == "right" and correct and of.total < wrong.total - TIE:
        return "earns less than a wrong answer in perfect format"
    partly = wrong.first + PARTLY * (gold.first - wrong.first)
    if kind in ("hollow", "empty") and (of.others > wrong.others + TIE or of.first > partly):
        return "earns more than an honest wrong answer"
    if kind == "empty" and of.others > max(wrong.others - TIE, silent.others + TIE):
        return "earns as much as an honest wrong answer"
    return ""


def gold_report(bench: Bench, rows: Sequence[Row], pilot: pd.DataFrame) -> dict[str, Any]:
    """Does the reference win on every row?

    It has to earn the first reward, which is correctness, in full, and more in all than any
    pilot completion of the same question that does not.

    Args:
        bench: The rewards.
        rows: Dataset rows, those of the pilot among them.
        pilot: What `Bench.table` gave.

    Returns:
        {"gold_wins": bool, "lowest": {reward: least reference score}, "losers": [questions],
        "reference" and what it "earned" by the first reward on the first of them, or None}
    """
    preset = bench.preset
    scores = bench.score(rows, [preset.reference(row) for row in rows])
    full = preset.full
    wrong = pilot[~passed(pilot, preset)].groupby("question")["total"].max()
    losers = [
        (row, float(of_first))
        for row, of_first, total in zip(rows, scores[:, 0], bench.totals(scores), strict=True)
        if not np.isclose(of_first, full) or total <= wrong.get(row["question"], -np.inf)
    ]
    row, earned = losers[0] if losers else (None, None)
    lowest = np.nanmin(np.where(np.isnan(scores), -np.inf, scores), axis=0)
    return {
        "gold_wins": not losers,
        "lowest": dict(zip(preset.names, lowest.tolist(), strict=True)),
        "losers": [row["question"] for row, _ in losers],
        "reference": row and preset.reference(row),
        "earned": earned,
    }
