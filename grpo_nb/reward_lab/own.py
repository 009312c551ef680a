"""Store and load a run's own rewards, from the `%%rewards` cell or from the Reward Lab.

rewards/mine.py contains the source unchanged, so that an error names the line that the user sees. A
second file contains notes: the preset whose form the rewards use, the score ranges measured in
stage 02, and digests of what the cell wrote. Neither the cell nor the lab overwrites a text that it
did not write or show.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import environments
from grpo_nb.files import atomic_path, write_json
from grpo_nb.models import template
from grpo_nb.reward_lab.baseline import RewardTest
from grpo_nb.reward_lab.certificate import judges
from grpo_nb.reward_lab.check import right_reward
from grpo_nb.reward_lab.gate import Verdict, judge, save
from grpo_nb.reward_lab.table import explain
from grpo_nb.rewards import RewardSet, load_preset, load_rewards
from grpo_nb.rewards.limits import TookTooLong
from grpo_nb.rewards.load import about_path, explained, is_own_reward, load_python, read_about
from grpo_nb.rewards.surroundings import Muted
from grpo_nb.runs import Stage, start_stage
from grpo_nb.runs.config import SET, of_stage, set_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN = "rewards/mine.py"


class RewardsCell:
    """Define the cell magic `%%rewards`, which runs a cell and keeps its text for `adopt`."""

    def __init__(self) -> None:
        self.text, self.values = "", []

    def register(self) -> None:
        """Register `%%rewards` in this notebook; outside a notebook, do nothing."""
        if shell := _shell():
            shell.register_magic_function(self.run, "cell", "rewards")

    def run(self, _: str, text: str) -> None:
        """Run the cell in the notebook's namespace, so that later cells can call its functions."""
        shell = _shell()
        self.text = f"# %%rewards\n{text}"  # the added line keeps the cell's line numbers
        before = dict(shell.user_ns)
        file = shell.compile.cache(self.text, shell.execution_count)  # for tracebacks
        try:
            exec(compile(self.text, file, "exec"), shell.user_ns)
        finally:
            after = shell.user_ns.items()
            self.values += [value for name, value in after if before.get(name) is not value]

    def adopted_text(self) -> str:
        """Return the text of the last `%%rewards` cell that was run; "" if there is none.

        Raises:
            ValueError: Another cell defines rewards, which would not be used in training.
        """
        shell = _shell()
        outside = [
            name
            for name, value in (shell.user_ns.items() if shell else ())
            if (name == "reward_funcs" or is_own_reward(value, "__main__"))
            and not (name.startswith("_") or any(value is each for each in self.values))
        ]
        if outside:
            raise ValueError(
                f"{', '.join(outside)}: defined in a cell that does not begin with %%rewards. "
                "Write that line above the rewards to train with, and run the cell again; "
                f"otherwise: del {', '.join(outside)}"
            )
        return self.text


rewards_cell = RewardsCell()


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()


def adopt(test: RewardTest, source: str | None = None) -> RewardTest:
    """Return the test with the rewards of the notebook's `%%rewards` cell.

    The cell is written to the run's rewards/mine.py and loaded from there, so that notebook 3
    trains with exactly the same rewards. If the cell defines nothing, the test keeps the preset, or
    the rewards that the Reward Lab has adopted since the stage started. Rewards that were adopted
    earlier are used only if `rewards.preset` names their file.

    Args:
        test: The test. The setting `rewards.preset` of its stage is set to the path of that file.
        source: Python source to use instead of the cell's.

    Raises:
        ValueError: The cell does not run on its own, its list of rewards or weights is wrong, the
            cell is empty and rewards were adopted earlier, or the file holds rewards that the cell
            did not write.
    """
    text = rewards_cell.adopted_text() if source is None else source
    stage, config = test.stage, test.stage.config.rewards
    if _defines_nothing(text):
        path = str(stage.run / OWN)
        by_hand = not stage.run.in_use(".pipeline.lock")
        if by_hand and Path(path).exists() and stage.config.sources["rewards.preset"] != SET:
            raise ValueError(
                "the %%rewards cell is empty, but this run has adopted rewards: set "
                f'{{"rewards.preset": "{path}"}} in `settings` to keep them, or '
                f'{{"rewards.preset": "{config.preset}"}} to use the preset'
            )
        return test.using(load_rewards(config))
    path, digest = stage.run / OWN, _digest(text)
    style = read_about(path).get("cell", [])
    keep = f'comment the cell out and set {{"rewards.preset": "{path}"}} in `settings`'
    _refuse_to_overwrite(path, [*style, digest], "the %%rewards cell", keep)
    try:
        about, _ = _compose(test, text)
    except ValueError as error:
        raise ValueError(fault(error, text)) from error
    if digest not in style[:1]:  # the earlier text stays until the new one is in place
        style = [digest, *style[:1]]
    return test.using(_keep(stage, text, about | {"cell": style}, config.reward_weights))


def try_out(test: RewardTest, source: str) -> RewardTest:
    """Return the test with the rewards in a source, loaded as in `hand_on`; write nothing.

    If the source defines nothing, the preset is used.

    Raises:
        ValueError: The source cannot be used.
        TookTooLong: A reward takes too long on a single completion.
    """
    return test.using(_compose(test, source)[1])


def hand_on(
    test: RewardTest, source: str, weights: Sequence[float] = (), over: str | None = None
) -> Verdict:
    """Judge and adopt the rewards in a source, and finish stage 02, as notebook 2's cells do.

    Args:
        test: The test, whose rewards are ignored. Its stage need not have started. The stage's
            configuration is updated.
        source: Python source that defines rewards; if it defines none, stage 03 uses the preset.
        weights: One weight per reward, to replace those of the source or the preset.
        over: The text of rewards/mine.py that the source may overwrite; None for any text.

    Raises:
        ValueError: The source cannot be used, rewards/mine.py holds another text than `over`, or
            stage 01 is not done.
        RuntimeError: Another process is using the run.
    """
    stage = test.stage
    if over is not None and not _defines_nothing(source):
        keep = "open the lab again"
        references = [_digest(over), _digest(source)]
        _refuse_to_overwrite(stage.run / OWN, references, "the box of this Reward Lab", keep)
    about, rewards = _compose(test, source)
    if about:
        about["cell"] = read_about(stage.run / OWN).get("cell", [])
    differ = bool(weights) and list(weights) != rewards.reward_weights
    other_weights = ", ".join(f"{weight:g}" for weight in weights) if differ else ""
    rewards = rewards._replace(reward_weights=list(weights) or rewards.reward_weights)
    verdict = judge(test.using(rewards))  # if it is interrupted, nothing has been written yet
    new_stage = start_stage("02", stage.run.path, of_stage("02", set_values(stage.config)))
    preset = _keep(new_stage, source, about, other_weights)
    save(test._replace(stage=new_stage).using(preset), verdict)
    new_stage.finish("rewards")
    stage.config = new_stage.config
    return verdict


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_to_overwrite(path: Path, known: Sequence[str], place: str, keep: str) -> None:
    """Refuse to replace a file of rewards, unless its digest is known to who would replace it.

    Raises:
        ValueError: Rewards would be lost; the message says how to keep which of the two.
    """
    if path.is_file() and _digest(path.read_text(encoding="utf-8")) not in known:
        raise ValueError(
            f"there are two texts of rewards: {path.name} in {path.parent}, and {place}, which "
            "neither wrote nor showed what is in the file. It may hold newer rewards, from the "
            f"Reward Lab, another notebook or an editor. To train with the file's, {keep}; to "
            f"train with those of {place}, rename the file first"
        )


def source_of(stage: Stage) -> str:
    """Return the user's source in rewards/mine.py; "" if the stage uses other rewards."""
    path = stage.run / OWN
    if stage.config.rewards.preset != str(path):
        return ""
    return path.read_text(encoding="utf-8")


def fault(error: Exception, source: str) -> str:
    """Return a message that explains an error in the rewards' source and names the line.

    If this package raises the error, as for a score out of range, the message names the reward.
    """
    cause = error.__cause__ or error  # the exception in the source, if ours wraps one
    message = explained(cause, OWN, source)
    return re.sub(rf"\S*{OWN}\b(: )?", lambda path: "" if path[1] else "the text", message)


def in_template(stage: Stage, tokenizer: "PreTrainedTokenizerBase") -> RewardSet:
    """Return the run's rewards for stage 01, and store the settings on which the prompts depend.

    These settings are the tag that the chat template opens, and the environment's system prompt.
    """
    environment = environments.of(stage.config)
    if environment and stage.config.data.system_prompt == "preset":
        stage.change({"data.system_prompt": environment.system_prompt})
    opened = template.opens_thinking(tokenizer)
    if opened != stage.config.rewards.opened:
        stage.change({"rewards.opened": opened})
    return load_rewards(stage.config.rewards)


def _defines_nothing(source: str) -> bool:
    return all(line.lstrip()[:1] in ("", "#") for line in source.splitlines())


def _preset(stage: Stage) -> str:
    """Return the preset whose form the run's own rewards use."""
    preset, path = stage.config.rewards.preset, stage.run / OWN
    return preset if preset != str(path) else read_about(path)["form"]


def _compose(test: RewardTest, source: str) -> tuple[dict[str, Any], RewardSet]:
    """Return a source's (notes, rewards); if it defines nothing, ({}, the preset's rewards)."""
    stage = test.stage
    preset, config = _preset(stage), stage.config.rewards
    if _defines_nothing(source):
        return {}, load_preset(preset, "", config.form, config.opened)
    with redirect_stdout(Muted()):
        rewards = load_python(stage.run / OWN, source, {"form": preset})
        rewards = rewards.in_form(config.form, config.opened).limited(config.seconds)
        ranges = _declare_ranges(test.using(rewards))
        if not judges(rewards):  # each call of a judge costs money
            correct = right_reward(rewards.reward_funcs, test.rows, rewards.reward_weights)
            rewards = rewards._replace(correct=correct or rewards.correct)
    return {"form": preset, "ranges": ranges, "correct": rewards.correct}, rewards


def _keep(stage: Stage, text: str, about: dict[str, Any], weights: str) -> RewardSet:
    """Write and select rewards/mine.py, or select the preset if there are no notes (`about`)."""
    path, preset = stage.run / OWN, _preset(stage)
    if about:
        preset = str(path)
        write_json(about_path(path), about)
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    update = {"preset": preset, "reward_weights": weights}
    rewards = load_rewards(stage.config.rewards.model_copy(update=update))
    stage.change({f"rewards.{name}": value for name, value in update.items()})
    return rewards


def _declare_ranges(test: RewardTest) -> dict[str, tuple[float, float]]:
    """Set a range for rewards that declare none and score outside [0, 1]; return {reward: range}.

    The first reward gets a range even within [0, 1], because its highest score means "correct".

    Raises:
        TookTooLong: A reward takes too long on a single completion.
    """
    _, rows, baseline, bench = test
    texts = [sample.text for sample in baseline.samples]
    texts += [bench.preset.reference(row) for row in rows[:64]]
    one = bench.arguments(rows[:1], [bench.preset.reference(rows[0])])
    arguments = bench.arguments([*baseline.repeated_rows, *rows[:64]], texts)
    for func in bench.preset.reward_funcs:
        _scores(func, one)
    ranges = {}
    for number, func in enumerate(bench.preset.reward_funcs):
        if not hasattr(func, "range"):
            scores = _scores(func, arguments)
            low, high = min([0.0, *scores]), max([0.0, *scores])
            if low < 0 or high > 1 or (number == 0 and high > 0):
                func.range = ranges[func.__name__] = (low, high or 1.0)
    return ranges


def _scores(func: Callable[..., Any], arguments: dict[str, Any]) -> list[float]:
    """Return the finite scores of a reward; [] if it raises, which the linter reports."""
    try:
        scores = [each.score for each in explain(func, arguments)]
    except TookTooLong:
        raise
    except Exception:  # a user's reward may raise anything
        return []
    return [float(score) for score in scores if score is not None and math.isfinite(score)]
