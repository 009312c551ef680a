"""Judge a reward set, and store the verdict with the set's hash to detect a stale verdict."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from grpo_nb import environments
from grpo_nb.checks import Check, Checks
from grpo_nb.files import project_path, read_json, write_json
from grpo_nb.reward_lab import base_model, behavior, looking
from grpo_nb.reward_lab.attacks import Attack, read_attacks
from grpo_nb.reward_lab.baseline import RewardTest, warm_folder
from grpo_nb.reward_lab.certificate import certify, cost, judges
from grpo_nb.reward_lab.check import FIXES, RewardVerdict, check_rewards
from grpo_nb.reward_lab.looking import images
from grpo_nb.reward_lab.table import bench_of, signal_table
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.identity import describe
from grpo_nb.rewards.prompts import Message, message_text
from grpo_nb.rewards.surroundings import Muted

if TYPE_CHECKING:
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import RunConfig

REPORT = "rewards/report.json"
SCORES = "rewards/scores.json"


class Verdict(NamedTuple):
    """Hold the result of stage 02 for a reward set.

    checks: "rewards" first, then the findings of `check_rewards` or of the environment's tests, and
        of judges; then "base model", "completion length", and whether images are needed (if there
        are any).
    probes: What each attack earns, as in `RewardVerdict.table`; None for an environment.
    baseline: Figures of the baseline rollouts.
    signal: The `signal_table`, one line per reward.
    scores: The result of `behavior.record`, which stage 03 compares with new scores.
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
        """Return whether only the base's check failed, and not because the base is always right.

        `training.rescue` may help in this case.
        """
        blamed = [check.name for check in self.checks if check.state == "stop"]
        return blamed == [base_model.BASE] and self.baseline["pass@1"] < 1

    def advised(self, remedy: str) -> "Verdict":
        """Return the verdict with `remedy` as the fix of the base's check; "" changes nothing.

        Args:
            remedy: The advice of `training.rescue_base`.
        """
        checks = [
            c._replace(fix=remedy or c.fix) if c.name == base_model.BASE else c for c in self.checks
        ]
        return self._replace(checks=Checks(checks))

    def __str__(self) -> str:
        if self.passed:
            lines = [f"{c.name}: {c.evidence}" for c in self.checks if c.name == looking.WITHOUT]
            return "\n  ".join([f"PASSED, train: {self.checks[0].evidence}", *lines])
        outcome = "train after a remedy" if self.only_the_base_fails else "do not train"
        first = f"FAILED, {outcome}: {_reason(self.checks[1:])}"
        return "\n  ".join([first, *self.failures[1:]])


def judge(test: RewardTest) -> Verdict:
    """Judge rewards by `check_rewards`, and an environment by its tests.

    The setting `rewards.cases` names the file of the user's own attacks. If a reward is itself a
    judge, it is certified too, and an estimate of the cost is printed first.
    """
    stage, rows, baseline, bench = test
    config = stage.config
    attacks = read_attacks(project_path(config.rewards.cases)) if config.rewards.cases else []
    probes, scores = None, {}
    for each in judges(bench.preset):
        print(cost(each, test))
    with redirect_stdout(Muted()):  # rewards may print their arguments
        if bench.environment:  # its attacks are calls, not completions
            cap = config.grpo.max_completion_length
            check = environments.check_environment
            problems = list(check(bench.environment, rows, bench.tokenizer, cap))
        else:
            checked = _checked(test, attacks)
            problems, probes = list(checked.findings), pd.DataFrame(checked.table)
            problems += _form_asked(bench.preset, rows[0]["prompt"], config)
            problems += images(bench, rows)
        try:
            table = test.table()
            for each in judges(bench.preset):
                problems += certify(each, test)
            scores = behavior.record(test, problems)
        except Exception as error:  # a user's reward may raise anything; the verdict then fails
            if not any(check.state == "stop" for check in problems):
                evidence = ", ".join([repr(error), *getattr(error, "__notes__", [])])
                problems.append(Check("raises", "stop", evidence, FIXES["raises"]))
            return Verdict(Checks([_summary(problems), *problems]), probes, {}, pd.DataFrame())
    warmed = warm_folder(stage.run, config) is not None
    figures = base_model.summary(baseline, table, bench.preset, config)
    needs = looking.figures(bench, baseline)
    last = [*base_model.checks(figures, warmed), *looking.checks(needs)]
    checks, figures = Checks([_summary(problems), *problems, *last]), figures | needs
    return Verdict(checks, probes, figures, signal_table(bench.preset, table), scores)


def _checked(test: RewardTest, attacks: Sequence[Attack]) -> RewardVerdict:
    """Return the verdict of `check_rewards`, in the run's form if the rewards read it."""
    _, rows, baseline, (preset, grpo, tokenizer, *_) = test
    options: dict[str, Any] = {
        "completions": baseline.completions_P_G,
        "reward_weights": preset.reward_weights,
        "correct": preset.correct_func,
        "args": {"max_completion_length": grpo.max_completion_length},
        "processing_class": tokenizer,
        "attacks": attacks,
    }
    if own := (preset.own or {}).get("reference"):
        return check_rewards(preset.reward_funcs, rows, reference=own, **options)
    form = preset.form.write("{reasoning}", "{answer}")
    verdict = check_rewards(preset.reward_funcs, rows, form=form, **options)
    if any(check.name == "nothing earns" for check in verdict.findings):
        other = check_rewards(preset.reward_funcs, rows, **options)
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
    fix = f"prepare the data with rewards.form = {form.name!r}"
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
        count = sum(check.state == "warning" for check in problems)
        return Check("rewards", "ok", f"right answers win, attacks lose; {count} warnings")
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

    The rewards are compared by source and by behavior: stage 03 scores the completions of stage 02
    again, including the calls of its episodes.

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
    elif change := behavior.difference(
        bench_of(run.config(), preset), read_json(run / SCORES), run
    ):
        problem = change
    else:
        return "the rewards passed their test"
    if force:
        return f"forced, although {problem}"
    raise ValueError(f"{problem}. {remedy}, or set force = True (on the command line: --force)")


def fingerprint(preset: RewardSet) -> str:
    """Return the SHA-256 of the sources, the options and the weights of the rewards.

    A source is the whole file, or only the function if it was written in a notebook. Values that a
    call may change are left out.
    """
    parts = [
        [describe(func), weight]
        for func, weight in zip(preset.reward_funcs, preset.reward_weights, strict=True)
    ]
    functions = describe(dict(preset.own or {}))
    return hashlib.sha256(json.dumps([parts, functions]).encode()).hexdigest()
