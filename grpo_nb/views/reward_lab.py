"""The Reward Lab: write rewards, edit completions, change weights and run attacks."""

import html
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import ipywidgets as w

from grpo_nb import data, reward_lab
from grpo_nb.models import chat
from grpo_nb.reward_lab import Bench, Verdict, bench_of, judge
from grpo_nb.reward_lab import baseline as baselines
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import NOTEBOOKS, Run, Stage, checks, resolve_stages
from grpo_nb.runs.config import of_stage
from grpo_nb.views import tables
from grpo_nb.views.environment_lab import EnvironmentLab
from grpo_nb.views.widgets import WIDE, View

WEIGHT_STEP = 1 / 16  # a power of two, so that TRL's count of zero-advantage groups is exact
EXAMPLE = """Paste the rewards of a TRL script or an Unsloth notebook, or write your own:

def correct(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(f">{right}<" in text) for right, text in zip(answer, texts)]

@rewards.reward()
def brief(response: str) -> float:
    return float(len(response) <= 40)

If the box is empty, the run's preset is used."""


class RewardLab(View):
    """Shows rewards and what the baseline rollouts earn from them, one group at a time.

    A weight of 0 turns a reward off.

    Args:
        bench: Rewards and weights to start with.
        baseline: Baseline rollouts: prompts and their completions.
        rows: Dataset rows, whose references the attacks need.
        stage: Stage 02, whose settings the attacks need.
    """

    def __init__(self, bench: Bench, baseline: Baseline, rows: list[dict], stage: Stage) -> None:
        super().__init__()
        self.bench, self.baseline, self.rows, self.stage = bench, baseline, rows, stage
        self.completions_P_G = baseline.completions_P_G
        self.group_size = len(self.completions_P_G[0])
        self.verdict: Verdict | None = None
        self.shown_source = reward_lab.source_of(stage)  # the text whose rewards are shown
        self._make_controls()
        self.on(self._show_text, self.prompt, self.number)
        self.on(self._edit, self.text)
        self.guard(lambda: self.use(bench))

    def _make_controls(self) -> None:
        rows = enumerate(self.baseline.rows)
        questions = [(f"{i + 1}. {row['question'][:90]}", i) for i, row in rows]
        numbers = [(str(i + 1), i) for i in range(self.group_size)]
        self.code = self.code_box("Rewards", EXAMPLE, rows=10)
        self.code.value = self.shown_source
        self.run = self.button("Run", "Score the completions and run the attacks", self._run)
        self.adopt = self.button("Adopt", "Use these rewards in notebook 3", self._adopt)
        self.prompt = w.Dropdown(options=questions, description="Prompt", layout=WIDE)
        self.number = w.Dropdown(options=numbers, description="Completion")
        style = {"layout": WIDE, "continuous_update": False}
        self.text = w.Textarea(description="Edit", rows=4, **style)
        self.original = self.button("Reset", "Undo the edit", self._restore)
        self.status, self.view, self.summary, self.report = (w.HTML() for _ in range(4))
        self.editor = [self.code, w.HBox([self.run, self.adopt]), self.errors, self.status]
        self.children = self.editor

    @property
    def weights(self) -> list[float]:
        """The current weight of each reward, from the sliders."""
        return [slider.value for slider in self.sliders]

    def sentence(self, error: Exception) -> str:
        """Explain what is wrong with the rewards in the box, and in which line."""
        return reward_lab.fault(error, self.code.value)

    def use(self, bench: Bench) -> None:
        """Score the same rollouts with other rewards; edited completions are kept.

        If a reward raises, the rewards shown do not change.
        """
        with redirect_stdout(io.StringIO()):
            self.table = bench.table(self.baseline.rows, self.completions_P_G)
        self.bench, preset = bench, bench.preset
        pairs = zip(preset.names, preset.reward_weights, strict=True)
        self.sliders = [_weight_slider(name, weight) for name, weight in pairs]
        self.on(self._reweigh, *self.sliders)
        self.children = [
            *(*self.editor, self.prompt, w.HBox([self.number, self.original]), self.text),
            *(*self.sliders, self.summary, self.view, self.report),
        ]
        self._reweigh()
        self._show_text()

    def _run(self) -> None:
        self._busy(self._judge)

    def _adopt(self) -> None:
        self._busy(self._hand_on)

    def _busy(self, action: Callable[[], None]) -> None:
        """Run the action, and meanwhile say so on the page."""
        limit = f"a reward is stopped after {self.stage.config.rewards.seconds:g} s a completion"
        self.status.value = running = f"<span role='status'>Running: {limit}</span>"
        try:
            self.alone(action, self.run, self.adopt)
        finally:
            if self.status.value == running:
                self.status.value = ""

    def _score(self) -> tuple[Bench, list[dict], Baseline, Stage]:
        """Load the rewards in the box if they changed; return the arguments of `judge`."""
        self.report.value = ""
        given, text = (self.rows, self.baseline, self.stage), self.code.value
        if text != self.shown_source:
            self.use(reward_lab.try_out(self.bench, *given, text))
            self.shown_source = text
        return self.bench, *given

    def _judge(self) -> None:
        self._show_verdict(judge(*self._score()))

    def _hand_on(self) -> None:
        """Hand on the rewards in the box with the current weights."""
        arguments = self._score()
        self._show_verdict(reward_lab.hand_on(*arguments, self.shown_source, self.weights))
        name = html.escape(Path(self.stage.config.rewards.preset).name)
        then = "trains with it" if self.verdict.passed else "will refuse it: see the verdict below"
        self.status.value = f"<span role='status'>Adopted: {name}. {NOTEBOOKS['03']} {then}</span>"

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
        """Score the group again with the edited text."""
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
        self.summary.value = (
            f"{signal.sum()} of {len(signal)} groups have advantages · mean total "
            f"{self.table['total'].mean():.3f}"
        )

    def _show_verdict(self, verdict: Verdict) -> None:
        self.verdict, self.report.value = verdict, _verdict_page(verdict)


def lab(bench: Bench, baseline: Baseline, rows: list[dict], stage: Stage) -> View:
    """Return the Reward Lab, or the Environment Lab if the task has an environment."""
    kind = EnvironmentLab if bench.environment else RewardLab
    return kind(bench, baseline, rows, stage)


def open_lab(name: str) -> View:
    """Open the lab of a run whose data is prepared, with its current rewards.

    Stage 02 starts only when something is adopted, so that looking changes nothing.
    """
    run = Run(name)
    done, settings = run.status("02") == "done", of_stage("02", run.settings())
    config = run.config() if done else resolve_stages(run, settings, "02", "02")
    rows = data.load(run, "train")
    baseline = baselines.sample(run, rows[: config.rewards.baseline_prompts], config)
    preset = load_rewards(config.rewards)
    model = config.model
    tokenizer = chat.load_tokenizer(model.model_path, model.chat_template_kwargs)
    bench = bench_of(config, preset, tokenizer)
    return lab(bench, baseline, rows, Stage(run, "02", config))


def _weight_slider(name: str, weight: float) -> w.FloatSlider:
    ends = {"min": min(0.0, 2 * weight), "max": max(1.0, 2 * weight), "step": WEIGHT_STEP}
    more = {"readout_format": ".4g", "tooltip": f"weight of {name}", "layout": {"width": "36em"}}
    style = {"description_width": "16em"}
    return w.FloatSlider(weight, **ends, **more, description=tables.short(name), style=style)


def _verdict_page(verdict: Verdict) -> str:
    frames = [checks.table(verdict.checks), verdict.probes]
    shown = "".join(tables.table(frame) for frame in frames if frame is not None)
    text = f"<pre>{html.escape(str(verdict))}</pre>"
    return f"<div class='jp-RenderedHTMLCommon'>{text}{shown}</div>"
