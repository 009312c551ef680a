"""Look at what rewards pay for any completion, and at the verdict of `check_rewards`.

    from grpo_nb import RewardLab
    RewardLab([correct, well_formed], train_dataset)

The rewards are edited where they are written, in a cell: run that cell and the Lab's cell again.
"""

import html
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb import environments, reward_lab
from grpo_nb.checks import Checks
from grpo_nb.reward_lab import RewardTest
from grpo_nb.reward_lab.check import RewardCheck, check_rewards
from grpo_nb.rewards.judge import question
from grpo_nb.views import tables
from grpo_nb.views.widgets import WIDE, View


class RewardLab(View):
    """Show what each reward pays for a completion, which can be edited, and the verdict.

    The arguments are those of `check_rewards`. For each row there is the right answer, another
    row's answer, every attack, and what was sampled.

    Attributes:
        verdict: What `check_rewards` returns.
    """

    __signature__ = inspect.signature(check_rewards)

    def __init__(
        self,
        reward_funcs: Any,
        dataset: Any,
        completions: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.check = RewardCheck(reward_funcs, dataset, completions, **options)
        self.verdict, self.scorer = self.check.run(), self.check.scorer
        first, *_ = map(html.escape, str(self.verdict).splitlines())
        rows = [(f"{n + 1}. {_asked(row)}", n) for n, row in enumerate(self.scorer.rows)]
        self.row = w.Dropdown(options=rows, description="Row", layout=WIDE)
        self.name = w.Select(description="Completion", rows=12, layout={"width": "26em"})
        self.text = w.Textarea(rows=12, continuous_update=False, layout={"flex": "1"})
        self.status, self.view = w.HTML(f"<b role='status'>{first}</b>"), w.HTML()
        self.on(self._list, self.row)
        self.on(self._take, self.name)
        self.on(self._show, self.text)
        both = w.HBox([self.name, self.text])
        self.report = w.HTML(_report(self.verdict))
        self.children = [self.status, self.row, both, self.errors, self.view, self.report]
        self.guard(self._list)

    def _list(self) -> None:
        """List the completions of the row by what they earn, and keep the choice."""
        name, self.texts = self.name.value, self.check.completions(self.row.value)
        wins = {line["attack"]: f" ({line['won']})" for line in self.verdict.table if line["won"]}
        labels = {each: each + wins.get(each, "") for each in self.texts}
        if not self.scorer.any_slow:
            totals = self.scorer.totals([(self.row.value, text) for text in self.texts.values()])
            order = sorted(zip(totals, labels, strict=True), key=lambda pair: -round(pair[0], 6))
            labels = {each: f"{total:.3g} · {labels[each]}" for total, each in order}
        self.name.options = [(label, each) for each, label in labels.items()]
        self.name.value = name if name in self.texts else next(iter(self.texts))
        self._take()

    def _take(self) -> None:
        """Put the chosen completion into the box."""
        if self.name.value in self.texts:
            self.text.value = self.texts[self.name.value]
            self._show()

    def _show(self) -> None:
        """Show what the completion in the box earns, and what counts as its answer."""
        row, text = self.row.value, self.text.value
        frame = pd.DataFrame(self.check.explain(row, text))
        images = tables.thumbnails(self.scorer.rows[row].get("images", ()))
        marked = tables.text(text, self.check.answer(text) or None)
        earned = {"this": frame["adds"].sum(), **self.verdict.amounts}
        total = "; ".join(f"{name} earns {amount:.3g}" for name, amount in earned.items())
        page = f"{images}<div class='sheet'>{marked}</div><p>{html.escape(total)}</p>"
        self.view.value = tables.Page(page + tables.table(frame))


def lab(test: RewardTest) -> View | Checks:
    """Return the Reward Lab of a run; if the task has an environment, read and check it instead."""
    if environment := environments.of(test.stage.config):
        return environments.check_environment(environment, test.rows)
    return RewardLab(**reward_lab.arguments(test))


def _asked(row: Mapping[str, Any]) -> str:
    """Return the beginning of a row's question."""
    text = question(row["prompt"]) if row.get("prompt") else str(row.get("question", ""))
    return " ".join(text.split())[:90]


def _report(verdict: Any) -> str:
    """Render the findings and what the attacks earn."""
    frames = [verdict.findings.table(), pd.DataFrame(verdict.table)]
    pages = "".join(tables.table(frame) for frame in frames if len(frame))
    return f"<div class='jp-RenderedHTMLCommon'>{pages}</div>"
