"""A run's rewards: in its template, and as they are written: a file, which is trained with."""

import ast
import io
import math
import re
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from grpo_nb import environments
from grpo_nb.models import chat
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.reward_lab.gate import Verdict, judge, save
from grpo_nb.reward_lab.table import Bench, Row, explain
from grpo_nb.rewards import RewardSet, load_preset, load_rewards
from grpo_nb.rewards.presets import HINT, load_python
from grpo_nb.runs import Stage, atomic_path, start_stage
from grpo_nb.runs.config import flatten, of_stage

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
HEAD_LINES = HEAD.count("\n")
DEFINED = re.compile(r"\s*(?:async )?(?:def|class) (\w+)")


def adopt(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str | None = None
) -> Bench:
    """The bench with the rewards of the notebook's own cell, as notebook 3 will train with them.

    The cell is written to rewards/mine.py of the run and loaded from there: what is tested is
    what is trained. A cell that defines nothing leaves the preset, or what the Reward Lab adopted
    since the stage has started.

    Args:
        bench: With the preset; its form (reference and answer) is kept.
        rows: Dataset rows, whose references say what a right answer earns.
        baseline: Baseline rollouts.
        stage: Stage 02, whose `rewards.preset` becomes the file.
        source: Python text instead of the cell's.

    Raises:
        ValueError: The cell does not run by itself, or its list of rewards or weights is wrong.
    """
    text, config = cell_of_rewards() if source is None else source, stage.config.rewards
    if _defines_nothing(text):
        path = str(stage.run / OWN)
        if config.preset != path and stage.run.settings().get("rewards.preset") == path:
            print(
                f"The preset {config.preset!r} is trained, for the cell defines no reward. What "
                f'was adopted before is kept: settings = {{"rewards.preset": "{path}"}} trains it'
            )
            _keep(stage, "", config.reward_weights)
        return bench._replace(preset=load_rewards(config))
    try:
        written, _ = _written(bench, rows, baseline, stage, text)
    except ValueError as error:
        raise ValueError(fault(error, text)) from error
    return bench._replace(preset=_keep(stage, written, config.reward_weights))


def try_out(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str
) -> Bench:
    """The bench with the rewards of a text, as `hand_on` would load them; nothing is written.

    Arguments and errors as of `adopt`; a text that defines nothing gives the preset.
    """
    return bench._replace(preset=_written(bench, rows, baseline, stage, source)[1])


def hand_on(
    bench: Bench,
    rows: Sequence[Row],
    baseline: Baseline,
    stage: Stage,
    source: str,
    weights: Sequence[float] = (),
) -> Verdict:
    """Adopt a text, judge it, and finish stage 02 with it: what notebook 2 does cell by cell.

    Args:
        bench: What the rewards meet in training; its preset does not count.
        rows: Dataset rows.
        baseline: Baseline rollouts.
        stage: Stage 02, started or not; its configuration follows.
        source: Python text; one that defines nothing hands on the preset.
        weights: Of each reward, where they are not those of the text or the preset.

    Raises:
        ValueError: The text cannot be used, or stage 01 is not done.
        RuntimeError: Another process works on the run.
    """
    text, own = _written(bench, rows, baseline, stage, source)
    moved = bool(weights) and list(weights) != own.reward_weights
    other = ", ".join(f"{weight:g}" for weight in weights) if moved else ""
    ours = start_stage("02", stage.run.name, of_stage("02", flatten(stage.config)))
    bench = bench._replace(preset=_keep(ours, text, other))
    stage.config = ours.config
    verdict = judge(bench, rows, baseline, ours)
    save(ours.run, bench, verdict)
    ours.finish("rewards")
    return verdict


def source_of(stage: Stage) -> str:
    """The text of rewards/mine.py as it was written; "" where the stage has other rewards."""
    path = stage.run / OWN
    if stage.config.rewards.preset != str(path):
        return ""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[HEAD_LINES:]).partition(RANGES.partition("{")[0])[0]


def fault(error: Exception, source: str) -> str:
    """What is wrong with a text of rewards, in a sentence that names the line.

    The line is where the text raised, or where the reward begins that the error is about.
    """
    cause = error.__cause__ or error  # what the text raised, where we said that it did
    frames = traceback.extract_tb(cause.__traceback__)
    places = [frame.lineno - HEAD_LINES for frame in frames if frame.filename.endswith(OWN)]
    said = str(cause)
    if isinstance(cause, SyntaxError) and str(cause.filename).endswith(OWN):
        said, places = cause.msg, [cause.lineno - HEAD_LINES]
    said = re.sub(rf"\S*{OWN}\b(: )?", lambda path: "" if path[1] else "the text", said)
    if places or not isinstance(cause, ValueError | RuntimeError):
        said = f"{type(cause).__name__}: {said}"
    said = ", ".join([said, *getattr(cause, "__notes__", [])])
    if isinstance(cause, NameError):
        said += HINT
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        named = DEFINED.match(line)
        if not places and named and re.search(rf"\b{named[1]}\b", said):
            places = [number]
    if not places or not 0 < places[-1] <= len(lines):
        return said
    return f"line {places[-1]} ({lines[places[-1] - 1].strip()}): {said}"


def in_template(stage: Stage, tokenizer: "PreTrainedTokenizerBase") -> RewardSet:
    """The run's rewards in stage 01, which keeps for the others what the prompts depend on.

    That is what the chat template opens, and what the environment says of itself.
    """
    environment = environments.of(stage.config)
    if environment and stage.config.data.system_prompt == "preset":
        stage.change({"data.system_prompt": environment.system_prompt})
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


def _defines_nothing(source: str) -> bool:
    return all(line.lstrip()[:1] in ("", "#") for line in source.splitlines())


def _preset(stage: Stage) -> str:
    """The preset whose form the run's own rewards have."""
    preset, path = stage.config.rewards.preset, stage.run / OWN
    if preset != str(path):
        return preset
    return ast.literal_eval(re.search("^form = (.*)$", path.read_text("utf-8"), re.MULTILINE)[1])


def _written(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str
) -> tuple[str, RewardSet]:
    """What rewards/mine.py is to hold, and its rewards; "" and the preset for no reward."""
    form, path, config = _preset(stage), stage.run / OWN, stage.config.rewards
    written_in = (config.form, config.opened)
    if _defines_nothing(source):
        return "", load_preset(form, "", *written_in)
    text = HEAD.format(form=form) + source.rstrip("\n") + "\n"
    with redirect_stdout(io.StringIO()):
        chosen = load_python(path, text).in_form(*written_in)
        ranges = _measured_ranges(bench._replace(preset=chosen), rows, baseline)
        if ranges:
            text += RANGES.format(ranges)
            chosen = load_python(path, text).in_form(*written_in)
    return text, chosen


def _keep(stage: Stage, text: str, weights: str) -> RewardSet:
    """Write rewards/mine.py, where there is a text, and train with it, or with the preset."""
    path, preset = stage.run / OWN, _preset(stage)
    if text:
        preset = str(path)
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    asked = {"preset": preset, "reward_weights": weights}
    trained = load_rewards(stage.config.rewards.model_copy(update=asked))
    stage.change({f"rewards.{name}": value for name, value in asked.items()})
    return trained


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
