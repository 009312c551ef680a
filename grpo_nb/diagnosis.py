"""Judge a run that is over: what went wrong, at which step it began, and what cannot be told.

    from grpo_nb import autopsy
    autopsy("outputs")                  # TRL's output_dir, or one of its checkpoints
    autopsy("Llama3.1_GRPO.ipynb")      # an executed notebook

Curves are judged by the rules that watch training (`rules`). Where completions were kept, it reads
them, because no curve shows that the reward pays for the wrong thing.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.checks import Check, Checks, shown
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.training.health import Expected, Watch
from grpo_nb.training.logs import Log, read_log
from grpo_nb.training.rules import NEEDS, SILENT, constant, is_number

CONSTANT = "constant reward"
LINES = 12  # findings that are printed
COMPLETIONS = 8  # completions in a step, where nothing says how many
SAME = 0.5  # share of a step's completions that are equal
ALIKE = 0.9  # correlation of length and reward
PAID = 0.9  # quantile of the total from which completions are read


class Autopsy(NamedTuple):
    """Hold the diagnosis of a run; printing it shows what matters, and a notebook shows curves.

    findings: Checks whose state is "stop", "warning" or "note", the worst first.
    skipped: {rule: the metric that the log lacks}.
    shares: {reward: its share of the total that was paid}; {} if the weights are not known.
    suspects: Completions that earned most and look wrong, with the reason; empty without any.
    log: What was read.
    """

    findings: Checks
    skipped: dict[str, str]
    shares: dict[str, float]
    suspects: pd.DataFrame
    log: Log

    @property
    def passed(self) -> bool:
        """Return whether no finding says stop."""
        return not any(check.state == "stop" for check in self.findings)

    def worst(self) -> str:
        """Return the state of the gravest finding; "ok" without any."""
        states = [check.state for check in self.findings]
        return next((state for state in ("stop", "warning", "note") if state in states), "ok")

    def __str__(self) -> str:
        log = self.log
        each = log.facts.get("completions")
        count = (
            f"{each} completions a step" if each else f"{COMPLETIONS} completions a step assumed"
        )
        lines = [f"{log.source}: {len(log.steps)} lines, to step {log.lines[-1]['step']}, {count}"]
        for check in self.findings[:LINES]:
            lines.append(shown(check.name, check.state, check.evidence, check.fix))
        if not self.findings:
            lines.append("nothing was found")
        more = len(self.findings) - LINES
        lines += [f"… and {more} more in .findings"] if more > 0 else []
        if self.shares:
            parts = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
            lines.append(f"the reward came from: {parts}")
        if self.skipped:
            parts = ", ".join(f"{rule} ({key})" for rule, key in self.skipped.items())
            lines.append(f"not checked, for want of: {parts}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from grpo_nb.views import charts, tables

        first, *rest = str(self).splitlines()
        tail = [line for line in rest if line.startswith(("the reward", "not checked"))]
        parts = [f"<p><b>{html.escape(first)}</b></p>", tables.table(self.findings.table())]
        parts.append(charts.image(self.log.lines))
        parts += [f"<p>{html.escape(line)}</p>" for line in tail]
        if len(self.suspects):
            parts.append("<p><b>Completions that were paid and look wrong</b></p>")
            parts.append(tables.table(self.suspects))
        return "\n".join(parts)

    def save(self, path: str | Path) -> Path:
        """Write the diagnosis as one HTML file, and return its path."""
        title = f"<title>Autopsy of {html.escape(self.log.source)}</title>"
        page = f"<!doctype html><meta charset='utf-8'>{title}<body>{self._repr_html_()}</body>"
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)


def autopsy(
    what: Any,
    *,
    reward_funcs: Any = None,
    dataset: Any = None,
    reward_weights: Sequence[float] | None = None,
    correct: str = "",
    completions_per_step: int = 0,
) -> Autopsy:
    """Find what went wrong in a finished run, or in one that goes on.

    Args:
        what: What was trained: TRL's output folder or a checkpoint, a trainer_state.json, JSON
            lines, CSV (of W&B), an executed notebook, what a trainer printed (.log, .txt), a
            trainer, a run of ours, or a list of logged lines.
        reward_funcs: The rewards, to see whether the completions resemble attacks that win.
        dataset: The rows, for `reward_funcs`.
        reward_weights: The weights; by default found from the log.
        correct: The name of the reward that says what is right; by default not known.
        completions_per_step: How many completions a step scored; by default read from the log.

    Returns:
        The diagnosis. Print it, display it, or `save` it as HTML.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: It holds no log of GRPO, or `correct` is none of its rewards.

    >>> lines = [{"step": n, "reward": 0.0, "frac_reward_zero_std": 1.0} for n in range(200)]
    >>> [check.name for check in autopsy(lines).findings]
    ['nothing learnt']
    """
    log = read_log(what)
    if correct and correct not in log.rewards:
        names = ", ".join(log.rewards) or "none"
        raise ValueError(f"correct = {correct!r} is none of the log's rewards: {names}")
    if completions_per_step:
        log.facts["completions"] = completions_per_step
    if reward_weights is not None:
        log.facts["weights"] = dict(zip(log.rewards, map(float, reward_weights), strict=False))
    watch = Watch(_expected(log, correct))
    findings: dict[tuple[str, str], Check] = {}
    for line in log.lines:
        for check in watch.feed(_held_out(line, correct)):
            if check.name != CONSTANT:  # many a reward is earned late: the whole run tells
                findings.setdefault((check.name, _about(check)), check)
    for rule, about, evidence in constant(watch, watch.limits.enough // 10):
        findings[rule, about] = watch.alert(rule, about, evidence, watch.lines[0].get("step", 1))
    table = _readable(log)
    checks = [*findings.values(), *_notes(watch, findings)]
    checks += of_completions(table, log.rewards)
    if reward_funcs is not None and dataset is not None:
        checks += _attacks(table, reward_funcs, dataset, reward_weights)
    order = ("stop", "warning", "note")
    checks.sort(key=lambda check: order.index(check.state))
    keys = {key for line in log.lines for key in line}
    skipped = {rule: key for rule, key in NEEDS.items() if key not in keys}
    shares, suspects = _shares(log), _suspects(table, log)
    return Autopsy(Checks(checks), skipped, shares, suspects, log)


def _expected(log: Log, correct: str) -> Expected:
    """Return what the rules have to know; ranges are those that were seen, at least 0 to 1."""
    weights, ranges = log.facts.get("weights") or {}, {}
    for name in log.rewards:
        values = [line.get(f"rewards/{name}/mean") for line in log.steps]
        if log.completions is not None and name in log.completions:
            values += log.completions[name].tolist()
        values = [value for value in values if is_number(value)] or [0.0]
        ranges[name] = (weights.get(name, 1.0), min(0.0, *values), max(1.0, *values))
    if not ranges:
        values = [line["reward"] for line in log.steps if is_number(line["reward"])] or [0.0]
        ranges = {"reward": (1.0, min(0.0, *values), max(1.0, *values))}
    facts = log.facts
    return Expected(
        ranges,
        completions=facts.get("completions") or COMPLETIONS,
        max_steps=facts.get("max_steps", 0),
        correct=correct,
        logging_steps=facts["logging_steps"],
        max_completion_length=facts.get("max_completion_length", 0),
    )


def _held_out(line: Mapping[str, Any], correct: str) -> Mapping[str, Any]:
    """Return a line with held-out accuracy under our name, if the log has it by reward."""
    key = f"eval/rewards/{correct}/mean"
    return {**line, "eval/accuracy": line[key]} if correct and key in line else line


def _about(check: Check) -> str:
    """Return what a finding is about, so that each is shown once."""
    return re.sub(r"[\d.,+-]+|nan", "", check.evidence.partition(": ")[2].partition(" (")[0])


# -- notes: what is true of a run, and no fault


def _notes(w: Watch, findings: Mapping[tuple[str, str], Check]) -> list[Check]:
    """Return what a reader of the curves would like to know besides."""
    names, notes = {name for name, _ in findings}, []
    learning = {"reward stuck", "nothing learnt", "collapse", "reward falls", "little signal"}
    if not names & learning and (evidence := rise_yet(w)):
        notes.append(Check("no rise yet", "note", evidence))
    silent = w.mean(SILENT)
    if silent > 0.5 and not names & {"nothing learnt", "little signal", "nothing left to learn"}:
        evidence = f"{silent:.0%} of the groups teach nothing at the end"
        notes.append(Check("signal", "note", evidence))
    if not names & learning and (evidence := _plateau(w)):
        notes.append(Check("plateau", "note", evidence))
    return notes


def _plateau(w: Watch) -> str:
    """Return the evidence that the reward has risen and rises no more; "" otherwise."""
    steps, part = len(w.lines), len(w.lines) // 4
    if part < w.window:
        return ""
    best, ago = w.best("reward", w.window)
    if ago >= steps / 2:
        return f"{best:.3g} {ago * w.expected.logging_steps} steps ago, {w.mean('reward'):.3g} now"
    rise, error = w.rise("reward", part, part)
    least = w.limits.flat * (w.ends()[1] - w.mean("reward"))
    has_risen = w.sure("reward", steps - part, part) > w.limits.certainty
    if not (has_risen and rise <= 2 * error and rise + 2 * error < least):
        return ""
    return f"{rise:+.3g} ± {2 * error:.2g} in the last {2 * part * w.expected.logging_steps} steps"


def rise_yet(w: Watch) -> str:
    """Return how much the reward has risen, if that may be chance, and what would tell."""
    steps, half = len(w.lines), len(w.lines) // 2
    rise, error = w.rise("reward", steps - half, half)
    if not rise <= 2 * error or w.success(w.correct) >= w.limits.solved:
        return ""
    count = steps * w.each
    missing = max(0, w.limits.enough - count)
    more = (
        f"; {-(-missing // max(1, w.expected.completions))} more steps would tell"
        if missing
        else ""
    )
    return f"{rise:+.3g} ± {2 * error:.2g} between halves of {count:,} completions{more}"


# -- completions


def _readable(log: Log) -> pd.DataFrame:
    """Return the completions with texts and totals: step, question, text, total, each reward."""
    if log.completions is None or "completion" not in log.completions:
        return pd.DataFrame()
    table = log.completions
    names = [name for name in log.rewards if name in table]
    weights = log.facts.get("weights") or {}
    scores = table[names].apply(pd.to_numeric, errors="coerce")
    total = sum((weights.get(name, 1.0) * scores[name].fillna(0) for name in names), 0.0)
    columns = {"step": table.get("step", 0), "question": table.get("prompt", "").map(_text)}
    columns |= {"text": table["completion"].map(_text), "total": total}
    return pd.DataFrame(columns).join(scores)


def _text(value: Any) -> str:
    """Return the text of a prompt or completion, in whatever way a version has written it."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if value is None or isinstance(value, str):
        return value or ""
    turns = [dict(turn) for turn in value if isinstance(turn, Mapping)]
    return "\n".join(completion_text([turn]) for turn in turns)


def of_completions(table: pd.DataFrame, names: Sequence[str]) -> list[Check]:
    """Return what the completions of the last quarter show: copies, and pay by length."""
    if not len(table):
        return []
    checks, last = [], table[table["step"] >= table["step"].quantile(0.75)]
    if (copies := _copies(last)) > SAME:
        earlier = _copies(table[table["step"] <= table["step"].quantile(0.25)])
        evidence = f"{copies:.0%} of a group are copies at the end, {earlier:.0%} at the start"
        checks.append(Check("identical completions", "note", evidence))
    lengths = last["text"].str.len()
    for name in ["total", *(n for n in names if n in last)]:
        if last[name].std() > 0 and lengths.std() > 0:
            relation = float(np.corrcoef(lengths, last[name].fillna(0))[0, 1])
            if abs(relation) > ALIKE:
                evidence = (
                    f"`{name}` goes with the length of completions: correlation {relation:.2f}"
                )
                fix = "test the rewards: check_rewards(reward_funcs, dataset)"
                checks.append(Check("paid by length", "warning", evidence, fix))
                break
    return checks


def _copies(part: pd.DataFrame) -> float:
    """Return the mean share of copies in the groups of some steps: 1 if all texts are equal."""
    groups = part.groupby(["step", "question"])["text"]
    return float((1 - (groups.nunique() - 1) / (groups.size() - 1).clip(lower=1)).mean())


def _shares(log: Log) -> dict[str, float]:
    """Return each reward's share of what was paid over the run; {} if it is not known."""
    weights = log.facts.get("weights") or {}
    amounts = {}
    for name in log.rewards:
        values = [line.get(f"rewards/{name}/mean") for line in log.steps]
        values = [value for value in values if is_number(value)]
        amounts[name] = weights.get(name, np.nan) * float(np.mean(values)) if values else np.nan
    total = sum(abs(value) for value in amounts.values())
    return {name: v / total for name, v in amounts.items()} if total and total == total else {}


def _suspects(table: pd.DataFrame, log: Log, count: int = 10) -> pd.DataFrame:
    """Return completions that earned most and look wrong, each with the reason.

    They repeat themselves, say next to nothing, or give another answer than others that were paid
    as much for the same question.
    """
    if not len(table) or table["total"].nunique() < 2:
        return pd.DataFrame()
    best = table[table["total"] >= table["total"].quantile(PAID)]
    rows = []
    for _, row in best.drop_duplicates("text").iterrows():
        words = row["text"].split()
        if len(words) >= 8 and len(set(words)) / len(words) < 0.4:
            reason = "it repeats itself"
        elif not re.search(r"\w", re.sub(r"<[^>]*>", "", row["text"])):
            reason = "it says nothing"
        else:
            continue
        rows.append({"step": row["step"], "total": row["total"], "why": reason, **_shown(row)})
    rows += _contradictions(best)
    frame = pd.DataFrame(rows)
    return frame.sort_values("total", ascending=False).head(count) if rows else frame


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    return {"question": row["question"][-200:], "completion": row["text"][:400]}


def _contradictions(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return completions that end in another number than most that were paid for the question."""
    numbers = table["text"].str.findall(r"-?\d[\d,]*(?:\.\d+)?")
    last = numbers.map(lambda found: found[-1].replace(",", "").rstrip(".") if found else "")
    frame = table.assign(last=last)[last != ""]
    rows = []
    for _, group in frame.groupby("question"):
        counts = group["last"].value_counts()
        if len(counts) < 2 or counts.iloc[0] == counts.iloc[1]:
            continue
        odd = group[group["last"] != counts.index[0]].iloc[0]
        reason = f"it ends in {odd['last']}, and {counts.iloc[0]} others end in {counts.index[0]}"
        rows.append({"step": odd["step"], "total": odd["total"], "why": reason, **_shown(odd)})
    return rows


def _attacks(
    table: pd.DataFrame, reward_funcs: Any, dataset: Any, weights: Sequence[float] | None
) -> list[Check]:
    """Return the attacks that win against the rewards and that completions of the end resemble."""
    from grpo_nb.reward_lab.check import check_rewards

    verdict = check_rewards(reward_funcs, dataset, reward_weights=weights)
    checks = [c._replace(name=f"rewards: {c.name}") for c in verdict.findings if c.state == "stop"]
    if len(table):
        last = table[table["step"] >= table["step"].quantile(0.75)]["text"].map(_shape)
        for line in verdict.table:
            shape = _shape(line["completion"])
            share = float((last == shape).mean()) if line["won"] and shape else 0.0
            if share > 0.05:
                evidence = f"{share:.0%} of the last completions are like {line['completion']}"
                name = f"attack in use: {line['attack']}"
                checks.append(Check(name, "warning", evidence, "repair the reward that pays it"))
    return checks


def _shape(text: str) -> str:
    """Return a text without its numbers, cases and spaces, to compare it with another."""
    return re.sub(r"[\d\s]+", "", text.strip("'\"").lower())
