"""Take a run's own rewards from the cell `%%rewards` of a notebook; do stages 01 and 02 with them.

rewards/mine.py contains the cell's text unchanged, so that an error names the line that the user
sees. A second file contains notes: the preset whose form the rewards use, the score ranges measured
in stage 02, and the reward that decides what is correct.
"""

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_nb import data, environments, models, reward_lab
from grpo_nb.checks import Checks
from grpo_nb.files import atomic_path, write_json
from grpo_nb.models import template
from grpo_nb.reward_lab import Verdict
from grpo_nb.reward_lab.baseline import RewardTest
from grpo_nb.reward_lab.check import right_reward
from grpo_nb.reward_lab.table import explain
from grpo_nb.rewards import LLMJudge, RewardSet, load_rewards
from grpo_nb.rewards.load import about_path, explained, is_own_reward, load_python, read_about
from grpo_nb.stages.warm_start import warm_up, warm_up_base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs import Stage

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
    trains with exactly the same rewards. If the cell defines nothing, the test keeps the preset; of
    a file of rewards, the setting `rewards.about` then holds the notes.

    Args:
        test: The test. The setting `rewards.preset` of its stage is set to the path of mine.py.
        source: Python source to use instead of the cell's.

    Raises:
        ValueError: The cell does not run on its own, or its list of rewards or weights is wrong.
    """
    text = rewards_cell.adopted_text() if source is None else source
    stage, config, path = test.stage, test.stage.config.rewards, test.stage.run / OWN
    if all(line.lstrip()[:1] in ("", "#") for line in text.splitlines()):  # it defines nothing
        if config.preset.endswith(".py") and config.preset != str(path):
            rewards = load_rewards(config.model_copy(update={"about": {}}))
            stage.change({"rewards.about": _notes(test, rewards)})
        return test.using(load_rewards(stage.config.rewards))
    try:
        notes = _measured(test, text)
    except ValueError as error:
        cause = error.__cause__ or error  # the exception in the source, if ours wraps one
        raise ValueError(explained(cause, OWN, text)) from error
    write_json(about_path(path), notes)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    rewards = load_rewards(config.model_copy(update={"preset": str(path), "about": {}}))
    stage.change({"rewards.preset": str(path), "rewards.about": {}})
    return test.using(rewards)


def in_template(stage: "Stage", tokenizer: "PreTrainedTokenizerBase") -> RewardSet:
    """Resolve and store the settings on which the prompts depend; return the run's rewards.

    These settings are `data.system_prompt`, which an environment decides unless it is set, and
    `rewards.opened`, the tag that the chat template opens.

    Args:
        stage: Stage 01.
        tokenizer: The tokenizer of the base, with its chat template.
    """
    environment = environments.of(stage.config)
    if environment and stage.config.data.system_prompt == "preset":
        stage.change({"data.system_prompt": environment.system_prompt})
    opened = template.opens_thinking(tokenizer)
    if opened != stage.config.rewards.opened:
        stage.change({"rewards.opened": opened})
    return load_rewards(stage.config.rewards)


def _measured(test: RewardTest, source: str) -> dict[str, Any]:
    """Return notes on the source: the form's preset, ranges, and the reward for correctness."""
    stage, config = test.stage, test.stage.config.rewards
    path = stage.run / OWN
    form = config.preset if config.preset != str(path) else read_about(path)["form"]
    with redirect_stdout(io.StringIO()):
        rewards = load_python(path, source, {"form": form})
    return {"form": form, **_notes(test, rewards.in_form(config.form, config.opened))}


def _notes(test: RewardTest, rewards: RewardSet) -> dict[str, Any]:
    """Return the ranges of the rewards, and the reward for correctness."""
    correct, funcs = rewards.correct, rewards.reward_funcs
    with redirect_stdout(io.StringIO()):
        if not any(isinstance(func, LLMJudge) for func in funcs):  # each call costs money
            correct = right_reward(funcs, test.rows, rewards.reward_weights) or correct
        return {"ranges": _ranges(test.using(rewards), correct), "correct": correct}


def _ranges(test: RewardTest, correct: str) -> dict[str, list[float]]:
    """Return {reward: range} of rewards that declare none and score outside [0, 1].

    The reward for correctness gets a range even within [0, 1], because its highest score means
    "correct".
    """
    _, rows, baseline, bench = test
    texts = [sample.text for sample in baseline.samples]
    texts += [bench.preset.reference(row) for row in rows[:64]]
    arguments, ranges = bench.arguments([*baseline.repeated_rows, *rows[:64]], texts), {}
    for func in bench.preset.reward_funcs:
        if not hasattr(func, "range"):
            scores = _scores(func, arguments)
            low, high = min([0.0, *scores]), max([0.0, *scores])
            if low < 0 or high > 1 or (func.__name__ == correct and high > 0):
                ranges[func.__name__] = [low, high or 1.0]
    return ranges


def _scores(func: Callable[..., Any], arguments: dict[str, Any]) -> list[float]:
    """Return the finite scores of a reward; [] if it raises, which the verdict reports."""
    try:
        scores = [each.score for each in explain(func, arguments)]
    except Exception:  # a user's reward may raise anything
        return []
    return [float(score) for score in scores if score is not None and math.isfinite(score)]


def prepare_data(stage: "Stage") -> Checks:
    """Prepare the data, check them, and finish stage 01; return the checks."""
    model = stage.config.model
    tokenizer = models.load_tokenizer(model.model_name, stage.config.grpo.chat_template_kwargs)
    tools = environments.tools_of(stage.config, tokenizer)
    preset = in_template(stage, tokenizer)
    config = stage.config.data
    count = partial(template.count_tokens, tokenizer, tools=tools)
    report = data.prepare_run(stage.run, config, stage.config.seed, count, preset)
    rows = data.load(stage.run, "train", max_rows=1000)  # enough for these checks
    checks = data.checks(report, config)
    checks.append(template.check_template(tokenizer, rows[0]["prompt"]))
    checks += environments.check_rows(environments.of(stage.config), rows)
    stage.record_checks(checks)
    stage.finish("data")
    return checks


def test_rewards(stage: "Stage", policy: models.Policy | None = None) -> tuple[RewardTest, Verdict]:
    """Test the rewards of the cell `%%rewards`, or else those of the run, and finish stage 02.

    Args:
        stage: Stage 02.
        policy: A loaded policy, which is warmed up and samples the baseline; None loads the base.
    """
    preset = load_rewards(stage.config.rewards)
    print(warm_up(policy, stage) if policy else warm_up_base(stage))
    test = reward_lab.open_test(stage, preset, policy and policy.engine, stage.progress)
    test = adopt(test)
    verdict = reward_lab.judge(test)
    reward_lab.save(test, verdict)
    stage.finish("rewards")
    return test, verdict
