"""Make the placebo of a run, which is trained alike but with shuffled rewards, and compare the two.

`python -m grpo_nb run --name mine --placebo shuffled` makes the placebo `mine-shuffled`: it copies
the data, the tested rewards and the baseline rollouts of `mine` (stages 01 and 02), and runs stages
03 and 04 with the settings of `mine` and `train.placebo`. A gain that the placebo shares was not
caused by the reward, but by training as such, by the choice of the best adapter, or by luck. Run
and placebo answer the same held-out prompts, and are compared like any two models of a report. The
comparison is not stored, but computed whenever it is shown.

| run vs. baseline        | run vs. placebo     | placebo vs. baseline        | verdict        |
|-------------------------|---------------------|-----------------------------|----------------|
| better                  | better              | not better                  | CAUSED         |
| better                  | better              | better                      | PART           |
| better                  | not better (1)      | better                      | AS_MUCH        |
| better                  | not better          | not better                  | CANNOT_SAY     |
| not better              | –                   | –                           | CANNOT_SAY     |

(1) if the whole interval lies below half of the gain; otherwise CANNOT_SAY

Training without any signal changes a model, too. An interval over prompts does not account for
this, so the check "reward rises" of the run's training must be ok as well. Without this condition,
two of 20 random rewards were credited with a gain; with it, none was (benchmarks/placebo.py).
"""

import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_nb.checks import Check, Checks
from grpo_nb.evaluation.report import (
    LEAST_PROMPTS,
    compare_pair,
    greedy_answers,
    per_prompt,
    with_accuracy,
)
from grpo_nb.files import read_json, sha256, write_json
from grpo_nb.names import refuse_unknown
from grpo_nb.pipeline import notebooks
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import Run, refuse_undone
from grpo_nb.runs.config import flatten, resolve, stage_of, stored
from grpo_nb.stages.checkpoints import trained_steps

CAUSED = "the reward did it"
PART = "the reward did part of it"
AS_MUCH = "the placebo gained as much"
CANNOT_SAY = "cannot say"
NAME, KIND = "caused by the reward", "shuffled"  # the check, and the kind of placebo
# What a placebo does not copy: what stages 03 and 04 write, the locks, and what it writes itself.
OWN = ("train", "model", "eval", "figures", "notebooks", ".*", "manifest.json", "config.yaml")


class Cause(NamedTuple):
    """Hold the result of comparing a run with a placebo.

    verdict: CAUSED, PART, AS_MUCH or CANNOT_SAY.
    sentence: The verdict with its figures.
    pair: The comparison of placebo (before) and run (after), as `compare_pair` returns it.
    """

    verdict: str
    sentence: str
    pair: Mapping[str, Any]


def caused(run: Run) -> Checks:
    """Check whether the reward caused a run's gain, by comparing the run with its placebo.

    Args:
        run: A trained and evaluated run.

    Returns:
        One check, whose state is never "stop". Without a placebo, its state is "not yet", and its
        fix is the command that makes a placebo.
    """
    if run.config().train.placebo != "none":
        evidence = "this run is itself a placebo: ask about the run that it was made for"
        return Checks([Check(NAME, "ok", evidence)])
    return Checks([_check(run)])


def run_placebo(name: str, kind: str, force: bool = False, dry_run: bool = False) -> Run:
    """Train and evaluate a placebo of a run, or continue an interrupted placebo.

    Args:
        name: The name of a trained and evaluated run.
        kind: "shuffled".
        force: Whether to start the stages even if a check fails, for a run that was itself forced.
        dry_run: Whether to start nothing, and only print what would be executed.

    Returns:
        The run NAME-KIND.

    Raises:
        ValueError: Before anything starts: there is no such kind of placebo; the run is not done,
            has changed since, or is a placebo itself; or another run has the placebo's name.
        StageFailed, RuntimeError: From `notebooks.run_pipeline`.
    """
    refuse_unknown("placebo", kind, [KIND])
    run, placebo = Run(name), _placebo(Run(name))
    if why := run.why_undone():
        raise ValueError(f"a placebo needs a run that is trained and evaluated, but {why}")
    refuse_undone(run, "05")
    before = run.config()
    config = resolve(before.profile, {"train.placebo": kind}, stored=stored(before))
    kinds = before.train.placebo, placebo.config().train.placebo if placebo.manifest() else kind
    if kinds != ("none", kind):
        raise ValueError(
            f"{name!r} is itself a placebo, or {placebo.path} is none: give another run, or move "
            "that folder away"
        )
    if dry_run:
        print(notebooks.plan(placebo, config, "03", "04"))
        return placebo
    if not placebo.manifest():
        for folder in ("data", "rewards"):
            shutil.copytree(run / folder, placebo / folder, dirs_exist_ok=True)
        placebo.write_config(config)
        manifest = run.manifest()
        write_json(placebo / "manifest.json", {stage: manifest[stage] for stage in ("01", "02")})
    if stage := placebo.undone():
        notebooks.run_pipeline(placebo.name, first=stage, force=force)
    return placebo


def _placebo(run: Run) -> Run:
    return Run(run.path.with_name(f"{run.name}-{KIND}"))


def _check(run: Run) -> Check:
    placebo, command = _placebo(run), f"python -m grpo_nb run --name {run.name} --placebo {KIND}"
    try:
        if why := placebo.why_undone() if placebo.manifest() else "no placebo was trained":
            return Check(NAME, "not yet", why, command)
        cause = compare(run, placebo)
    except (FileNotFoundError, ValueError) as error:
        again = f"restore that file, or move {placebo.path} away and rerun the placebo: {command}"
        return Check(NAME, "warning", f"{CANNOT_SAY}: {error}", again)
    if cause.verdict == CAUSED:
        return Check(NAME, "ok", cause.sentence)
    fix = "docs/did-the-reward-do-it.md says what this verdict means, and what to do"
    return Check(NAME, "warning", cause.sentence, fix)


def compare(run: Run, placebo: Run) -> Cause:
    """Compare a run with its placebo by their greedy answers to the same held-out prompts.

    Raises:
        ValueError: The second run is not a placebo, or differs in more than its rewards; or the two
            answered different prompts.
        FileNotFoundError: One of the runs is not trained and evaluated, or the file of the run's
            rewards no longer exists.
    """
    if placebo.config().train.placebo == "none":
        raise ValueError(f"{placebo.name!r} is not a placebo: it was trained with real rewards")
    if names := ", ".join(differences(run, placebo)):
        raise ValueError(
            f"{placebo.name!r} and {run.name!r} cannot be compared: they differ in {names}"
        )
    preset, seed = load_rewards(run.config().rewards), run.config().seed
    (first, last), (_, placebo_last) = greedy_answers(run), greedy_answers(placebo)
    if list(last["question"]) != list(placebo_last["question"]):
        raise ValueError(f"{run.name!r} and {placebo.name!r} answered different held-out prompts")
    lines = {"baseline": first, run.name: last, placebo.name: placebo_last}
    lines = with_accuracy(lines, preset)
    baseline, ours, theirs = ((name, per_prompt(each, preset)) for name, each in lines.items())
    gain = compare_pair(baseline, ours, seed)
    of_placebo = compare_pair(baseline, theirs, seed)
    pair = compare_pair(theirs, ours, seed)
    states = {check["name"]: check["state"] for check in run.manifest()["03"].get("checks", [])}
    if pair["differences"]["accuracy"]["interval"] is None:
        detail = ": no completion could be scored"
    elif (count := len(last)) < LEAST_PROMPTS:
        detail = f": {count} held-out prompts are too few: at least {LEAST_PROMPTS}"
    elif gain["verdict"] != "better":
        detail = f": {run.name} is not better than its baseline, so there is no gain to explain"
    elif states.get("reward rises") != "ok":
        detail = f": the reward of {run.name} did not rise during training, so it is not the cause"
    else:
        verdict, detail = _judge(gain, of_placebo, pair)
        return Cause(verdict, f"{verdict}{detail}: {pair['sentence']}", pair)
    return Cause(CANNOT_SAY, f"{CANNOT_SAY}{detail}", pair)


def _judge(
    gain: Mapping[str, Any], of_placebo: Mapping[str, Any], pair: Mapping[str, Any]
) -> tuple[str, str]:
    """Return (verdict, detail), from run vs. baseline, placebo vs. baseline and run vs. placebo."""
    change, total = pair["differences"]["accuracy"], gain["differences"]["accuracy"]["difference"]
    if pair["verdict"] == "better":
        if of_placebo["verdict"] != "better":
            return CAUSED, ""
        ours = change["difference"]
        points = f"{100 * ours:.1f} of {100 * total:.1f} points gained ({ours / total:.0%})"
        return PART, f", {points}"
    if of_placebo["verdict"] != "better":
        return CANNOT_SAY, ", as the placebo's own gain is not distinguishable from 0"
    if change["interval"][1] > total / 2:
        return CANNOT_SAY, ", as the two gains are not distinguishable"
    return AS_MUCH, ""


def differences(run: Run, placebo: Run) -> list[str]:
    """Name the settings and files in which two trained runs differ, except for `train.placebo`."""
    first, second = _facts(run), _facts(placebo)
    names = [name for name in first | second if name != "train.placebo"]
    return [name for name in names if first.get(name) != second.get(name)]


def _facts(run: Run) -> dict[str, Any]:
    settings = {k: str(v) for k, v in flatten(run.config()).items() if stage_of(k) < "04"}
    # The arguments, rewards and data that were used in training, including changes made in a cell.
    settings |= read_json(run / "train/state.json")["settings"]
    settings["the steps that were trained"] = str(trained_steps(run / "train"))
    return settings | {"data/eval.parquet": sha256(run / "data/eval.parquet")}
