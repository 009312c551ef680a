"""A run's rewards: in its template, and as notebook 2 writes them: its cell becomes a file."""

import ast
import io
import math
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from grpo_nb.models import chat
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.reward_lab.table import Bench, Row, explain
from grpo_nb.rewards import RewardSet, load_rewards
from grpo_nb.rewards.presets import load_python
from grpo_nb.runs import Stage, atomic_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CELL = re.compile(  # as shipped; else a function of `completions`, one that is lifted, or a list
    r"\A\s*# Your rewards|^\s*(?:async )?def \w+\([^)]*\bcompletions\b"
    r"|^\s*@(?:\w+\.)?reward\b|^reward_funcs\b[^=\n]*=(?!=)",
    re.MULTILINE,
)
OWN = "rewards/mine.py"
HEAD = '"""The rewards of notebook 2."""\n\nfrom grpo_nb import rewards\n\nform = {form!r}\n\n\n'
RANGES = "\n\n# Least and greatest scores seen, where none are declared.\nmeasured_ranges = {!r}\n"


def adopt(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str | None = None
) -> Bench:
    """The bench with the rewards of the notebook's own cell, as notebook 3 will train with them.

    The cell is written to rewards/mine.py of the run and loaded from there: what is tested is
    what is trained. A cell that defines nothing leaves the preset.

    Args:
        bench: With the preset; its form (reference and answer) is kept.
        rows: Dataset rows, whose references say what a right answer earns.
        baseline: Baseline rollouts.
        stage: Stage 02, whose `rewards.preset` becomes the file.
        source: Python text instead of the cell's.

    Raises:
        ValueError: The cell does not run by itself, or its list of rewards or weights is wrong.
    """
    text, path = cell_of_rewards() if source is None else source, stage.run / OWN
    config = stage.config.rewards
    preset = config.preset
    if all(line.lstrip()[:1] in ("", "#") for line in text.splitlines()):
        if preset != str(path) and stage.run.settings().get("rewards.preset") == str(path):
            stage.change({"rewards.preset": preset})
        return bench
    if preset == str(path):
        preset = ast.literal_eval(re.search("^form = (.*)$", path.read_text("utf-8"), re.M)[1])
    text = HEAD.format(form=preset) + text.strip("\n") + "\n"
    with redirect_stdout(io.StringIO()):
        chosen = load_python(path, text).in_form(config.form, config.opened)
        ranges = _measured_ranges(bench._replace(preset=chosen), rows, baseline)
    if ranges:
        text += RANGES.format(ranges)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    trained = load_rewards(config.model_copy(update={"preset": str(path)}))
    stage.change({"rewards.preset": str(path)})
    return bench._replace(preset=trained)


def in_template(stage: Stage, tokenizer: "PreTrainedTokenizerBase") -> RewardSet:
    """The run's rewards in stage 01, which keeps for the others what the chat template opens."""
    opened = chat.opens_thinking(tokenizer)
    if opened != stage.config.rewards.opened:
        stage.change({"rewards.opened": opened})
    return load_rewards(stage.config.rewards)


def cell_of_rewards() -> str:
    """The cell of rewards as it was run last in this notebook; "" where there is none."""
    from IPython import get_ipython

    shell = get_ipython()
    history = shell.history_manager.input_hist_raw if shell and shell.history_manager else []
    return next((cell for cell in reversed(history) if CELL.search(cell)), "")


def _measured_ranges(
    bench: Bench, rows: Sequence[Row], baseline: Baseline
) -> dict[str, tuple[float, float]]:
    """{reward: (least, greatest)} of those that declare no range and do not keep to [0, 1].

    The first reward's greatest score says "correct", so it is always measured.
    """
    tried = [*baseline.repeated_rows, *rows[:64]]
    texts = [one.text for one in baseline.samples]
    texts += [bench.preset.reference(row) for row in rows[:64]]
    arguments, ranges = bench.arguments(tried, texts), {}
    for number, func in enumerate(bench.preset.reward_funcs):
        if hasattr(func, "range"):
            continue
        try:
            scores = [one.score for one in explain(func, arguments)]
        except Exception:  # a user's reward may raise anything: the verdict will say what
            continue
        known = [float(score) for score in scores if score is not None and math.isfinite(score)]
        low, high = min([0.0, *known]), max([0.0, *known])
        if low < 0 or high > 1 or (number == 0 and high > 0):
            ranges[func.__name__] = (low, high or 1.0)
    return ranges
