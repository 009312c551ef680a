"""Widgets of the notebooks: Reward Lab, training dashboard, completion browser, chat.

They hold no logic and nothing that a later cell needs; `reward_lab`, `dashboard`, `sheet` and
`infer` do the work, and the notebook shows the same without them.
"""

import html
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb.reward_lab import Bench, Verdict, judge
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.runs import Stage, checks
from grpo_nb.training import Controls, Update
from grpo_nb.views import plots, sheet
from grpo_nb.views.dashboard import Dashboard
from grpo_nb.views.infer import MODELS, Chat, Said, answers_page

SHARE = 0.02  # of the time, at most, goes into pictures of the curves
WEIGHT_STEP = 1 / 16  # a power of two, as TRL's count of groups without signal wants it
SHOWN = 200  # lines of the completion browser's list
EITHER = {"any": None, "yes": True, "no": False}
WIDE = {"width": "auto"}
WISHES = {  # of Controls: the button, what it does, and what is said once it is pressed
    "stop": ("Stop after this step", "Ends the training", "stops after the step that runs now"),
    "save": ("Save now", "Writes a checkpoint", "a checkpoint follows the step that runs now"),
    "evaluate": ("Evaluate now", "On the validation split", "a validation follows this step"),
}


class View(w.VBox):
    """A widget whose callbacks show their errors, with the traceback, in `errors`."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = w.HTML()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: run this notebook to use it"

    def guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run it; what it raises is shown, and the caller goes on."""
        try:
            action()
            self.errors.value = ""
        except Exception:
            text = html.escape(traceback.format_exc())
            look = "border-left: 4px solid #d33; padding-left: 8px; white-space: pre-wrap"
            self.errors.value = f"<pre role='alert' style='{look}'>{text}</pre>"

    def on(self, action: Callable[[], None], *controls: w.Widget) -> None:
        """Call it when a control changes, or a button is clicked."""
        for control in controls:
            if isinstance(control, w.Button):
                control.on_click(partial(self.guard, action))
            else:
                control.observe(partial(self.guard, action), "value")


class TrainingDashboard(View):
    """Shows each `Update` it is called with; its `controls` carry the buttons' requests.

    The buttons work while the training's cell runs where the kernel takes widget messages on
    a subshell: ipykernel >= 7 under JupyterLab >= 4.4, whose setting "Kernel Comms over
    subshells" is on by default. Elsewhere, as on Colab (ipykernel 6), curves still move, but a
    click is not seen before the cell ends; use the notebook's interrupt button there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.controls, self.page = Controls(), Dashboard()
        self._due = 0.0  # before then no other picture
        self.header, self.wishes = w.HTML(self.page.header()), w.HTML()
        self.alerts, self.curves, self.completions = w.HTML(), w.HTML(), w.HTML()
        self.buttons = {}
        for name, (label, tooltip, _) in WISHES.items():
            button = w.Button(description=label, tooltip=tooltip, layout=WIDE)
            self.buttons[name] = button
            self.on(partial(self._wish, name), button)
        row = w.HBox([*self.buttons.values(), self.wishes])
        parts = [self.alerts, self.curves, self.completions]
        self.children = [self.header, row, self.errors, *parts]
        self._show_wishes()

    def __call__(self, update: Update) -> None:
        """Take an update; pictures and completions follow at their own pace."""
        self.guard(partial(self._take, update))

    def _take(self, update: Update) -> None:
        self.page.add(update)
        self._show_wishes()
        self.header.value, self.alerts.value = self.page.header(), self.page.alert_list()
        last = self.page.step >= self.page.total_steps or self.controls.stop.is_set()
        began = time.monotonic()
        if began < self._due and not last:
            return
        # A picture takes a part of a second: the longer it took, the later the next one.
        self.completions.value, self.curves.value = self.page.completions(), self.page.curves()
        ended = time.monotonic()
        self._due = ended + (ended - began) / SHARE

    def _wish(self, name: str) -> None:
        getattr(self.controls, name).set()
        self._show_wishes()

    def _show_wishes(self) -> None:
        """A request stands until the training has taken it, and cannot be repeated before."""
        asked = [name for name in WISHES if getattr(self.controls, name).is_set()]
        said = "; ".join(WISHES[name][2] for name in asked)
        self.wishes.value = f"<span role='status'>{said}</span>"
        for name, button in self.buttons.items():
            button.disabled = name in asked
            # A click goes where the browser sends it. ipykernel 7.4 remembers the thread that drew
            # the button, which here is the one that is busy with the cell.
            if button.comm is not None:
                vars(button.comm).pop("_reply_subshell_id", None)


class CompletionBrowser(View):
    """Baseline rollouts, or completions of a training or an evaluation: filtered, sorted, compared.

    Args:
        frame: question, completion and any of: step, truncated, correct; they can be sorted by
            each column of numbers.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__()
        self.frame = frame.reset_index(drop=True)
        self.numbers = [c for c in frame.select_dtypes("number") if c != "step"]
        self.by = w.Dropdown(options=self.numbers, description="Score")
        self.descending = w.Checkbox(value=True, description="highest first", indent=False)
        self.flags = {
            name: w.Dropdown(options=EITHER, description=name)
            for name in ("correct", "truncated")
            if name in frame
        }
        # Of one step alone there is nothing to choose, and the slider has no range then.
        steps = sorted(frame["step"].unique()) if "step" in frame else [0]
        self.step = w.SelectionRangeSlider(options=steps, description="Steps")
        self.step.index = (0, len(steps) - 1)
        self.count, self.shown = w.HTML(), w.HTML()
        self.chosen = w.SelectMultiple(description="Compare", rows=8, layout=WIDE)
        self.children = [
            w.HBox([self.by, self.descending, *self.flags.values()]),
            *([self.step] if len(steps) > 1 else []),
            *(self.count, self.chosen, self.errors, self.shown),
        ]
        self.on(self._list, self.by, self.descending, self.step, *self.flags.values())
        self.on(self._show, self.chosen)
        self._list()

    @property
    def found(self) -> pd.DataFrame:
        """The lines that pass the filters, sorted."""
        keep = pd.Series(True, index=self.frame.index)
        for name, control in self.flags.items():
            if control.value is not None:
                keep &= self.frame[name].astype(bool) == control.value
        if len(self.step.options) > 1:
            keep &= self.frame["step"].between(*self.step.value)
        descending = self.descending.value
        return self.frame[keep].sort_values(self.by.value, ascending=not descending, kind="stable")

    def _list(self) -> None:
        lines = self.found
        self.count.value = f"{len(lines)} of {len(self.frame)} completions"
        self.chosen.options = [
            (_label(line, self.by.value), number)
            for number, line in zip(lines.index, lines.to_dict("records"), strict=True)
        ][:SHOWN]
        self.chosen.value = [number for _, number in self.chosen.options[:2]]
        self._show()

    def _show(self) -> None:
        head = ["question", "completion", *map(sheet.short, self.numbers)]
        lines = [
            [html.escape(str(line["question"])), sheet.read(line["completion"], None)[0]]
            + [sheet.score(line[name]) for name in self.numbers]
            for line in self.frame.loc[list(self.chosen.value)].to_dict("records")
        ]
        none = "no completion passes these filters"
        self.shown.value = sheet.Page(sheet.table(head, lines)) if lines else none


def _label(line: dict[str, Any], by: str) -> str:
    step = f"step {line['step']} · " if "step" in line else ""
    return f"{step}{line[by]:.3g} · {line['question'][:40]} → {line['completion'][:60]!r}"


class ChatPanel(View):
    """A question, typed; its two answers as they are written, scored if a reference is given.

    Enter in either field asks. The models are loaded at the first question.

    Args:
        chat: Of a trained run.
    """

    def __init__(self, chat: Chat) -> None:
        super().__init__()
        self.chat = chat
        self._lock = threading.Lock()  # a click may come on another thread while one is answered
        wide, narrow = {"flex": "1 1 16em"}, {"flex": "0 1 18em"}
        self.question = w.Text(placeholder="a question", description="Question", layout=wide)
        self.reference = w.Text(
            placeholder="optional: to score", description="Reference", layout=narrow
        )
        self.button = w.Button(description="Ask", button_style="primary", layout={"width": "7em"})
        self.temperature = w.BoundedFloatText(
            0.0, min=0, max=2, step=0.1, description="Temperature"
        )
        self.seed = w.IntText(0, description="Seed", layout={"width": "12em"})
        self.status, self.view = w.HTML(), w.HTML()
        asked = w.HBox(
            [self.question, self.reference, self.button], layout={"flex_flow": "row wrap"}
        )
        how = w.HBox([self.temperature, self.seed, self.status])
        self.children = [asked, how, self.errors, self.view]
        self.on(self._ask_once, self.button)
        for field in (self.question, self.reference):
            field.on_msg(self._entered)

    def _entered(self, _: Any, content: dict, buffers: Any) -> None:
        if content.get("event") == "submit":  # Enter
            self.guard(self._ask_once)

    def _ask_once(self) -> None:
        """Ask, unless a question is being answered."""
        if not self._lock.acquire(blocking=False):
            return
        self.button.disabled = True
        try:
            self._ask()
        finally:
            self.status.value, self.button.disabled = "", False
            self._lock.release()

    def _ask(self) -> None:
        if not self.question.value.strip():
            raise ValueError("type a question first")
        row = self.chat.row(self.question.value.strip(), self.reference.value.strip())
        said = dict.fromkeys(MODELS, Said(""))
        how = {"temperature": self.temperature.value, "seed": self.seed.value}

        def show(model: str, text: str) -> None:
            self.view.value = answers_page(row, said | {model: Said(text)})

        for model in MODELS:
            self.status.value = f"<span role='status'>{model} is answering…</span>"
            said[model] = self.chat.answer(row, model, **how, on_text=partial(show, model))
            self.view.value = answers_page(row, said)


class RewardLab(View):
    """The baseline rollouts, a group at a time, under weights that can be changed; 0: off.

    Args:
        bench: Rewards and weights to begin with.
        baseline: Baseline rollouts: prompts and their completions.
        rows: Dataset rows whose references the probes need.
        stage: Stage 02, whose settings the probes need.
    """

    def __init__(self, bench: Bench, baseline: Baseline, rows: list[dict], stage: Stage) -> None:
        super().__init__()
        self.bench, self.baseline, self.rows, self.stage = bench, baseline, rows, stage
        self.completions_P_G = baseline.completions_P_G
        self.group_size = len(self.completions_P_G[0])
        self.verdict: Verdict | None = None
        questions = [(f"{i + 1}. {row['question'][:90]}", i) for i, row in enumerate(baseline.rows)]
        numbers = [(str(i + 1), i) for i in range(self.group_size)]
        self.prompt = w.Dropdown(options=questions, description="Prompt", layout=WIDE)
        self.number = w.Dropdown(options=numbers, description="Completion")
        self.text = w.Textarea(description="Edit", rows=4, layout=WIDE, continuous_update=False)
        self.original = w.Button(description="Reset", tooltip="Undo the edit")
        self.view, self.summary, self.report = w.HTML(), w.HTML(), w.HTML()
        self.probe = w.Button(description="Run probes", tooltip="Linter, attacks and references")
        self.on(self._show_text, self.prompt, self.number)
        self.on(self._edit, self.text)
        self.on(self._restore, self.original)
        self.on(self._probe, self.probe)
        self.children = [self.errors]
        self.use(bench)

    @property
    def weights(self) -> list[float]:
        """Of each reward as the sliders stand."""
        return [slider.value for slider in self.sliders]

    def use(self, bench: Bench) -> None:
        """Other rewards over the same rollouts: scores everything again, keeps the edits.

        Where one raises, its traceback is shown and the rewards stay as they were.
        """
        self.guard(partial(self._use, bench))

    def _use(self, bench: Bench) -> None:
        self.table = bench.table(self.baseline.rows, self.completions_P_G)
        self.bench, preset = bench, bench.preset
        pairs = zip(preset.names, preset.reward_weights, strict=True)
        self.sliders = [_weight_slider(name, weight) for name, weight in pairs]
        self.on(self._reweigh, *self.sliders)
        self.children = [
            *(self.prompt, w.HBox([self.number, self.original]), self.text),
            *(*self.sliders, self.errors, self.summary, self.view),
            *(self.probe, self.report),
        ]
        self._reweigh()
        self._show_text()

    def _reweigh(self) -> None:
        preset = self.bench.preset._replace(reward_weights=self.weights)
        self.bench = self.bench._replace(preset=preset)
        self.table = self.bench.weighed(self.table, self.group_size)
        self._show()

    def _show_text(self) -> None:
        self.text.value = self.completions_P_G[self.prompt.value][self.number.value]
        self._show()

    def _restore(self) -> None:
        self.text.value = self.baseline.completions_P_G[self.prompt.value][self.number.value]

    def _edit(self) -> None:
        """Score the group again with the text as it stands now."""
        group = self.completions_P_G[self.prompt.value]
        if group[self.number.value] == self.text.value:
            return
        group[self.number.value] = self.text.value
        scored = self.bench.table([self.baseline.rows[self.prompt.value]], [group])
        scored.index = self._lines()
        self.table.loc[scored.index, scored.columns] = scored
        self._reweigh()

    def _lines(self) -> range:
        start = self.prompt.value * self.group_size
        return range(start, start + self.group_size)

    def _show(self) -> None:
        group = self.table.loc[list(self._lines())]
        self.view.value = sheet.score_sheet(group, self.bench.preset, self.number.value)
        signal = self.table["signal"].to_numpy()[:: self.group_size]
        weights = ", ".join(f"{weight:g}" for weight in self.weights)
        self.summary.value = (
            f"{signal.sum()} of {len(signal)} groups have advantages · mean total "
            f"{self.table['total'].mean():.3f} · to train with these weights: <code>settings = "
            f'{{"rewards.reward_weights": "{weights}"}}</code>'
        )

    def _probe(self) -> None:
        self.report.value = ""
        self.verdict = judge(self.bench, self.rows, self.baseline, self.stage)
        self.report.value = _verdict_page(self.verdict)


def _weight_slider(name: str, weight: float) -> w.FloatSlider:
    ends = {"min": min(0.0, 2 * weight), "max": max(1.0, 2 * weight), "step": WEIGHT_STEP}
    look = {"readout_format": ".4g", "tooltip": f"weight of {name}", "layout": {"width": "36em"}}
    wide = {"description_width": "16em"}
    return w.FloatSlider(weight, **ends, **look, description=sheet.short(name), style=wide)


def _verdict_page(verdict: Verdict) -> str:
    frames = [checks.table(verdict.checks), verdict.probes]
    tables = [plots.table(frame).to_html() for frame in frames if frame is not None]
    text = f"<pre>{html.escape(str(verdict))}</pre>"
    return f"<div class='jp-RenderedHTMLCommon'>{text}{''.join(tables)}</div>"
