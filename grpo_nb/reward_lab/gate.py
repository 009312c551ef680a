"""The gate: the verdict on a reward set, and its hash, so that a stale verdict shows."""

import hashlib
import inspect
import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from grpo_nb.reward_lab import pilot as pilots
from grpo_nb.reward_lab.cases import changed_cases, read_cases
from grpo_nb.reward_lab.linter import Finding, lint
from grpo_nb.reward_lab.probes import Probes, gold_report, probe
from grpo_nb.reward_lab.table import Bench, Row, signal_table
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import NOTEBOOKS, Run, Stage, project_path, write_json
from grpo_nb.runs.config import RunConfig

GOLD_ROWS = 512  # references that are scored
REPORT = "rewards/report.json"
UNUSABLE = ("raises", "missing column", "wrong length", "out of range")  # errors that end the test


class Verdict(NamedTuple):
    """All that stage 02 found out about a reward set.

    failures: Why stage 03 will refuse; empty: passed.
    findings: Of the linter.
    probes: What attacks earned; None where a reward raises.
    gold: Whether the reference wins, and where not.
    pilot: Figures of the sample.
    signal: A line a reward.
    """

    failures: list[str]
    findings: list[Finding]
    probes: Probes | None
    gold: dict[str, Any]
    pilot: dict[str, Any]
    signal: pd.DataFrame

    @property
    def passed(self) -> bool:
        return not self.failures and self.probes is not None

    def findings_table(self) -> pd.DataFrame:
        lines = [{**f._asdict(), "": "error" if f.error else "warning"} for f in self.findings]
        return pd.DataFrame(lines, columns=["", "rule", "reward", "evidence", "fix"])

    def __str__(self) -> str:
        warnings = sum(not finding.error for finding in self.findings)
        if self.passed:
            return f"PASSED: the gold wins, every attack loses; {warnings} warnings"
        return "\n  ".join(["FAILED, and notebook 3 will refuse to train:", *self.failures])


def judge(bench: Bench, rows: Sequence[Row], pilot: pilots.Pilot, stage: Stage) -> Verdict:
    """Linter, probes, references and saved cases on one pilot.

    Args:
        bench: The rewards.
        rows: Dataset rows whose references have to win; GOLD_ROWS of them are scored.
        pilot: Samples of the base model.
        stage: Stage 02: its run's cases, and the batch and lengths of the training to come.
    """
    with redirect_stdout(io.StringIO()):  # of rewards that print what they are called with
        return _judge(bench, rows, pilot, stage)


def _judge(bench: Bench, rows: Sequence[Row], pilot: pilots.Pilot, stage: Stage) -> Verdict:
    config = stage.config
    texts, completions = [one.text for one in pilot.samples], config.step_completions
    seconds = pilot.step_seconds(completions)
    findings = lint(bench, pilot.repeated_rows, texts, seconds, completions)
    errors = [f"{f.reward}: {f.rule}: {f.evidence}" for f in findings if f.error]
    if any(finding.error and finding.rule in UNUSABLE for finding in findings):
        return Verdict(errors, findings, None, {}, {}, pd.DataFrame())
    table = bench.table(pilot.rows, pilot.completions_P_G)
    own, saved = read_cases(*cases_of(stage.run, config))
    tested = [*pilot.rows, *rows[:GOLD_ROWS]]
    try:
        probes, gold = probe(bench, tested, own), gold_report(bench, tested, table)
        changed = changed_cases(bench, saved)
    except Exception as error:  # a user's reward may raise anything, and that is the verdict
        where = ", ".join(getattr(error, "__notes__", []))
        errors.append(f"a reward raises on an attack, a reference or a case: {error!r} {where}")
        return Verdict(errors, findings, None, {}, {}, signal_table(bench.preset, table))
    failures = [] if gold["gold_wins"] else [_lost(bench, gold)]
    failures += errors + [f"attack {name!r} {_why(probes, name)}" for name in probes.winners]
    failures += changed
    if not table["signal"].any():
        failures.append("no group of the pilot carries a signal: all its completions earn the same")
    figures = pilots.summary(pilot, table, bench.preset, config)
    return Verdict(failures, findings, probes, gold, figures, signal_table(bench.preset, table))


def _lost(bench: Bench, gold: dict[str, Any]) -> str:
    """That the reference loses: on how many rows, and the first of them."""
    question, first = gold["losers"][0], bench.preset.names[0]
    return (
        f"the gold loses on {len(gold['losers'])} rows: {question!r}, …; its reference, "
        f"{_quoted(gold['reference'])}, earns {gold['earned']:.3g} of {bench.preset.full:.3g} "
        f"from {first}. Where another form is asked for, define reference(row) beside the rewards"
    )


def _why(probes: Probes, name: str) -> str:
    because = probes.table.set_index("attack").at[name, "because"]
    return f"{because}: {_quoted(probes.completions[name])}"


def _quoted(completion: str) -> str:
    return repr(completion if len(completion) <= 100 else f"{completion[:100]}…")


def cases_of(run: Run, config: RunConfig) -> list[Path]:
    """The run's own file of cases, and the one that `rewards.cases` names.

    Raises:
        FileNotFoundError: The named one does not exist.
    """
    named = [project_path(config.rewards.cases)] if config.rewards.cases else []
    if named and not named[0].is_file():
        raise FileNotFoundError(f"rewards.cases: {named[0]} does not exist: create it, or clear it")
    return [run / "cases.jsonl", *named]


def save(run: Run, bench: Bench, verdict: Verdict) -> None:
    """Write rewards/report.json: the verdict, the reward set's hash, and the findings."""
    probes = verdict.probes.table.to_dict("records") if verdict.probes else []
    probes = [line | {"completion": verdict.probes.completions[line["attack"]]} for line in probes]
    report = {
        "passed": verdict.passed,
        "failures": verdict.failures,
        "rewards_sha256": fingerprint(bench.preset),
        "weights": dict(zip(bench.preset.names, bench.preset.reward_weights, strict=True)),
        "findings": [finding._asdict() for finding in verdict.findings],
        "gold": verdict.gold,
        "pilot": verdict.pilot,
        "signal": verdict.signal.to_dict("records"),
        "probes": probes,
    }
    write_json(run / REPORT, _finite(report))


def write_weights(
    bench: Bench, rows: Sequence[Row], pilot: pilots.Pilot, stage: Stage
) -> tuple[Verdict, str]:
    """Give the run these weights, with a verdict of their own; the message says what was done."""
    text = ", ".join(repr(w).removesuffix(".0") for w in bench.preset.reward_weights)
    run, changed = stage.run, {"rewards.reward_weights": text}
    held = run.is_locked
    run.lock()
    verdict = judge(bench, rows, pilot, stage)
    save(run, bench, verdict)
    stage.change(changed)
    run.record("02", {"outputs": run.files("rewards")})
    if not held:
        run.lock().release(force=True)
    return verdict, (
        f"written to {run.name}/config.yaml. Running notebook 2 again begins with the preset's "
        f'weights; to keep these, write reward_weights = "{text}" in its parameters'
    )


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def check(run: Run, preset: RewardSet, force: bool = False) -> str:
    """Refuse to train with rewards that failed, or that are not those that were tested.

    Returns:
        What it found, for the reader.

    Raises:
        ValueError: The verdict failed, is missing, or belongs to other rewards or weights.
    """
    path, notebook = run / REPORT, f"{NOTEBOOKS['02']}.ipynb"
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if report is None:
        problem = f"{REPORT} is missing"
    elif report["rewards_sha256"] != fingerprint(preset):
        problem = "the rewards or their weights are not those that were tested"
    elif not report["passed"]:
        first, *more = report["failures"]
        others = f" (and {len(more)} more in {REPORT})" if more else ""
        problem = f"the rewards failed their test: {first}{others}"
    else:
        return "the rewards passed their test"
    if force:
        return f"forced, although {problem}"
    raise ValueError(f"{problem}. Mend them and run {notebook} again, or set force = True")


def fingerprint(preset: RewardSet) -> str:
    """sha256 of the rewards' source, options and weights.

    The source is that of the whole file, helpers included, or of the function alone where
    it was written in a notebook.
    """
    parts = [
        [*_identity(func), weight]
        for func, weight in zip(preset.reward_funcs, preset.reward_weights, strict=True)
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _source(func: Callable[..., Any]) -> str:
    inner = getattr(func, "score", None) or func
    written = inner if hasattr(inner, "__code__") else type(inner).__call__
    file = Path(written.__code__.co_filename)
    return file.read_text(encoding="utf-8") if file.is_file() else inspect.getsource(written)


def _identity(func: Callable[..., Any]) -> list[Any]:
    """Name, source, options and parts of a reward, in whatever way it was made."""
    if isinstance(func, partial):
        return [*_identity(func.func), repr(func.args), repr(func.keywords)]
    moving = {"value", "step"}  # Adaptive's own
    if is_dataclass(func):  # a judge counts and caches, in attributes that are no fields
        moving = vars(func).keys() - {field.name for field in fields(func)}
    state = {k: v for k, v in vars(func).items() if k not in moving}
    state = {k: v for k, v in state.items() if isinstance(v, str | int | float | dict)}
    parts = [*getattr(func, "parts", ()), *filter(None, [getattr(func, "reward", None)])]
    return [
        getattr(func, "__name__", repr(type(func))),
        _source(func),
        repr(sorted(state.items())),
        [_identity(part) for part in parts],
    ]
