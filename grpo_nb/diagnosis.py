"""Judge a finished run: what went wrong, at which step it showed, and what cannot be told.

    from grpo_nb import autopsy
    autopsy("outputs")                  # TRL's output_dir, or one of its checkpoints
    autopsy("Llama3.1_GRPO.ipynb")      # an executed notebook

Curves are judged by the rules that watch training (`training.health`). If completions were kept,
the diagnosis shows those that earned most, because no curve shows that the reward pays for the
wrong thing.
"""

import html
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.checks import Check, Checks, shown
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.prompts import transcript
from grpo_nb.training.health import (
    LIMITS,
    NEEDS,
    Expected,
    Watch,
    constant,
    is_number,
    reward_rises,
)
from grpo_nb.training.logs import Log, read_log

CONSTANT = "constant reward"
LINES = 12  # findings that are printed
BEST = 10  # completions that are shown
STATES = ("stop", "warning", "note")
COMPLETIONS = 8  # completions in a step, where nothing says how many
STUCK = "reward stuck"
EVENTS = ("spike", "not a number", "samples differ", STUCK)  # are told though they are over
ERRORS = 2  # standard errors for STUCK, fewer than in training, since the whole run is known
# Alerts beside which it need not be said that the reward has not risen yet.
NO_RISE = {STUCK, "nothing learnt", "collapse", "reward falls", "little signal"}


class Autopsy(NamedTuple):
    """Hold the diagnosis of a run.

    Printing it shows what matters; displaying it in a notebook also shows curves.

    findings: Checks whose state is "stop", "warning" or "note", the worst first.
    skipped: Metrics that the log lacks; alerts that need them could not be raised.
    best: The completions of the last quarter that earned most: step, total, prompt, completion;
        empty if none were kept. Only a reader can tell whether they deserve it.
    log: The log that was read.
    correct: The name of the reward that says what is right; "" if it is not known.
    """

    findings: Checks
    skipped: list[str]
    best: pd.DataFrame
    log: Log
    correct: str = ""

    @property
    def passed(self) -> bool:
        """Return whether no finding says stop."""
        return not any(check.state == "stop" for check in self.findings)

    def __str__(self) -> str:
        log = self.log
        each = log.facts.get("completions")
        count = f"{each or COMPLETIONS} completions a step{'' if each else ' assumed'}"
        lines = [f"{log.source}: {len(log.steps)} lines, to step {log.lines[-1]['step']}, {count}"]
        lines += [shown(*check) for check in self.findings[:LINES]] or ["nothing was found"]
        more = len(self.findings) - LINES
        lines += [f"… and {more} more in .findings"] if more > 0 else []
        return "\n".join([*lines, *self._unjudged()])

    def _unjudged(self) -> list[str]:
        """Return sentences on what could not be judged, and what would help."""
        lines = []
        if self.skipped:
            lines.append(f"not logged, and so not judged: {', '.join(self.skipped)}")
        if not self.correct and len(self.log.rewards) > 1:
            lines.append("which reward says what is right is not known: correct=NAME tells more")
        return lines

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from grpo_nb.views import charts, tables

        first = html.escape(str(self).partition("\n")[0])
        parts = [f"<p><b>{first}</b></p>", tables.table(self.findings.table())]
        parts.append(charts.image(self.log.lines))
        parts += [f"<p>{html.escape(line)}</p>" for line in self._unjudged()]
        if len(self.best):
            parts.append("<p><b>Completions of the last quarter that earned most</b></p>")
            parts.append(tables.table(self.best))
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
    reward_weights: Sequence[float] | None = None,
    correct: str = "",
    completions_per_step: int = 0,
) -> Autopsy:
    """Find what went wrong in a finished run, or so far in one that is still training.

    Args:
        what: What holds the log: TRL's output folder or a checkpoint, a trainer_state.json, JSON
            lines, CSV, an executed notebook, a file of another type with what a trainer (TRL's or
            verl's) printed, a trainer, a run of ours, or a table or a list of logged lines.
        reward_weights: The weights; by default those of the trainer if `what` is one, else those
            with which the logged rewards add up to the total.
        correct: The name of the reward that says what is right; by default not known.
        completions_per_step: How many completions a step scored; by default read from the log.

    Returns:
        The diagnosis. Print it, display it, or `save` it as HTML.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: `what` holds no log of GRPO, or `correct` is none of the log's rewards.

    >>> lines = [{"step": n, "reward": 0.0, "frac_reward_zero_std": 1.0} for n in range(200)]
    >>> [check.name for check in autopsy(lines).findings]
    ['nothing learnt']
    """
    log = read_log(what)
    if correct:
        refuse_unknown("reward", correct, log.rewards)
    if completions_per_step:
        log.facts["completions"] = completions_per_step
    if reward_weights is not None:
        log.facts["weights"] = dict(zip(log.rewards, map(float, reward_weights), strict=False))
    watch = _watch(log, correct)
    findings: dict[str, Check] = {}
    for line in log.lines:
        for check in watch.feed(line):
            if check.name != CONSTANT:  # many a reward is earned late: the whole run tells
                findings.setdefault(check.name, check)
    rise, (gain, error) = reward_rises(watch), watch.rise_of_halves()
    if gain > 2 * error or (gain > error and STUCK not in watch.holding()):  # it was too early
        findings.pop(STUCK, None)
    if "nothing learnt" in findings:  # which says more
        findings.pop("little signal", None)
    findings = {name: _at_the_end(watch, check) for name, check in findings.items()}
    for rule, about, evidence in constant(watch, watch.limits.enough // 10):
        findings[rule] = watch.alert(rule, about, evidence, watch.lines[0].get("step", 1))
    checks = list(findings.values())
    is_solved = watch.success(watch.correct) >= watch.limits.solved
    if rise.state != "ok" and not is_solved and not findings.keys() & NO_RISE:
        checks.append(Check("no rise yet", "note", rise.evidence))
    checks.sort(key=lambda check: STATES.index(check.state))
    keys = {key for line in log.lines for key in line}
    skipped = [key for key in NEEDS if key not in keys]
    return Autopsy(Checks(checks), skipped, _best(log), log, correct)


def _at_the_end(watch: Watch, check: Check) -> Check:
    """Return the finding; turn it into a note if it did not occur in the run's last quarter.

    The note names the step at which it last occurred.

    A finding that is an event, such as a spike, is returned unchanged.
    """
    at, lines = watch.held()[check.name], len(watch.lines)
    if check.name in EVENTS or lines - at <= max(watch.window, lines // 4):
        return check
    step = watch.lines[at - 1].get("step", at)
    return check._replace(
        state="note", evidence=f"{check.evidence}, for the last time at step {step}"
    )


def _watch(log: Log, correct: str) -> Watch:
    """Return the `Watch` of a run, with the ranges of its rewards, but not yet fed with its lines.

    A reward's range is 0 to 1, widened to include the scores in the log, or lowered by
    `Watch.settle`.
    """
    weights = log.facts.setdefault("weights", _fitted_weights(log))
    keys = {name: f"rewards/{name}/mean" for name in log.rewards} or {"reward": "reward"}
    facts = {key: log.facts[key] for key in Expected._fields if log.facts.get(key)}
    ranges = {name: (weights.get(name, 1.0), 0.0, 1.0) for name in keys}
    watch = Watch(Expected(ranges, **{"completions": COMPLETIONS, **facts}, correct=correct))
    watch.limits = SimpleNamespace(**vars(LIMITS) | {"stuck": ERRORS})
    for name, key in keys.items():
        means = [line.get(key) for line in log.steps]
        watch.widen(name, means)
        if log.completions is not None and name in log.completions:
            watch.widen(name, log.completions[name].tolist())
        watch.settle(name, means)
    return watch


def _fitted_weights(log: Log) -> dict[str, float]:
    """Return the weights with which the logged rewards add up to the total; {} if none do.

    A reward that was never earned has weight 1, because the log does not tell.
    """
    keys = [f"rewards/{name}/mean" for name in log.rewards]
    lines = [[line.get(key) for key in ("reward", *keys)] for line in log.steps]
    lines = [line for line in lines if all(map(is_number, line))]
    if len(lines) < 3 * len(keys) or len(keys) < 2:
        return {}
    total, means = np.array(lines)[:, 0], np.array(lines)[:, 1:]
    error = 0.001 * np.abs(total).max() + 1e-6  # logs are rounded
    if np.allclose(means.sum(axis=1), total, rtol=0, atol=error):
        return {}
    weights = np.linalg.lstsq(means, total, rcond=None)[0]
    is_exact = np.allclose(means @ weights, total, rtol=0, atol=error)
    weights[~means.any(axis=0)] = 1.0
    return dict(zip(log.rewards, map(float, weights), strict=True)) if is_exact else {}


def _best(log: Log) -> pd.DataFrame:
    """Return the completions of the last quarter that earned most."""
    table = log.completions
    if table is None or "completion" not in table:
        return pd.DataFrame()
    table = table[table["step"] >= table["step"].quantile(0.75)]
    weights, names = log.facts.get("weights") or {}, [n for n in log.rewards if n in table]
    scores = table[names].apply(pd.to_numeric, errors="coerce").fillna(0)
    total = sum((weights.get(name, 1.0) * scores[name] for name in names), 0.0)
    columns = {"step": table["step"], "total": total}
    columns |= {name: table[name].map(transcript) for name in ("prompt", "completion")}
    return pd.DataFrame(columns).nlargest(BEST, "total")
