"""Look at what rewards pay for any completion, and at the verdict of `check_rewards`.

    from grpo_nb import RewardLab
    RewardLab([correct, well_formed], train_dataset)

The rewards are edited where they are written, in a cell: run that cell and the Lab's cell again.
lab.js draws the Lab; scores travel to it once, and it computes totals and advantages itself.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from grpo_nb import environments, refusals, reward_lab
from grpo_nb.checks import Checks
from grpo_nb.reward_lab import RewardTest
from grpo_nb.reward_lab.check import RewardCheck, check_rewards
from grpo_nb.views import lab_data
from grpo_nb.views.widgets import in_order

HERE = Path(__file__).parent
CELL = "reward_weights = [{}]"  # how weights are written beside the rewards
SETTING = 'settings = {"rewards.reward_weights": "{}"}'


class RewardLab(anywidget.AnyWidget):
    """Show what each reward pays for every completion, why, and the verdict.

    The arguments are those of `check_rewards`. For each row there is the right answer, another
    row's answer, what was sampled, and for some every attack. A completion can be edited and scored
    again.

    Args:
        completions: What the model sampled, completions[i][j]: one list of texts or chats for each
            row, in the order of the rows, as `sample` returns them.
        weights_line: How weights are written where the rewards read them, with {} for the numbers.

    Attributes:
        verdict: What `check_rewards` returns.
    """

    __signature__ = inspect.signature(check_rewards)
    _esm = (HERE / "lab.js").read_text(encoding="utf-8")
    _css = (HERE / "lab.css").read_text(encoding="utf-8")
    data, report, state = (traitlets.Dict().tag(sync=True) for _ in range(3))
    added = traitlets.List().tag(sync=True)

    def __init__(
        self,
        reward_funcs: Any,
        dataset: Any,
        completions: Sequence[Any] | None = None,
        *,
        weights_line: str = CELL,
        **options: Any,
    ) -> None:
        super().__init__()
        refusals.in_one_line()
        self.reward_funcs, self.completions, self.options = reward_funcs, completions, options
        self.line = weights_line
        self.judge(dataset, options.get("reward_weights"))
        self.on_msg(self._reply)
        in_order(self)

    def __repr__(self) -> str:
        return "RewardLab: run this notebook to use it"

    def judge(self, dataset: Any, weights: Sequence[float] | None) -> None:
        """Judge the rewards with these weights."""
        options = self.options | {"reward_weights": weights}
        self.check = RewardCheck(self.reward_funcs, dataset, self.completions, **options)
        self.verdict = self.check.run()
        self.data = self.data or lab_data.contents(self.check, _conditions(options.get("args")))
        self.report = lab_data.report(self.check, self.verdict, self.data) | {"line": self.line}

    def _reply(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """Do what the browser asks, and reply when it is done, or why it failed."""
        try:
            if message["do"] == "judge":
                self.judge(self.check.scorer.rows, message["weights"])
            else:
                self.score(message["group"], message["text"])
            self.send({"note": ""})
        except Exception as error:  # a user's reward may raise anything; the Lab says so
            self.send({"note": f"{type(error).__name__}: {error}", "failed": True})

    def score(self, group: int, text: str) -> None:
        """Score a completion of a group, and add it to the table."""
        row = self.data["groups"][group]["row"]
        edited = [lab_data.Text(row, "edited", f"edited {len(self.added) + 1}", text)]
        self.added = self.added + lab_data.completions(self.check, edited, {row: group})


def lab(test: RewardTest) -> RewardLab | Checks:
    """Return the Reward Lab of a run; if the task has an environment, read and check it instead."""
    config = test.stage.config
    if environment := environments.of(config):
        return environments.check_environment(environment, test.rows)
    is_own = config.rewards.preset.endswith(".py")
    line = CELL if is_own else SETTING
    return RewardLab(**reward_lab.arguments(test), weights_line=line)


def _conditions(args: Any) -> dict[str, str]:
    """Return how advantages are computed, from a GRPOConfig or a dict."""
    values = args if isinstance(args, dict) else vars(args or object)
    scaling = values.get("scale_rewards", "group")
    scaling = {True: "group", False: "none"}.get(scaling, scaling)  # older versions of TRL
    aggregation = values.get("multi_objective_aggregation", "sum_then_normalize")
    return {"scaling": scaling, "aggregation": aggregation}
