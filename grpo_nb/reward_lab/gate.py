"""Judge the rewards and the base of a run, store the verdict, and refuse any other rewards."""

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import environments, models
from grpo_nb.checks import Check, Checks
from grpo_nb.environments.check import perform
from grpo_nb.files import read_json, write_json
from grpo_nb.reward_lab.baseline import Baseline, RewardTest, warm_folder
from grpo_nb.reward_lab.check import FIXES, check_rewards, named
from grpo_nb.reward_lab.table import effective_scaling
from grpo_nb.rewards import Reward, RewardSet
from grpo_nb.rewards.load import source_digest
from grpo_nb.stats import pass_at_k

if TYPE_CHECKING:
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import RunConfig

REPORT = "rewards/report.json"
FINE = "the rewards are fine"  # and the base is not
BASE = "base model"  # the name of the check on the base model
WARM_UP = "an SFT warm-up (data.sft_rows = 64 and train.sft_steps = 12, or more)"
EASIER = "{}, easier rows (data.source), or another base (model.model_name)"
HARDER = "harder rows (data.source)"
MOSTLY = 0.5  # share of zero-advantage groups above which a base that is never right learns little
SPARE = 1.25  # recommended cap, relative to the 99th percentile of the baseline's lengths


class Verdict(NamedTuple):
    """Hold the result of stage 02 for a reward set.

    checks: "rewards" first, then the findings of `check_rewards` or of the environment's tests;
        then "base model" and "completion length".
    probes: What each attack earns, as in `RewardVerdict.table`; None for an environment.
    baseline: Figures of the baseline rollouts.
    """

    checks: Checks
    probes: pd.DataFrame | None
    baseline: dict[str, Any]

    @property
    def failures(self) -> list[str]:
        """Return the reasons why stage 03 will refuse to train."""
        return [f"{c.name}: {c.evidence}" for c in self.checks[1:] if c.state == "stop"]

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        if self.passed:
            return f"PASSED, train: {self.checks[0].evidence}"
        reason = _reason(self.checks[1:])
        is_base = reason.startswith(FINE) and self.baseline["pass@1"] < 1
        outcome = "train after a remedy" if is_base else "do not train"
        return "\n  ".join([f"FAILED, {outcome}: {reason}", *self.failures[1:]])


def judge(test: RewardTest) -> Verdict:
    """Judge rewards by `check_rewards`, and an environment by its tests."""
    stage, rows, baseline, bench = test
    config, probes = stage.config, None
    with redirect_stdout(io.StringIO()):  # rewards may print their arguments
        if bench.environment:  # its attacks are calls, not completions
            problems = list(environments.check_environment(bench.environment, rows))
        else:
            verdict = check_rewards(**arguments(test))
            problems, probes = list(verdict.findings), pd.DataFrame(verdict.table)
        try:
            table = test.table()
            if turns := bench.environment and bench.environment.solution(rows[0]):
                bench.score(rows[:1], [perform(bench.environment, rows[0], turns).messages])
        except Exception as error:  # a user's reward may raise anything; the verdict then fails
            if not any(check.state == "stop" for check in problems):
                evidence = ", ".join([repr(error), *getattr(error, "__notes__", [])])
                problems.append(Check("raises", "stop", evidence, FIXES["raises"]))
            return Verdict(Checks([_summary(problems), *problems]), probes, {})
    figures = summary(baseline, table, config)
    steps = config.train.sft_steps if warm_folder(stage.run, config) else 0
    checks = Checks([_summary(problems), *problems, *base_checks(figures, steps)])
    return Verdict(checks, probes, figures)


def arguments(test: RewardTest) -> dict[str, Any]:
    """Return the arguments of `check_rewards` and the Reward Lab for the rewards of a run."""
    _, rows, baseline, (preset, grpo, tokenizer, on_gpu, _) = test
    own = preset.own_reference
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
    }


def _reason(checks: Sequence[Check]) -> str:
    """Return why the rewards did not pass; add the fix if only the check of the base failed."""
    first = next(check for check in checks if check.state == "stop")
    if first.name == BASE:  # checks of the rewards come earlier, so none failed
        return f"{FINE}; {first.evidence}. What helps: {first.fix}"
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
    """Write rewards/report.json with the reward set's hash; store the checks in the manifest."""
    run, bench = test.stage.run, test.bench
    report = {
        "passed": verdict.passed,
        "failures": verdict.failures,
        "rewards_sha256": fingerprint(bench.preset),
        "environment": environments.identity(bench.environment),
        "weights": dict(zip(bench.preset.names, bench.preset.reward_weights, strict=True)),
        "checks": [check._asdict() for check in verdict.checks],
        "baseline": verdict.baseline,
        "probes": [] if verdict.probes is None else verdict.probes.to_dict("records"),
    }
    write_json(run / REPORT, report)
    run.record("02", {"checks": report["checks"]})  # replaces those of an earlier verdict


def refuse_untested(run: "Run", preset: RewardSet, force: bool = False) -> str:
    """Refuse to train with rewards that failed their test, or that were not tested.

    Args:
        run: The run, with the report of stage 02.
        preset: The rewards to train with.
        force: Whether to train regardless.

    Returns:
        The outcome, as a sentence for the user.

    Raises:
        ValueError: The verdict failed, is missing, or belongs to other rewards or weights.
    """
    remedy = "Correct them and run 02_test_rewards.ipynb again"
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
        if problem.startswith(FINE):
            remedy = "Set one of these and begin again with 01_prepare_data.ipynb"
        else:
            problem = f"the rewards failed their test: {problem}"
    else:
        return "the rewards passed their test"
    if force:
        return f"forced, although {problem}"
    raise ValueError(f"{problem}. {remedy}, or set force = True (on the command line: --force)")


# -- the base


def summary(baseline: Baseline, table: pd.DataFrame, config: "RunConfig") -> dict[str, Any]:
    """Return figures that describe the model before training.

    Args:
        baseline: Baseline rollouts.
        table: Their score table.
        config: The run's configuration, with the `max_completion_length` of training.
    """
    group, samples = len(baseline.samples_P_G[0]), baseline.samples
    right = table["correct"].to_numpy().reshape(-1, group)
    tokens = np.array([each.tokens for each in samples])
    solved = right.mean(axis=1)
    length = recommended_length(samples, config.grpo.max_completion_length)
    return {
        "prompts": len(baseline.rows),
        "completions per prompt": group,
        **{f"pass@{k}": float(pass_at_k(right, k).mean()) for k in (1, 2, 4, 8, 16) if k <= group},
        "prompts never solved": int((solved == 0).sum()),
        "prompts always solved": int((solved == 1).sum()),
        "share of zero-advantage groups": float(1 - table["signal"].mean()),
        "share of groups all right or all wrong": float(((solved == 0) | (solved == 1)).mean()),
        "share truncated": float(np.mean([each.truncated for each in samples])),
        "completion tokens, mean": float(tokens.mean()),
        "completion tokens, p95": float(np.quantile(tokens, 0.95)),
        "completion tokens, max": int(tokens.max()),
        "max_completion_length": config.grpo.max_completion_length,
        "recommended max_completion_length": length,
    }


def base_checks(figures: Mapping[str, Any], warm_steps: int = 0) -> list[Check]:
    """Check whether there is anything to learn, and whether the maximum length is sufficient.

    Args:
        figures: The figures that `summary` returned.
        warm_steps: Steps of the SFT warm-up after which the baseline was sampled; 0 for none.
    """
    rate, silent = figures["pass@1"], figures["share of zero-advantage groups"]
    subject = "the base after its warm-up" if warm_steps else "the base"
    base, state, fix = "", "ok" if 0 < rate < 1 else "warning", ""
    if silent == 1 or (rate == 0 and silent > MOSTLY):
        state = "stop"
        outcomes = {0: "does not solve this", 1: "always solves this"}
        base = f"{subject} {outcomes.get(rate, 'has one score for each prompt')}: "
    base += f"right in {rate:.1%} of its samples; {silent:.0%} zero-advantage groups"
    base += f", {figures['share of groups all right or all wrong']:.0%} all right or all wrong"
    if state != "ok":
        longer = f"a longer SFT warm-up (train.sft_steps = {4 * warm_steps}, more data.sft_rows)"
        fix = HARDER if rate == 1 else EASIER.format(longer if warm_steps else WARM_UP)
    cap, best = figures["max_completion_length"], figures["recommended max_completion_length"]
    cut, p95 = figures["share truncated"], figures["completion tokens, p95"]
    fits = cap >= best or (cut <= 0.05 and cap >= p95)
    usage = f"95 % of its completions have at most {p95:.0f} tokens, {cut:.0%} were cut; cap {cap}"
    length_fix = "" if fits else f"set grpo.max_completion_length = {best}"
    return [
        Check(BASE, state, base, fix),
        Check("completion length", "ok" if fits else "warning", usage, length_fix),
    ]


def recommended_length(samples: Sequence[models.Sample], cap_tokens: int) -> int:
    """Recommend max_completion_length from sampled lengths; twice the cap if many were truncated.

    >>> recommended_length([models.Sample("", 20, False)] * 99, 100)
    32
    """
    if sum(each.truncated for each in samples) > 0.05 * len(samples):
        return 2 * cap_tokens
    longest = float(np.quantile([each.tokens for each in samples if not each.truncated], 0.99))
    return 8 * math.ceil(SPARE * longest / 8)


# -- are they still the same?


def fingerprint(preset: RewardSet) -> str:
    """Return the SHA-256 of the sources, the options and the weights of the rewards.

    The source of a reward is its whole file, or only the function if it was written in a notebook.
    Values that a call may change are left out.
    """
    parts = [_described([*preset.pairs]), _described(preset.own_reference)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _described(value: Any) -> Any:
    """Return a value as nested lists of strings, which are the same in every process."""
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
