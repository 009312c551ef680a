"""Report what stage 01 did: the rows left out, by reason, the prompt lengths, and the checks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb import answers
from grpo_nb.checks import Check, Checks
from grpo_nb.data.faults import REMEDIES
from grpo_nb.data.validate import KIND, LONG

if TYPE_CHECKING:
    from grpo_nb.runs.config import DataConfig

REPEATED, LEAKS = "question repeated", "nearly a held-out question"
SHOWN_ROWS = 20  # row numbers listed per reason


class Drops(dict[str, dict[str, Any]]):
    """Map each reason for leaving out rows to its report entry: count, first rows, an example."""

    def add(self, reason: str, rows: Sequence[int], example: str = "") -> None:
        """Count rows (their numbers in the source) as left out for this reason."""
        if len(rows):
            empty = {"reason": reason, "count": 0, "rows": [], "example": example}
            entry = self.setdefault(reason, empty)
            entry["count"] += len(rows)
            entry["rows"] += [int(row) for row in rows[: SHOWN_ROWS - len(entry["rows"])]]

    def count(self) -> int:
        """Return the number of rows left out."""
        return sum(entry["count"] for entry in self.values())

    def refuse_many(self, rows_read: int, config: "DataConfig") -> None:
        """Raise ValueError if more rows are faulty than `data.max_dropped_share` allows."""
        faulty = self.count() - self.get(LONG, {"count": 0})["count"]
        if faulty > config.max_dropped_share * rows_read:
            raise ValueError(
                f"{faulty} of {rows_read} rows of {config.source} cannot be used, more than "
                f"data.max_dropped_share = {config.max_dropped_share:g} of them:{self}"
            )

    def __str__(self) -> str:
        checks = map(_line, self.values())
        return "".join(f"\n  {c.name}: {c.evidence}. {c.fix}" for c in checks) or " none"


def figures(tokens: Sequence[int], drops: Drops) -> dict[str, Any]:
    """Return the share of answers parsed, prompt lengths, and a cap that fits 99 % of prompts."""
    failures = drops.get(KIND, {"count": 0})["count"]
    p50, p95, p99 = (int(np.percentile(tokens, p, method="higher")) for p in (50, 95, 99))
    lengths = {"p50": p50, "p95": p95, "p99": p99, "max": max(tokens)}
    lengths["recommended_cap"] = -(-p99 // 8) * 8
    return {"answer_parse_rate": len(tokens) / (len(tokens) + failures), "prompt_tokens": lengths}


def checks(report: Mapping[str, Any], config: "DataConfig") -> Checks:
    """Return the checks of stage 01 from its report; each reason for dropping rows has a check."""
    lengths, cap = report["prompt_tokens"], config.max_prompt_tokens
    near = sum(entry["count"] for entry in report["dropped"] if entry["reason"] == LEAKS)
    rows = f"{report['rows_read']} rows read: {report['train_rows']} to train on, "
    rows += f"{report['sft_rows']} for the SFT warm-up, " if report["sft_rows"] else ""
    rows += f"{report['eval_rows']} held out"
    if report["eval_rows"] < config.eval_rows:
        rows += f" (at most {config.eval_share:.0%} of them: data.eval_share)"
    kinds = report["answer_kinds"].items()
    ways = ", ".join(f"{count} {answers.HOW.get(kind, f'as {kind}')}" for kind, count in kinds)
    parse = f"{report['answer_parse_rate']:.1%} of the reference answers parse; compared: {ways}"
    split = f"no held-out prompt is trained on; {near} rows nearly equal to one were left out"
    length = f"half have at most {lengths['p50']} tokens, 99 % {lengths['p99']}"
    length += f", the longest {lengths['max']}; cap {cap}"
    fits = lengths["p99"] <= cap
    fix = "" if fits else f"set data.max_prompt_tokens = {lengths['recommended_cap']}"
    lines = [
        _columns(report["columns"], config),
        Check("dataset", "ok", rows),
        Check("reference answers", "ok", parse),
        Check("no leakage", "ok", split),
        Check("prompt length", "ok" if fits else "warning", length, fix),
    ]
    if rates := report.get("difficulty"):
        evidence = "{judged} prompts tried; left out: {too_hard} too hard, {too_easy} too easy"
        lines.append(Check("difficulty", "ok", evidence.format_map(rates)))
    return Checks([*lines, *map(_line, report["dropped"])])


def _columns(columns: Mapping[str, Any], config: "DataConfig") -> Check:
    names = f"questions in {columns['question']!r}, reference answers in {columns['answer']!r}"
    if (config.question_column, config.answer_column) != (columns["question"], columns["answer"]):
        names += ", chosen by name: set data.question_column and data.answer_column for others"
    if "image" in columns:
        names += f", images in {columns['image']!r}"
    if columns["others"]:
        names += f"; data.extra_columns can give the rewards {', '.join(columns['others'])}"
    return Check("columns", "ok", names)


def _line(entry: Mapping[str, Any]) -> Check:
    fix, rows = REMEDIES.get(entry["reason"], ""), ", ".join(map(str, entry["rows"]))
    evidence = f"{entry['count']} left out, the first: {rows}. {entry['example']}".rstrip(". ")
    return Check(entry["reason"], "warning" if fix else "ok", evidence, fix)
