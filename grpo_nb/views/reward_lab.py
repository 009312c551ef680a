"""The Reward Lab: completions to edit, weights to move, probes to run, in a widget."""

import html
from functools import partial

import ipywidgets as w

from grpo_nb.reward_lab import Bench, Verdict, judge
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.runs import Stage, checks
from grpo_nb.views import tables
from grpo_nb.views.widgets import WIDE, View

WEIGHT_STEP = 1 / 16  # a power of two, as TRL's count of groups without signal wants it


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
        self.view.value = tables.score_sheet(group, self.bench.preset, self.number.value)
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
    return w.FloatSlider(weight, **ends, **look, description=tables.short(name), style=wide)


def _verdict_page(verdict: Verdict) -> str:
    frames = [checks.table(verdict.checks), verdict.probes]
    shown = "".join(tables.table(frame) for frame in frames if frame is not None)
    text = f"<pre>{html.escape(str(verdict))}</pre>"
    return f"<div class='jp-RenderedHTMLCommon'>{text}{shown}</div>"
