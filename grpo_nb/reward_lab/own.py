"""Rewards written in notebook 2: their cell becomes a file of the run, and that file is trained."""

import ast
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout

import numpy as np

from grpo_nb.reward_lab.pilot import Pilot
from grpo_nb.reward_lab.table import Bench, Row, explain
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.presets import load_python, with_weights
from grpo_nb.runs import Stage, atomic_path

MARK = (
    "# Your rewards"  # how the cell begins as shipped; one without it is known by what it defines
)
OWN = "rewards/mine.py"
HEAD = '"""The rewards of notebook 2."""\n\nfrom grpo_nb import rewards\n\nform = {form!r}\n\n\n'
RANGES = (
    "\n\n# Least and greatest score of baseline rollouts and references, where none is declared.\n"
)


def adopt(
    bench: Bench, rows: Sequence[Row], pilot: Pilot, stage: Stage, source: str | None = None
) -> Bench:
    """The bench with the rewards of the notebook's own cell, as notebook 3 will train with them.

    The cell is written to rewards/mine.py of the run and loaded from there: what is tested is
    what is trained. A cell that defines nothing leaves the preset.

    Args:
        bench: With the preset; its form (reference and answer) is kept.
        rows: Dataset rows, whose references say what a right answer earns.
        pilot: Samples of the base model.
        stage: Stage 02, whose `rewards.preset` becomes the file.
        source: Python text instead of the cell's.

    Raises:
        ValueError: The cell does not run by itself, or its list of rewards or weights is wrong.
    """
    text, path = cell_of_rewards() if source is None else source, stage.run / OWN
    preset, weights = stage.config.rewards.preset, stage.config.rewards.reward_weights
    if not _has_code(text):
        if preset != str(path) and stage.run.settings().get("rewards.preset") == str(path):
            stage.change({"rewards.preset": preset})
        return bench
    if preset == str(path):
        preset = ast.literal_eval(re.search("^form = (.*)$", path.read_text("utf-8"), re.M)[1])
    text = HEAD.format(form=preset) + text.strip("\n") + "\n"
    with redirect_stdout(io.StringIO()):
        chosen = load_python(path, text)
        ranges = _measured_ranges(bench._replace(preset=chosen), rows, pilot)
    if weights:
        with_weights(chosen, weights)
    if ranges:
        text += f"{RANGES}measured_ranges = {ranges!r}\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    stage.change({"rewards.preset": str(path)})
    return bench._replace(preset=load_preset(str(path), weights))


def cell_of_rewards() -> str:
    """The cell of rewards as it was run last in this notebook; "" where there is none."""
    from IPython import get_ipython

    shell = get_ipython()
    history = shell.history_manager if shell else None
    if history is None:
        return ""
    cells = zip(history.input_hist_raw, history.input_hist_parsed, strict=True)
    for raw, parsed in reversed(list(cells)):
        if raw.lstrip().startswith(MARK) or _defines_rewards(parsed):
            return raw
    return ""


def _has_code(text: str) -> bool:
    """Whether there is more in it than comments."""
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:  # which its loading will name
        return True


def _defines_rewards(text: str) -> bool:
    """A list of rewards, a function of `completions`, or one that is lifted by `@reward`."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:  # of a cell that did not run
        return False
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(argument.arg == "completions" for argument in arguments):
                return True
            if any("reward" in ast.unparse(decorator) for decorator in node.decorator_list):
                return True
        named = isinstance(node, ast.Name) and node.id == "reward_funcs"
        if named and isinstance(node.ctx, ast.Store):
            return True
    return False


def _measured_ranges(
    bench: Bench, rows: Sequence[Row], pilot: Pilot
) -> dict[str, tuple[float, float]]:
    """{reward: (least, greatest)} of those that declare no range and do not keep to [0, 1].

    The first reward's greatest score says "correct", so it is always measured.
    """
    tried = [*pilot.repeated_rows, *rows[:64]]
    texts = [one.text for one in pilot.samples]
    texts += [bench.preset.reference(row) for row in rows[:64]]
    arguments, ranges = bench.arguments(tried, texts), {}
    for number, func in enumerate(bench.preset.reward_funcs):
        if hasattr(func, "range"):
            continue
        try:
            scores = np.array([one.score for one in explain(func, arguments)], dtype=float)
        except Exception:  # a user's reward may raise anything: the verdict will say what
            continue
        scores = scores[np.isfinite(scores)]
        low, high = min([0.0, *scores.tolist()]), max([0.0, *scores.tolist()])
        if low < 0 or high > 1 or (number == 0 and high > 0):
            ranges[func.__name__] = (low, high or 1.0)
    return ranges
