"""Show two completions below the Reward Lab, and three buttons to say which one is better."""

import html
from functools import partial

import ipywidgets as w
import pandas as pd

from grpo_nb.reward_lab import human_pairs
from grpo_nb.rewards import LLMJudge
from grpo_nb.runs import Run
from grpo_nb.views import tables
from grpo_nb.views.widgets import View

LABELS = {"left": "Left is better", "equal": "Equal", "right": "Right is better"}
WORST = 5  # at most so many of the pairs that judge and person disagree on are shown


class HumanPairs(View):
    """Show pairs of completions one after another, and write each click to the run.

    After `human_pairs.ENOUGH` clicks, also show how often the judge and the person agree, and the
    pairs on which they disagree most.
    """

    def __init__(self, run: Run, judge: LLMJudge, table: pd.DataFrame) -> None:
        super().__init__()
        self.run, self.judge = run, judge
        self.pairs = human_pairs.pairs(run, judge, table)
        self.view, self.report = w.HTML(), w.HTML()
        self.buttons = [
            self.button(label, "Store this answer", partial(self._answer, better))
            for better, label in LABELS.items()
        ]
        self.children = [self.view, w.HBox(self.buttons), self.report, self.errors]
        self._show()

    def _answer(self, better: str) -> None:
        place = [pair.better for pair in self.pairs].index("")
        self.pairs[place] = human_pairs.store(self.run, self.pairs[place], better)
        self._show()

    def _show(self) -> None:
        answers = [pair for pair in self.pairs if pair.better]
        pair = next((pair for pair in self.pairs if not pair.better), None)
        for button in self.buttons:
            button.disabled = pair is None
        progress = f"Judge {self.judge.name}: {len(answers)} of {len(self.pairs)} pairs answered"
        page = f"<b>{html.escape(progress)}</b>"
        if pair:
            texts = {"question": pair.question, "completion": [pair.left, pair.right]}
            page += tables.completions(pd.DataFrame(texts, index=["left", "right"]))
        self.view.value = page
        if len(answers) >= human_pairs.ENOUGH:
            check = human_pairs.check(self.judge, self.pairs)
            differ = [each for each in answers if each.agrees is False]
            differ.sort(key=lambda each: -abs(each.difference))
            frame = pd.DataFrame(differ[:WORST], columns=human_pairs.Pair._fields)
            sentence = html.escape(f"{check.name}: {check.state}, {check.evidence}")
            self.report.value = f"<p role='status'>{sentence}</p>{tables.table(frame)}"
