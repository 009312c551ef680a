"""The Reward Lab: edit a completion, move a weight, and see what the optimizer would make of it."""

import html
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as w

from grpo_nb.reward_lab import Bench, Verdict, judge, save_case, write_weights
from grpo_nb.reward_lab.pilot import Pilot
from grpo_nb.runs import Stage
from grpo_nb.views import plots, sheet

STEP = 1 / 16  # of a weight; a power of two, as TRL's count of groups without signal wants it


class RewardLab(w.VBox):
    """The pilot's groups, one at a time, under rewards that can be weighed and switched off.

    Args:
        bench: Rewards and weights to begin with.
        pilot: Prompts and their completions.
        rows: Dataset rows whose references the probes need.
        stage: Stage 02: where cases and weights are kept.
    """

    def __init__(self, bench: Bench, pilot: Pilot, rows: list[dict], stage: Stage) -> None:
        self.bench, self.pilot, self.rows, self.stage = bench, pilot, rows, stage
        self.completions_P_G = pilot.completions_P_G
        self.verdict: Verdict | None = None
        wide = w.Layout(width="auto")
        questions = [(f"{i + 1}. {row['question'][:90]}", i) for i, row in enumerate(pilot.rows)]
        numbers = [(str(i + 1), i) for i in range(len(self.completions_P_G[0]))]
        self.prompt = w.Dropdown(options=questions, description="Prompt", layout=wide)
        self.number = w.Dropdown(options=numbers, description="Completion")
        self.text = w.Textarea(description="Edit", rows=4, layout=wide, continuous_update=False)
        self.original = self._button("As sampled", self._restore, "Undo the edit")
        self.view, self.summary, self.report, self.errors = (w.HTML() for _ in range(4))
        self.probe = self._button("Run probes", self._probe, "Linter, attacks and references")
        self.case_name = w.Text(placeholder="name of the case", layout=w.Layout(width="14em"))
        self.save = self._button("Save case", self._save, "Its scores must stay from now on")
        self.write = self._button("Write weights", self._write, "Into the run's config.yaml")
        super().__init__(children=[self.errors])
        for control in (self.prompt, self.number):
            control.observe(partial(self._guard, self._show_text), "value")
        self.text.observe(partial(self._guard, self._edit), "value")
        self.use(bench)

    @property
    def names(self) -> list[str]:
        return self.bench.preset.names

    @property
    def weights(self) -> list[float]:
        """Of each reward as the controls stand; 0 for one that is switched off."""
        pairs = zip(self.switches, self.sliders, strict=True)
        return [slider.value if switch.value else 0.0 for switch, slider in pairs]

    def use(self, bench: Bench) -> None:
        """Other rewards over the same pilot: scores everything anew, keeps the edits.

        Where one raises, its traceback is shown and the rewards stay as they were.
        """
        self._guard(partial(self._use, bench))

    def __repr__(self) -> str:
        return "The Reward Lab: run this notebook to use it"

    def _rows(self) -> list[w.Widget]:
        knobs = [w.HBox(pair) for pair in zip(self.switches, self.sliders, strict=True)]
        return [
            self.prompt,
            w.HBox([self.number, self.original]),
            self.text,
            w.VBox(knobs),
            self.errors,
            self.summary,
            self.view,
            w.HBox([self.probe, self.case_name, self.save, self.write]),
            self.report,
        ]

    def _make_knobs(self) -> None:
        """A checkbox and a slider for each reward."""
        names = [sheet.short(name) for name in self.names]
        self.switches = [w.Checkbox(value=True, description=name) for name in names]
        pairs = zip(names, self.bench.preset.reward_weights, strict=True)
        self.sliders = [self._slider(name, weight) for name, weight in pairs]
        for control in (*self.switches, *self.sliders):
            control.observe(partial(self._guard, self._reweigh), "value")

    def _slider(self, name: str, weight: float) -> w.FloatSlider:
        look = {"readout_format": ".4g", "description": "weight", "tooltip": f"weight of {name}"}
        ends = {"min": min(0.0, 2 * weight), "max": max(1.0, 2 * weight)}
        return w.FloatSlider(weight, **ends, step=STEP, **look)

    def _button(self, label: str, action: Callable[[], None], tooltip: str) -> w.Button:
        button = w.Button(description=label, tooltip=tooltip)
        button.on_click(partial(self._guard, action))
        return button

    def _guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run it; a reward's error is shown here, with its traceback, not in a log."""
        try:
            action()
            self.errors.value = ""
        except Exception:
            text = html.escape(traceback.format_exc())
            look = "border-left: 4px solid #d33; padding-left: 8px; white-space: pre-wrap"
            self.errors.value = f"<pre role='alert' style='{look}'>{text}</pre>"

    def _use(self, bench: Bench) -> None:
        self.table = bench.table(self.pilot.rows, self.completions_P_G)
        self.bench = bench
        self._make_knobs()
        self.children = self._rows()
        self._reweigh()
        self._show_text()

    def _reweigh(self) -> None:
        preset = self.bench.preset._replace(reward_weights=self.weights)
        self.bench = self.bench._replace(preset=preset)
        self.table = self.bench.weighed(self.table, self._group_size)
        self._show()

    @property
    def _group_size(self) -> int:
        return len(self.completions_P_G[0])

    def _show_text(self) -> None:
        self.text.value = self.completions_P_G[self.prompt.value][self.number.value]
        self._show()

    def _restore(self) -> None:
        self.text.value = self.pilot.completions_P_G[self.prompt.value][self.number.value]

    def _edit(self) -> None:
        """Score the group again with the text as it stands now."""
        group = self.completions_P_G[self.prompt.value]
        if group[self.number.value] == self.text.value:
            return
        group[self.number.value] = self.text.value
        scored = self.bench.table([self.pilot.rows[self.prompt.value]], [group])
        scored.index = self._lines()
        self.table.loc[scored.index, scored.columns] = scored
        self._reweigh()

    def _lines(self) -> range:
        start = self.prompt.value * self._group_size
        return range(start, start + self._group_size)

    def _show(self) -> None:
        group = self.table.loc[list(self._lines())]
        self.view.value = sheet.score_sheet(group, self.bench.preset, self.number.value)
        signal = self.table["signal"].to_numpy()[:: self._group_size]
        self.summary.value = (
            f"{signal.sum()} of {len(signal)} groups carry a signal · mean total "
            f"{self.table['total'].mean():.3f}"
        )

    def _probe(self) -> None:
        self.report.value = "<i>probing…</i>"
        try:
            self.verdict = judge(self.bench, self.rows, self.pilot, self.stage)
        except Exception:
            self.report.value = ""
            raise
        self.report.value = self._verdict_page(self.verdict)

    def _verdict_page(self, verdict: Verdict) -> str:
        parts = [f"<pre>{html.escape(str(verdict))}</pre>"]
        frames = [verdict.findings_table()]
        if verdict.probes is not None:
            frames.append(verdict.probes.table)
        parts += [plots.table(frame).to_html() for frame in frames if len(frame)]
        return f"<div class='jp-RenderedHTMLCommon'>{''.join(parts)}</div>"

    def _save(self) -> None:
        if not self.case_name.value.strip():
            raise ValueError("give the case a name, then save it")
        row, path = self.pilot.rows[self.prompt.value], self.stage.run / "cases.jsonl"
        case = save_case(self.bench, path, self.case_name.value.strip(), row, self.text.value)
        self.report.value = (
            f"saved {html.escape(case['case'])!r}: {html.escape(str(case['scores']))}"
        )

    def _write(self) -> None:
        verdict, message = write_weights(self.bench, self.rows, self.pilot, self.stage)
        self.verdict = verdict
        self.report.value = f"<p>{html.escape(message)}</p>{self._verdict_page(verdict)}"
