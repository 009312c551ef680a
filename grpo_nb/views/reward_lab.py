"""Look at what rewards pay for any completion, and at the verdict of `check_rewards`.

    from grpo_nb import RewardLab
    RewardLab([correct, well_formed], train_dataset)

The rewards are edited where they are written, in a cell: run that cell and the Lab's cell again.
lab.js draws the Lab; scores travel to it once, and it computes totals and advantages itself.
"""

import inspect
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from grpo_nb import environments, reward_lab
from grpo_nb.checks import Checks
from grpo_nb.reward_lab import RewardTest
from grpo_nb.reward_lab.check import RewardCheck, check_rewards
from grpo_nb.views import lab_data

HERE = Path(__file__).parent


class RewardLab(anywidget.AnyWidget):
    """Show what each reward pays for every completion, why, and the verdict.

    The arguments are those of `check_rewards`. For each row there is the right answer, another
    row's answer, what was sampled, and for some every attack. A completion can be edited and scored
    again.

    Args:
        completions: What the model sampled, completions[i][j]: one list of texts or chats for each
            row, in the order of the rows, as `sample` returns them.

    Attributes:
        verdict: What `check_rewards` returns.
    """

    __signature__ = inspect.signature(check_rewards)
    _esm = (HERE / "lab.js").read_text(encoding="utf-8")
    _css = (HERE / "lab.css").read_text(encoding="utf-8")
    data, report, state = (traitlets.Dict().tag(sync=True) for _ in range(3))
    added = traitlets.List().tag(sync=True)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.check = RewardCheck(*arguments, **options)
        self.verdict = self.check.run()
        self.data = lab_data.contents(self.check, _conditions(options.get("args")))
        self.report = lab_data.report(self.check, self.verdict)
        self.on_msg(self._score)

    def __repr__(self) -> str:
        return "RewardLab: run this notebook to use it"

    def _score(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """Score a completion that was edited in the browser, and add it to the table."""
        group = message["group"]
        row = self.data["groups"][group]["row"]
        edited = lab_data.Text(row, "edited", f"edited {len(self.added) + 1}", message["text"])
        self.added = self.added + lab_data.completions(self.check, [edited], {row: group})


def lab(test: RewardTest) -> RewardLab | Checks:
    """Return the Reward Lab of a run; if the task has an environment, read and check it instead."""
    if environment := environments.of(test.stage.config):
        return environments.check_environment(environment, test.rows)
    return RewardLab(**reward_lab.arguments(test))


def _conditions(args: Any) -> dict[str, str]:
    """Return how advantages are computed, from a GRPOConfig or a dict."""
    values = args if isinstance(args, dict) else vars(args or object)
    scaling = values.get("scale_rewards", "group")
    scaling = {True: "group", False: "none"}.get(scaling, scaling)  # older versions of TRL
    aggregation = values.get("multi_objective_aggregation", "sum_then_normalize")
    return {"scaling": scaling, "aggregation": aggregation}
