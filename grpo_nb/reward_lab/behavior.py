"""Store what rewards and an environment do in stage 02, and compare it before stage 03 trains.

Scores may depend on things that no hash of sources covers: a file that is read, a library, a
server. So the same completions are scored again, and scripted policies play the same rows again.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from textwrap import shorten
from typing import Any

from grpo_nb import data
from grpo_nb.environments import Environment
from grpo_nb.environments.scripted import perform, policies
from grpo_nb.reward_lab.linter import FEW
from grpo_nb.reward_lab.table import Bench, Row
from grpo_nb.reward_lab.test import RewardTest
from grpo_nb.rewards import Adaptive, call
from grpo_nb.rewards.combine import is_async
from grpo_nb.rewards.prompts import transcript
from grpo_nb.rewards.surroundings import Muted
from grpo_nb.runs import Check, Run

PLAYED = 2  # rows that scripted policies play
TOLERANCE = 1e-3  # allowed difference between machines; relative for scores above 1
UNREPEATABLE = {"not deterministic", "depends on row order", "state leaks"}
UNREPEATABLE |= {"episode", "hangs"}  # findings of an environment
Scores = list[float | None]


def record(test: RewardTest, findings: Sequence[Check]) -> dict[str, Any]:
    """Return completions with their scores, and the rewards of scripted policies, as JSON types.

    Args:
        test: The test. Some of its baseline rollouts are scored, with the references of their rows;
            scripted policies play the first rows.
        findings: Findings of the linter and on the environment. Whatever they show to be
            unrepeatable is left out, and so are async rewards, which ask a judge.
    """
    _, rows, baseline, bench = test
    some = slice(None, None, math.ceil(len(baseline.samples) / FEW))
    some_rows, texts = baseline.repeated_rows[some], [s.completion for s in baseline.samples[some]]
    texts += [bench.preset.reference(row) for row in some_rows]
    places = [place for place, group in enumerate(baseline.samples_P_G) for _ in group][some]
    # JSON has no images, so places stand for rows: the baseline's are the first training rows.
    records = places * 2 if "images" in rows[0] else _plain(some_rows * 2)
    results = {"rows": records, "completions": _plain(texts), "scores": {}}
    arguments = bench.arguments(_rows(results, rows), results["completions"])
    results["completion_ids"] = arguments.get("completion_ids")
    unsteady = {check.name for check in findings if check.name.split(": ")[-1] in UNREPEATABLE}
    for func in bench.preset.reward_funcs:
        name = func.__name__
        if not (is_async(func) or any(each.startswith(f"{name}: ") for each in unsteady)):
            results["scores"][name] = _scores(func, arguments)
    if bench.environment and not unsteady & UNREPEATABLE:
        results["played"] = _plain(rows[:PLAYED])
        results["episodes"] = _plays(bench.environment, results["played"])
    return results


def difference(bench: Bench, results: dict[str, Any], run: Run) -> str:
    """Name the first reward or policy whose score differs from that of `record`; "" if none does.

    Any exception of a reward or a tool counts as a difference.

    Args:
        bench: The rewards, as they are now.
        results: What `record` returned.
        run: The run, whose data have the images of the rows.
    """
    try:
        with redirect_stdout(Muted()):  # rewards may print
            by_place = isinstance(results["rows"][0], int)
            rows = data.load(run, "train", max(results["rows"]) + 1) if by_place else []
            return next(_differences(bench, results, rows), "")
    except Exception as error:
        notes = ", ".join([str(error), *getattr(error, "__notes__", [])])
        return f"what ran in stage 02 raises now: {type(error).__name__}: {notes}"


def _rows(results: dict[str, Any], train_rows: Sequence[Row]) -> list[Row]:
    """Return the recorded rows; those with images are recorded as places in the training rows."""
    return [train_rows[row] if isinstance(row, int) else row for row in results["rows"]]


def _differences(bench: Bench, results: dict[str, Any], train_rows: Sequence[Row]) -> Iterator[str]:
    rows, texts = _rows(results, train_rows), results["completions"]
    arguments = bench.arguments(rows, texts)
    if results["completion_ids"]:
        arguments["completion_ids"] = results["completion_ids"]
    for func in bench.preset.reward_funcs:
        before = results["scores"].get(func.__name__)
        now = _scores(func, arguments) if before else []
        for row, text, *pair in zip(rows, texts, before or [], now, strict=False):
            where = f"{_short(transcript(text))}, a completion of {_short(row['question'])}"
            yield from _differ(f"reward {func.__name__}", where, *pair)
    if bench.environment and "played" in results:
        episodes = _plays(bench.environment, results["played"])
        for row, *both in zip(results["played"], results["episodes"], episodes, strict=True):
            for policy in both[0]:
                where = f"the scripted policy {policy!r} on {_short(row['question'])}"
                yield from _differ(bench.environment.title, where, *(each[policy] for each in both))


def _differ(what: str, where: str, before: float | None, now: float | None) -> Iterator[str]:
    """Yield a sentence if both are scores, and differ by more than two machines may differ."""
    if None not in (before, now) and abs(now - before) > TOLERANCE * max(1, abs(before)):
        yield f"{what} gives {now:.4g}, which is not what was tested ({before:.4g}), for {where}"


def _short(text: str) -> str:
    return repr(shorten(text, 80, placeholder="…"))


def _scores(func: Callable[..., Any], arguments: dict[str, Any]) -> Scores:
    steady = func.reward if isinstance(func, Adaptive) else func  # its factor moves in training
    return [_number(score) for score in call(steady, **arguments)]


def _plays(environment: Environment, rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Return the reward of each scripted policy on each row."""
    return [
        {
            name: _number(perform(environment, row, policy, seed).reward)
            for name, policy in policies(environment, row, rows[seed - 1]).items()
        }
        for seed, row in enumerate(rows)
    ]


def _number(score: Any) -> float | None:
    return None if score is None or not math.isfinite(score) else float(score)


def _plain(values: Any) -> Any:
    """Return values as JSON returns them, with None for whatever is not a number."""
    return json.loads(json.dumps(values, default=str), parse_constant=lambda _: None)
