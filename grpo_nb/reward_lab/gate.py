"""Judge the rewards of a run, store the verdict, and refuse to train with any others.

Stage 03 scores the completions of stage 02 again, and replays its episodes. So it also sees what no
hash of a source covers, such as a file, a library or a server that rewards depend on.
"""

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from grpo_nb import data, environments
from grpo_nb.checks import Check, Checks
from grpo_nb.environments.check import perform
from grpo_nb.files import project_path, read_json, write_json
from grpo_nb.reward_lab import base_model
from grpo_nb.reward_lab.advantages import effective_scaling
from grpo_nb.reward_lab.attacks import read_attacks
from grpo_nb.reward_lab.baseline import RewardTest, warm_folder
from grpo_nb.reward_lab.certificate import certify, judges
from grpo_nb.reward_lab.check import FIXES, RewardVerdict, check_rewards, named
from grpo_nb.reward_lab.table import Bench, bench_of, signal_table
from grpo_nb.rewards import Adaptive, Reward, RewardSet, call
from grpo_nb.rewards.combine import is_async
from grpo_nb.rewards.load import source_digest
from grpo_nb.rewards.prompts import Message, message_text, transcript

if TYPE_CHECKING:
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import RunConfig

REPORT = "rewards/report.json"
SCORES = "rewards/scores.json"
TOLERANCE = 1e-3  # allowed difference between machines; relative for scores above 1
FEW = 64  # completions that are scored again
UNREPEATABLE = {"random", "state", "clock", "order", "compares the batch"}


class Verdict(NamedTuple):
    """Hold the result of stage 02 for a reward set.

    checks: "rewards" first, then the findings of `check_rewards` or of the environment's tests, and
        of judges; then "base model", "completion length", and whether images are needed (if there
        are any).
    probes: What each attack earns, as in `RewardVerdict.table`; None for an environment.
    baseline: Figures of the baseline rollouts.
    signal: The `signal_table`, one line per reward.
    scores: The result of `record`, which stage 03 compares with new scores.
    """

    checks: Checks
    probes: pd.DataFrame | None
    baseline: dict[str, Any]
    signal: pd.DataFrame
    scores: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    @property
    def failures(self) -> list[str]:
        """Return the reasons why stage 03 will refuse to train."""
        return [f"{c.name}: {c.evidence}" for c in self.checks[1:] if c.state == "stop"]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def only_the_base_fails(self) -> bool:
        """Return whether only the base's check failed, and not because the base is always right."""
        blamed = [check.name for check in self.checks if check.state == "stop"]
        return blamed == [base_model.BASE] and self.baseline["pass@1"] < 1

    def __str__(self) -> str:
        if self.passed:
            lines = [f"{c.name}: {c.evidence}" for c in self.checks if c.name == base_model.WITHOUT]
            return "\n  ".join([f"PASSED, train: {self.checks[0].evidence}", *lines])
        outcome = "train after a remedy" if self.only_the_base_fails else "do not train"
        first = f"FAILED, {outcome}: {_reason(self.checks[1:])}"
        return "\n  ".join([first, *self.failures[1:]])


def judge(test: RewardTest) -> Verdict:
    """Judge rewards by `check_rewards`, and an environment by its tests.

    The setting `rewards.cases` names the file of the user's own attacks. If a reward is itself a
    judge, it is certified too.
    """
    stage, rows, baseline, bench = test
    config, probes = stage.config, None
    with redirect_stdout(io.StringIO()):  # rewards may print their arguments
        if bench.environment:  # its attacks are calls, not completions
            problems = list(environments.check_environment(bench.environment, rows))
        else:
            verdict = _verdict(test)
            problems, probes = list(verdict.findings), pd.DataFrame(verdict.table)
            problems += _form_asked(bench.preset, rows[0]["prompt"], config)
        try:
            table = test.table()
            for each in judges(bench.preset):
                problems += certify(each, test)
            scores = record(test, problems)
        except Exception as error:  # a user's reward may raise anything; the verdict then fails
            if not any(check.state == "stop" for check in problems):
                evidence = ", ".join([repr(error), *getattr(error, "__notes__", [])])
                problems.append(Check("raises", "stop", evidence, FIXES["raises"]))
            return Verdict(Checks([_summary(problems), *problems]), probes, {}, pd.DataFrame())
    figures = base_model.summary(baseline, table, bench.preset, config)
    steps = config.train.sft_steps if warm_folder(stage.run, config) else 0
    last = base_model.checks(figures, steps)
    guesses, looks = base_model.without_looking(baseline, bench)
    checks, figures = Checks([_summary(problems), *problems, *last, *looks]), figures | guesses
    return Verdict(checks, probes, figures, signal_table(bench.preset, table), scores)


def arguments(test: RewardTest) -> dict[str, Any]:
    """Return the arguments of `check_rewards` and the Reward Lab for the rewards of a run."""
    stage, rows, baseline, (preset, grpo, tokenizer, on_gpu, _) = test
    cases, own = stage.config.rewards.cases, preset.own_reference
    attacks = read_attacks(project_path(cases)) if cases else []
    scaling = effective_scaling(grpo.scale_rewards, grpo.loss_type, on_gpu)
    return {
        "reward_funcs": preset.reward_funcs,
        "dataset": rows,
        "completions": baseline.completions_P_G,
        "reward_weights": preset.reward_weights,
        "correct": preset.correct_func,
        "reference": own,
        "form": "" if own else preset.form.write("{reasoning}", "{answer}"),
        "args": {
            "max_completion_length": grpo.max_completion_length,
            "scale_rewards": scaling,
            "multi_objective_aggregation": grpo.multi_objective_aggregation,
        },
        "processing_class": tokenizer,
        "attacks": attacks,
    }


def _verdict(test: RewardTest) -> RewardVerdict:
    """Return the verdict of `check_rewards`, in the run's form if the rewards read it."""
    options = arguments(test)
    verdict, form = check_rewards(**options), options["form"]
    if form and any(check.name == "nothing earns" for check in verdict.findings):
        other = check_rewards(**options | {"form": ""})
        if other.form:
            evidence = f"the rewards read {other.form!r}, and the run writes {form!r}"
            fix = "set rewards.form, or define reference(row) beside the rewards"
            other.findings.insert(0, Check("form", "stop", evidence, fix))
            return other
    return verdict


def _form_asked(preset: RewardSet, prompt: list[Message], config: "RunConfig") -> list[Check]:
    """Return a warning if the prompts lack the system prompt of the rewarded form."""
    form, turns = preset.form, list(map(message_text, prompt))
    in_prompt = not turns or any(form.system_prompt in turn for turn in turns)
    if in_prompt or config.data.system_prompt != "preset":
        return []
    evidence = f"completions are read as {form.name}, but no prompt says {form.system_prompt!r}"
    fix = "prepare the data again in this form (notebook 1)"
    fix += f", with rewards.form = {form.name!r}" if config.rewards.form != form.name else ""
    return [Check("form", "warning", evidence, fix)]


def _reason(checks: Sequence[Check]) -> str:
    """Return the reason why a verdict failed, with the fix if only the base's check failed."""
    first = next(check for check in checks if check.state == "stop")
    if first.name == base_model.BASE:  # checks of the rewards come earlier, so none failed
        return f"the rewards are fine; {first.evidence}. What helps: {first.fix}"
    return f"{first.name}: {first.evidence}"


def _summary(problems: Sequence[Check]) -> Check:
    """Return the check "rewards", whose state is "stop" if any of the problems has that state."""
    stops = [check for check in problems if check.state == "stop"]
    if not stops:
        warnings = named(problems, "warning")
        outcome = f"nothing says stop; warnings: {warnings}" if warnings else "attacks lose"
        return Check("rewards", "ok", f"right answers win, {outcome}")
    count = f"{len(stops)} reasons to stop, the first" if stops[1:] else "a reason to stop"
    evidence = f"{count}: {stops[0].name}: {stops[0].evidence}"
    return Check("rewards", "stop", evidence, f"{stops[0].fix}; then test them again")


def save(test: RewardTest, verdict: Verdict) -> None:
    """Write rewards/report.json with the reward set's hash; store the checks in the manifest.

    rewards/scores.json contains the completions that `refuse_untested` scores again.
    """
    run, bench = test.stage.run, test.bench
    report = {
        "passed": verdict.passed,
        "failures": verdict.failures,
        "rewards_sha256": fingerprint(bench.preset),
        "environment": environments.identity(bench.environment),
        "weights": dict(zip(bench.preset.names, bench.preset.reward_weights, strict=True)),
        "checks": [check._asdict() for check in verdict.checks],
        "baseline": verdict.baseline,
        "signal": _lines(verdict.signal),
        "probes": _lines(pd.DataFrame() if verdict.probes is None else verdict.probes),
    }
    write_json(run / REPORT, report)
    write_json(run / SCORES, verdict.scores)
    run.record("02", {"checks": report["checks"]})  # replaces those of an earlier verdict


def _lines(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert a frame to JSON records, with null for NaN."""
    return json.loads(frame.to_json(orient="records"))


def refuse_untested(run: "Run", preset: RewardSet, force: bool = False) -> str:
    """Refuse to train with rewards that failed their test, or that were not tested.

    The rewards are compared by source, and by how they score the completions of stage 02, including
    the calls of its episodes.

    Args:
        run: The run, with the report of stage 02.
        preset: The rewards to train with.
        force: Whether to train regardless.

    Returns:
        The outcome, as a sentence for the user.

    Raises:
        ValueError: The verdict failed, is missing, or belongs to other rewards or weights.
    """
    remedy = f"Correct them and run {run.place('02')} again"
    report = read_json(run / REPORT) if (run / REPORT).is_file() else {}
    if not report:
        problem = f"{REPORT} is missing"
    elif report["rewards_sha256"] != fingerprint(preset):
        problem = "the rewards or their weights are not those that were tested"
    elif report.get("environment", "") != environments.identity(environments.of(run.config())):
        problem = "the environment is not the one that was tested"
    elif not report["passed"]:
        others = f" (and {more} more in {REPORT})" if (more := len(report["failures"]) - 1) else ""
        problem = _reason([Check(**line) for line in report["checks"][1:]]) + others
        if problem.startswith("the rewards are fine"):
            remedy = f"Set one of these and begin again with {run.place('01')}"
        else:
            problem = f"the rewards failed their test: {problem}"
    elif change := difference(bench_of(run.config(), preset), read_json(run / SCORES), run):
        problem = change
    else:
        return "the rewards passed their test"
    if force:
        return f"forced, although {problem}"
    raise ValueError(f"{problem}. {remedy}, or set force = True (on the command line: --force)")


# -- are they still the same?


def fingerprint(preset: RewardSet) -> str:
    """Return the SHA-256 of the sources, the options and the weights of the rewards.

    A source is the whole file, or only the function if it was written in a notebook. Values that a
    call may change are left out.
    """
    parts = [_described([*preset.pairs]), _described(preset.own_reference)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _described(value: Any) -> Any:
    """Return a value as nested lists of strings, which are equal in every process."""
    if isinstance(value, Reward):
        value = [value.score, value.settings, value.options]
    elif isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    elif is_dataclass(value) and not isinstance(value, type):  # a judge's counts are not fields
        value = [type(value), {each.name: getattr(value, each.name) for each in fields(value)}]
    if isinstance(value, dict):
        return sorted(map(_described, value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(_described, value), key=repr)
    if isinstance(value, list | tuple):
        return list(map(_described, value))
    if callable(value):
        return source_digest(value)
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def record(test: RewardTest, findings: Sequence[Check]) -> dict[str, Any]:
    """Return completions, the indices of their training rows, and their scores, as JSON types.

    Args:
        test: The test. The scored completions are some of its baseline rollouts, and the references
            of their rows, or their solutions in an environment.
        findings: Findings of the linter. Rewards with an unrepeatable result are left out. So are
            async rewards, because they call a judge.
    """
    baseline, bench = test.baseline, test.bench
    rows = baseline.rows  # the first training rows
    some = slice(None, None, math.ceil(len(baseline.samples) / FEW))
    places = [place for place, group in enumerate(baseline.samples_P_G) for _ in group][some]
    texts = [sample.completion for sample in baseline.samples[some]]
    references = {place: _reference(bench, rows[place]) for place in {*places}}
    texts += [references[place] for place in places]
    places *= 2
    names = [check.name.rpartition(": ") for check in findings]
    unsteady = {name for name, _, rule in names if rule in UNREPEATABLE}
    completions = json.loads(json.dumps(texts, default=str))
    arguments = bench.arguments([rows[place] for place in places], completions)
    scores = {
        func.__name__: _scores(func, arguments)
        for func in bench.preset.reward_funcs
        if not is_async(func) and func.__name__ not in unsteady
    }
    ids = arguments.get("completion_ids")
    return {"rows": places, "completions": completions, "completion_ids": ids, "scores": scores}


def _reference(bench: Bench, row: dict[str, Any]) -> Any:
    """Return a row's reference completion, or the episode of its solution in an environment."""
    turns = bench.environment.solution(row) if bench.environment else None
    if turns is None:
        return bench.preset.reference(row)
    return perform(bench.environment, row, turns).messages


def difference(bench: Bench, results: dict[str, Any], run: "Run") -> str:
    """Describe the first completion whose score differs from the recorded one; "" if none does.

    Any exception that a reward or a tool raises counts as a difference.

    Args:
        bench: The rewards, as they are now.
        results: The result of `record`.
        run: The run, whose training rows contain the prompts.
    """
    try:
        with redirect_stdout(io.StringIO()):  # rewards may print
            return next(_differences(bench, results, run), "")
    except Exception as error:
        notes = ", ".join([str(error), *getattr(error, "__notes__", [])])
        return f"what ran in stage 02 now raises {type(error).__name__}: {notes}"


def _differences(bench: Bench, results: dict[str, Any], run: "Run") -> Iterator[str]:
    """Yield a sentence for each score that differs by more than TOLERANCE allows."""
    train_rows = data.load(run, "train", max(results["rows"]) + 1)
    rows, texts = [train_rows[place] for place in results["rows"]], results["completions"]
    arguments = bench.arguments(rows, texts)
    if results["completion_ids"]:
        arguments["completion_ids"] = results["completion_ids"]
    funcs = dict(zip(bench.preset.names, bench.preset.reward_funcs, strict=True))
    for name, tested in results["scores"].items():
        scores = _scores(funcs[name], arguments)
        for row, text, before, now in zip(rows, texts, tested, scores, strict=True):
            if None in (before, now) or abs(now - before) <= TOLERANCE * max(1, abs(before)):
                continue
            completion, question = (
                repr(shorten(each, 80, placeholder="…"))
                for each in (transcript(text), row["question"])
            )
            yield (
                f"reward {name} gives {now:.4g}, which is not what was tested ({before:.4g}), for "
                f"{completion}, a completion of {question}"
            )


def _scores(func: Callable[..., Any], arguments: dict[str, Any]) -> list[float | None]:
    steady = func.reward if isinstance(func, Adaptive) else func  # the factor changes in training
    scores = call(steady, **arguments)
    return [None if s is None or not math.isfinite(s) else float(s) for s in scores]
