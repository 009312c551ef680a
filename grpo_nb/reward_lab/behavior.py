"""Record the behavior of rewards and an environment in stage 02, and compare it in stage 03.

Scores may depend on things that no hash of the sources covers, such as a file, a library or a
server. So stage 03 scores the same completions and replays the episodes again before it trains.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from grpo_nb import data
from grpo_nb.checks import Check
from grpo_nb.environments.check import perform
from grpo_nb.environments.contract import Row
from grpo_nb.reward_lab.baseline import RewardTest
from grpo_nb.reward_lab.table import Bench
from grpo_nb.rewards import Adaptive, call
from grpo_nb.rewards.combine import is_async
from grpo_nb.rewards.prompts import transcript
from grpo_nb.rewards.surroundings import Muted

if TYPE_CHECKING:
    from grpo_nb.runs import Run

TOLERANCE = 1e-3  # allowed difference between machines; relative for scores above 1
FEW = 64  # completions that are scored again
UNREPEATABLE = {"random", "state", "clock", "order", "compares the batch"}
Scores = list[float | None]


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
    unsteady = {check.name for check in findings if check.name.split(": ")[-1] in UNREPEATABLE}
    completions = json.loads(json.dumps(texts, default=str))
    arguments = bench.arguments([rows[place] for place in places], completions)
    scores = {
        func.__name__: _scores(func, arguments)
        for func in bench.preset.reward_funcs
        if not is_async(func)
        and not any(name.startswith(f"{func.__name__}: ") for name in unsteady)
    }
    ids = arguments.get("completion_ids")
    return {"rows": places, "completions": completions, "completion_ids": ids, "scores": scores}


def _reference(bench: Bench, row: Row) -> Any:
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
        with redirect_stdout(Muted()):  # rewards may print
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
            yield (
                f"reward {name} gives {now:.4g}, which is not what was tested "
                f"({before:.4g}), for {_short(transcript(text))}, a completion of "
                f"{_short(row['question'])}"
            )


def _short(text: str) -> str:
    return repr(shorten(text, 80, placeholder="…"))


def _scores(func: Callable[..., Any], arguments: dict[str, Any]) -> Scores:
    steady = func.reward if isinstance(func, Adaptive) else func  # the factor changes in training
    scores = call(steady, **arguments)
    return [None if s is None or not math.isfinite(s) else float(s) for s in scores]
