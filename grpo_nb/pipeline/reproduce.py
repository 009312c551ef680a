"""`python -m grpo_nb reproduce`: run a run again from its manifest, and say what differs."""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.pipeline.notebooks import run_pipeline, undone
from grpo_nb.runs import NOTEBOOKS, Run
from grpo_nb.runs import config as configs
from grpo_nb.training import read_lines

if TYPE_CHECKING:
    from rich.console import Console

# What a clock or the machine's load decides.
TIMED = ("seconds", "time", "tokens_per_second", "memory_gib")


class Line(NamedTuple):
    """One comparison; `counts` if a difference makes the run another one."""

    what: str
    first: str
    again: str
    equal: bool
    counts: bool = True


def reproduce(run: Run, name: str, console: "Console | None" = None) -> Run:
    """Run the four stages with the settings and the seed that the run has recorded.

    Raises:
        ValueError: The run is not finished, or the other name is taken.
    """
    if stages := undone(run):
        named = ", ".join(NOTEBOOKS[stage] for stage in stages)
        raise ValueError(f"run {run.name!r} has not finished {named}")
    run.refuse_edited()
    again = Run(name)
    if again.path.exists():
        raise ValueError(f"{again.path} is there already: give another name with --as")
    config = run.config()
    usual = configs.flatten(configs.resolve(config.profile, {"task": config.task}))
    settings = {k: v for k, v in configs.flatten(config).items() if usual.get(k) != v}
    run_pipeline(again.name, config.profile, settings | {"task": config.task}, console=console)
    return again


def compare(first: Run, again: Run, tolerance: float) -> list[Line]:
    """What is the same in both runs, and what is not.

    Data has to be the same byte for byte, metrics and evaluation within the tolerance. Other
    files (some hold times) and versions are told, for they explain a difference.

    Args:
        tolerance: Of a figure, absolute or relative.
    """
    one, two = _recorded(first), _recorded(again)
    lines = [
        Line(what, told, there, told == there, what.endswith(("train.parquet", "eval.parquet")))
        for what, told in one.items()
        for there in [two.get(what, "missing")]
    ]
    return [*lines, *_metrics(first, again, tolerance), *_evaluation(first, again, tolerance)]


def _recorded(run: Run) -> dict[str, str]:
    """What the manifest says of code, switches, packages and files."""
    manifest = run.manifest()
    told = {"code": manifest["01"]["git_commit"][:12]}
    told["UNSLOTH_*, VLLM_*"] = str(manifest["03"].get("switches", {}))
    files = {path: d[:12] for entry in manifest.values() for path, d in entry["outputs"].items()}
    return told | manifest["03"]["versions"] | files


def _metrics(first: Run, again: Run, tolerance: float) -> Iterator[Line]:
    """One line: the first step at which a metric differs, or that none does."""
    both = [read_lines(run / "train/metrics.jsonl") for run in (first, again)]
    for one, two in zip(*both, strict=False):
        for key in one:
            if not _timed(key) and not _close(one[key], two.get(key), tolerance):
                what = f"metrics, first at step {one['step']}: {key}"
                yield Line(what, str(one[key]), str(two.get(key)), False)
                return
    one, two = (f"{len(lines)} lines" for lines in both)
    yield Line("metrics, every step", one, two, one == two)


def _evaluation(first: Run, again: Run, tolerance: float) -> Iterator[Line]:
    one, two = (
        dict(_figures(json.loads((run / "eval/report.json").read_text("utf-8"))))
        for run in (first, again)
    )
    for key in sorted(one.keys() | two.keys()):
        if not _timed(key) and not key.startswith("models."):  # where they lie
            a, b = one.get(key), two.get(key)
            yield Line(f"evaluation {key}", str(a), str(b), _close(a, b, tolerance))


def _figures(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts and lists with its dotted name."""
    if not isinstance(content, dict | list):
        yield name, content
        return
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield from _figures(value, f"{name}.{key}" if name else str(key))


def _timed(key: str) -> bool:
    return any(word in key for word in TIMED)


def _close(one: Any, two: Any, tolerance: float) -> bool:
    numbers = isinstance(one, int | float) and isinstance(two, int | float)
    return math.isclose(one, two, rel_tol=tolerance, abs_tol=tolerance) if numbers else one == two


def show(lines: list[Line], console: "Console") -> bool:
    """Print the differences; returns whether the run has been reproduced."""
    from rich.table import Table

    table = Table("", "first", "again", "", title=f"{len(lines)} comparisons", title_justify="left")
    for line in [line for line in lines if not line.equal]:
        mark = "DIFFERS" if line.counts else "differs"
        table.add_row(line.what, line.first, line.again, mark)
    same = all(line.equal for line in lines if line.counts)
    console.print(table if table.rows else f"All {len(lines)} comparisons are equal.")
    console.print("reproduced" if same else "NOT reproduced")
    return same
