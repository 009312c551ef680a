"""Look at what rewards pay for any completion, and at the verdict of `check_rewards`.

    from grpo_nb import RewardLab
    RewardLab([correct, well_formed], train_dataset)

The rewards are edited where they are written, in a cell: run that cell and the Lab's cell again.
lab.js draws the Lab; scores travel to it once, and it computes totals and advantages itself.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets

from grpo_nb import environments, refusals, reward_lab
from grpo_nb.checks import Checks
from grpo_nb.reward_lab import RewardTest, own_attacks
from grpo_nb.reward_lab.attacks import Attack
from grpo_nb.reward_lab.check import RewardCheck, check_rewards
from grpo_nb.views import lab_data
from grpo_nb.views.widgets import in_order

HERE = Path(__file__).parent
CELL = "reward_weights = [{}]"  # how weights are written beside the rewards
SETTING = 'settings = {"rewards.reward_weights": "{}"}'


class RewardLab(anywidget.AnyWidget):
    """Show what each reward pays for every completion, why, and the verdict.

    The arguments are those of `check_rewards`. For each row there is the right answer, another
    row's answer, what was sampled, and for some every attack. A completion can be edited, scored
    again, and kept as an attack, which counts in every Lab of this session.

    Args:
        completions: What the model sampled, completions[i][j]: one list of texts or chats for each
            row, in the order of the rows, as `sample` returns them.
        run: The run of notebook 2, whose file keeps the attacks.
        weights_line: How weights are written where the rewards read them, with {} for the numbers.

    Attributes:
        verdict: What `check_rewards` returns.
        attacks: The attacks that the next verdict counts beside this package's.
    """

    __signature__ = inspect.signature(check_rewards)
    _esm = (HERE / "lab.js").read_text(encoding="utf-8")
    _css = (HERE / "lab.css").read_text(encoding="utf-8")
    data, report, state = (traitlets.Dict().tag(sync=True) for _ in range(3))
    added, own = (traitlets.List().tag(sync=True) for _ in range(2))
    session: ClassVar[list[Attack]] = []  # kept in this kernel

    def __init__(
        self,
        reward_funcs: Any,
        dataset: Any,
        completions: Sequence[Any] | None = None,
        *,
        run: Any = None,
        weights_line: str = CELL,
        **options: Any,
    ) -> None:
        super().__init__()
        refusals.in_one_line()
        self.reward_funcs, self.completions, self.options = reward_funcs, completions, options
        self.run, self.line, own = run, weights_line, list(options.get("attacks", ()))
        self.attacks = own + [each for each in self.session if each not in own and not run]
        self.judge(dataset, options.get("reward_weights"))
        self._find_own()
        self.on_msg(self._reply)
        in_order(self)

    def __repr__(self) -> str:
        return "RewardLab: run this notebook to use it"

    def judge(self, dataset: Any, weights: Sequence[float] | None) -> None:
        """Judge the rewards with these weights and all attacks."""
        options = self.options | {"reward_weights": weights, "attacks": self.attacks}
        self.check = RewardCheck(self.reward_funcs, dataset, self.completions, **options)
        self.verdict = self.check.run()
        self.data = self.data or lab_data.contents(self.check, _conditions(options.get("args")))
        self.report = lab_data.report(self.check, self.verdict, self.data) | {"line": self.line}

    def _find_own(self) -> None:
        """Tell the browser which attacks are a person's own, and which completions these are."""
        answers = self.check.written.answers if self.check.written else {}
        rows: dict[str, list[int]] = {each.name: [] for each in self.attacks}
        for place, line in enumerate(self._lines() if rows else ()):
            answer = answers.get(self.data["groups"][line["group"]]["row"], "")
            attack = own_attacks.attack_of(line["text"], answer, self.attacks)
            rows.get(attack.name if attack in self.attacks else line["name"], []).append(place)
        self.own = [lab_data.rules(each) | {"rows": rows[each.name]} for each in self.attacks]

    def _reply(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """Do what the browser asks, and reply with a sentence."""
        try:
            if message["do"] == "judge":
                self.judge(self.check.scorer.rows, message["weights"])
                note = ""
            elif message["do"] == "score":
                note = self.score(message["group"], message["text"])
            else:
                note = self.keep(message["group"], message["text"], message["name"])
            self.send({"note": note})
        except Exception as error:  # a user's reward may raise anything; the Lab says so
            self.send({"note": f"{type(error).__name__}: {error}", "failed": True})

    def score(self, group: int, text: str) -> str:
        """Score a completion of a group, and add it to the table."""
        row = self.data["groups"][group]["row"]
        name = f"edited {len(self.added) + 1}"
        edited = [lab_data.Text(row, "edited", name, text)]
        self.added = self.added + lab_data.completions(self.check, edited, {row: group})
        self._find_own()
        return "scored"

    def keep(self, group: int, text: str, name: str = "") -> str:
        """Keep a completion as an attack, or forget the one that it is; return what was done.

        Args:
            group: The place of its group.
            text: The completion.
            name: The name of an attack; one that was kept is forgotten.

        Raises:
            ValueError: The completion is the right answer, or no right answer is known here.
        """
        row, style = self.data["groups"][group]["row"], self.check.written
        if style is None or not style.answers:
            raise ValueError(
                "no right answer is known here, so that no attack can be judged: pass reference="
            )
        if row in style.answers and text == style.right(row):
            raise ValueError("this is the right answer itself: edit it first")
        attack = own_attacks.attack_of(text, style.answers.get(row, ""), self.attacks)
        rest = [each for each in self.attacks if each.name not in (name, attack.name)]
        is_new = len(rest) == len(self.attacks)
        self.attacks = [*rest, attack] if is_new else rest
        own = [each for each in self.attacks if each.name.startswith(own_attacks.NAME)]
        if self.run:
            own_attacks.store(self.run, own)
        else:
            type(self).session[:] = own
        if is_new and not any(line["text"] == text for line in self._lines()):
            self.score(group, text)
        self._find_own()
        place = f"in {own_attacks.FILE} of the run" if self.run else "for this session"
        return f"kept {place}; the next verdict counts it" if is_new else "forgotten"

    def _lines(self) -> list[dict[str, Any]]:
        return [*self.data["completions"], *self.added]


def lab(test: RewardTest) -> RewardLab | Checks:
    """Return the Reward Lab of a run; if the task has an environment, read and check it instead."""
    config = test.stage.config
    if environment := environments.of(config):
        return environments.check_environment(environment, test.rows)
    is_own = config.rewards.preset.endswith(".py")
    line = CELL if is_own else SETTING
    return RewardLab(**reward_lab.arguments(test), run=test.stage.run, weights_line=line)


def _conditions(args: Any) -> dict[str, str]:
    """Return how advantages are computed, from a GRPOConfig or a dict."""
    values = args if isinstance(args, dict) else vars(args or object)
    scaling = values.get("scale_rewards", "group")
    scaling = {True: "group", False: "none"}.get(scaling, scaling)  # older versions of TRL
    aggregation = values.get("multi_objective_aggregation", "sum_then_normalize")
    return {"scaling": scaling, "aggregation": aggregation}
