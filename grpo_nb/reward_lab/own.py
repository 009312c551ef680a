"""A run's own rewards: text from a notebook cell or the Reward Lab, written to rewards/mine.py."""

import ast
import math
import re
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_nb import environments
from grpo_nb.models import template
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.reward_lab.gate import REPORT, SCORES, Verdict, judge, save
from grpo_nb.reward_lab.table import Bench, Row, explain
from grpo_nb.rewards import RewardSet, call, load_preset, load_rewards
from grpo_nb.rewards.file import HINT
from grpo_nb.rewards.limits import TookTooLong
from grpo_nb.rewards.load import load_python
from grpo_nb.rewards.surroundings import Muted
from grpo_nb.runs import Stage, atomic_path, start_stage
from grpo_nb.runs.config import SET, of_stage, set_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A cell of rewards: the shipped one, or one with a function of `completions`, a `@reward`
# function, or a list `reward_funcs`.
CELL = re.compile(
    r"\A\s*# (?:# )?Your rewards|^\s*(?:async )?def \w+\([^)]*\bcompletions\b"
    r"|^\s*@(?:\w+\.)?reward\b|^reward_funcs\b[^=\n]*=(?!=)",
    re.MULTILINE,
)
OWN = "rewards/mine.py"
ADOPTED = (OWN, REPORT, SCORES, "config.yaml", "manifest.json")
HEAD = '"""The rewards of notebook 2."""\n\nfrom grpo_nb import rewards\n\nform = {form!r}\n\n\n'
RANGES = "\n\n# Least and greatest scores seen, where none are declared.\nmeasured_ranges = {!r}\n"
HEAD_LINES = HEAD.count("\n")
DEFINED = re.compile(r"\s*(?:async )?(?:def|class) (\w+)")


def adopt(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str | None = None
) -> Bench:
    """Return the bench with the rewards of the notebook's own cell.

    The cell is written to the run's rewards/mine.py and loaded from there, so that notebook 3
    trains with exactly what was tested. A cell that defines nothing keeps the preset, or what the
    Reward Lab has adopted since the stage started. What was adopted before needs to be chosen.

    Args:
        bench: The bench with the preset, whose form (reference and answer) is kept.
        rows: Dataset rows, whose references show what a right answer earns.
        baseline: Baseline rollouts.
        stage: Stage 02; its `rewards.preset` becomes the file.
        source: Python text to use in place of the cell's.

    Raises:
        ValueError: The cell does not run on its own, its list of rewards or weights is wrong, or it
            is empty and rewards were adopted earlier.
    """
    text, config = cell_of_rewards() if source is None else source, stage.config.rewards
    if _defines_nothing(text):
        path = str(stage.run / OWN)
        by_hand = not stage.run.in_use(".pipeline.lock")
        if by_hand and Path(path).exists() and stage.config.sources["rewards.preset"] != SET:
            raise ValueError(
                "the cell of rewards is empty, and this run has rewards that were adopted: "
                f'choose with settings = {{"rewards.preset": "{path}"}}, which keeps them, or '
                f'{{"rewards.preset": "{config.preset}"}}, the preset'
            )
        return bench._replace(preset=load_rewards(config))
    try:
        module, _ = _compose(bench, rows, baseline, stage, text)
    except ValueError as error:
        raise ValueError(fault(error, text)) from error
    return bench._replace(preset=_keep(stage, module, config.reward_weights))


def try_out(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str
) -> Bench:
    """Return the bench with the rewards of a text, as `hand_on` would load it, writing nothing.

    Arguments and errors are those of `adopt`; a text that defines nothing gives the preset.
    """
    return bench._replace(preset=_compose(bench, rows, baseline, stage, source)[1])


def hand_on(
    bench: Bench,
    rows: Sequence[Row],
    baseline: Baseline,
    stage: Stage,
    source: str,
    weights: Sequence[float] = (),
) -> Verdict:
    """Adopt a text, judge it, and finish stage 02 with it, as notebook 2 does cell by cell.

    Args:
        bench: The training conditions of the rewards; its preset is ignored.
        rows: Dataset rows.
        baseline: Baseline rollouts.
        stage: Stage 02, started or not; its configuration is updated.
        source: Python text; if it defines nothing, the preset is handed on.
        weights: One weight per reward, to replace those of the text or the preset.

    Raises:
        ValueError: The text cannot be used, or stage 01 is not done.
        RuntimeError: Another process is using the run.
    """
    text, own = _compose(bench, rows, baseline, stage, source)
    changed = bool(weights) and list(weights) != own.reward_weights
    other_weights = ", ".join(f"{weight:g}" for weight in weights) if changed else ""
    with stage.run.whole_or_undone(*ADOPTED):
        started = start_stage("02", stage.run.path, of_stage("02", set_values(stage.config)))
        bench = bench._replace(preset=_keep(started, text, other_weights))
        verdict = judge(bench, rows, baseline, started)
        save(started.run, bench, verdict)
        started.finish("rewards")
    stage.config = started.config
    return verdict


def source_of(stage: Stage) -> str:
    """Return the user's text in rewards/mine.py; "" if the stage has other rewards."""
    path = stage.run / OWN
    if stage.config.rewards.preset != str(path):
        return ""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[HEAD_LINES:]).partition(RANGES.partition("{")[0])[0]


def fault(error: Exception, source: str) -> str:
    """Explain what is wrong with a text of rewards in a sentence that names the line.

    It is the line that raised, or the first line of the reward that the error names.
    """
    cause = error.__cause__ or error  # the text's own exception, if ours wraps one
    frames = traceback.extract_tb(cause.__traceback__)
    places = [frame.lineno - HEAD_LINES for frame in frames if frame.filename.endswith(OWN)]
    message = str(cause)
    if isinstance(cause, SyntaxError) and str(cause.filename).endswith(OWN):
        message, places = cause.msg, [cause.lineno - HEAD_LINES]
    message = re.sub(rf"\S*{OWN}\b(: )?", lambda path: "" if path[1] else "the text", message)
    if places or not isinstance(cause, ValueError | RuntimeError):
        message = f"{type(cause).__name__}: {message}"
    message = ", ".join([message, *getattr(cause, "__notes__", [])])
    if isinstance(cause, NameError):
        message += HINT
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        definition = DEFINED.match(line)
        if not places and definition and re.search(rf"\b{definition[1]}\b", message):
            places = [number]
    if not places or not 0 < places[-1] <= len(lines):
        return message
    return f"line {places[-1]} ({lines[places[-1] - 1].strip()}): {message}"


def in_template(stage: Stage, tokenizer: "PreTrainedTokenizerBase") -> RewardSet:
    """Return the run's rewards in stage 01, and store the settings that the prompts depend on.

    These are the tag that the chat template opens, and the environment's system prompt.
    """
    environment = environments.of(stage.config)
    if environment and stage.config.data.system_prompt == "preset":
        stage.change({"data.system_prompt": environment.system_prompt})
    opened = template.opens_thinking(tokenizer)
    if opened != stage.config.rewards.opened:
        stage.change({"rewards.opened": opened})
    return load_rewards(stage.config.rewards)


def cell_of_rewards() -> str:
    """Return the most recently executed cell of rewards in this notebook; "" if there is none."""
    from IPython import get_ipython

    shell = get_ipython()
    history = shell.history_manager.input_hist_raw if shell and shell.history_manager else []
    return next((cell for cell in reversed(history) if CELL.search(cell)), "")


def _defines_nothing(source: str) -> bool:
    return all(line.lstrip()[:1] in ("", "#") for line in source.splitlines())


def _preset(stage: Stage) -> str:
    """Return the preset whose form the run's own rewards use."""
    preset, path = stage.config.rewards.preset, stage.run / OWN
    if preset != str(path):
        return preset
    return ast.literal_eval(re.search("^form = (.*)$", path.read_text("utf-8"), re.MULTILINE)[1])


def _compose(
    bench: Bench, rows: Sequence[Row], baseline: Baseline, stage: Stage, source: str
) -> tuple[str, RewardSet]:
    """Return the content of rewards/mine.py and its rewards; "" and the preset for no reward."""
    preset, path, config = _preset(stage), stage.run / OWN, stage.config.rewards
    form = (config.form, config.opened)
    if _defines_nothing(source):
        return "", load_preset(preset, "", *form)
    text = HEAD.format(form=preset) + source.rstrip("\n") + "\n"
    with redirect_stdout(Muted()):
        rewards = load_python(path, text).in_form(*form).limited(config.seconds)
        _call_once(bench._replace(preset=rewards), rows)
        ranges = _measured_ranges(bench._replace(preset=rewards), rows, baseline)
        if ranges:
            text += RANGES.format(ranges)
            rewards = load_python(path, text).in_form(*form).limited(config.seconds)
    return text, rewards


def _call_once(bench: Bench, rows: Sequence[Row]) -> None:
    """Raise TookTooLong if a reward does not end on one completion: on many it may take longer."""
    arguments = bench.arguments(rows[:1], [bench.preset.reference(rows[0])])
    for func in bench.preset.reward_funcs:
        try:
            call(func, **arguments)
        except TookTooLong:
            raise
        except Exception:  # the linter reports it
            continue


def _keep(stage: Stage, text: str, weights: str) -> RewardSet:
    """Write rewards/mine.py if there is a text, and select it, or the preset, for the training."""
    path, preset = stage.run / OWN, _preset(stage)
    if text:
        preset = str(path)
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    update = {"preset": preset, "reward_weights": weights}
    rewards = load_rewards(stage.config.rewards.model_copy(update=update))
    stage.change({f"rewards.{name}": value for name, value in update.items()})
    return rewards


def _measured_ranges(
    bench: Bench, rows: Sequence[Row], baseline: Baseline
) -> dict[str, tuple[float, float]]:
    """Return {reward: (lowest, highest)} of rewards that leave [0, 1] without declaring a range.

    The first reward is measured in any case, because its highest score means "correct".
    """
    sample_rows = [*baseline.repeated_rows, *rows[:64]]
    texts = [sample.text for sample in baseline.samples]
    texts += [bench.preset.reference(row) for row in rows[:64]]
    arguments, ranges = bench.arguments(sample_rows, texts), {}
    for number, func in enumerate(bench.preset.reward_funcs):
        if hasattr(func, "range"):
            continue
        try:
            scores = [each.score for each in explain(func, arguments)]
        except TookTooLong:
            raise
        except Exception:  # a user's reward may raise anything; the linter reports it
            continue
        finite = [float(score) for score in scores if score is not None and math.isfinite(score)]
        low, high = min([0.0, *finite]), max([0.0, *finite])
        if low < 0 or high > 1 or (number == 0 and high > 0):
            ranges[func.__name__] = (low, high or 1.0)
    return ranges
