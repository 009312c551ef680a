"""Write rewards, edit completions, change weights and run attacks, in the Reward Lab."""

import html
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from queue import Queue

import ipywidgets as w

from grpo_nb import environments, reward_lab
from grpo_nb.checks import Checks
from grpo_nb.reward_lab import RewardTest, Verdict, judge
from grpo_nb.rewards import limits
from grpo_nb.rewards.surroundings import Muted, turn
from grpo_nb.views import tables
from grpo_nb.views.widgets import WIDE, View, in_order, row_list

WEIGHT_STEP = 1 / 16  # a power of two, so that TRL's count of zero-advantage groups is exact
EXAMPLE = Path(__file__).with_name("example.txt").read_text(encoding="utf-8").rstrip()


class RewardLab(View):
    """Show rewards and what the baseline rollouts earn from them, one group at a time.

    A weight of 0 turns a reward off. Clicks and input are handled one after another in a thread, so
    that *Stop* works and cells can run meanwhile; `actions.join()` waits until all are handled.

    Args:
        test: The test, with the rewards and weights to start with.
    """

    shown_errors = BaseException  # a reward may raise anything, and the thread must survive it

    def __init__(self, test: RewardTest) -> None:
        super().__init__()
        self.stage, self.baseline = test.stage, test.baseline
        self.completions_P_G, self.place = test.baseline.completions_P_G, (0, 0)
        self.group_size = len(self.completions_P_G[0])
        self.verdict: Verdict | None = None
        self.shown_source = reward_lab.source_of(test.stage)  # the source whose rewards are shown
        self.adopted = self.shown_source  # the text of rewards/mine.py, as far as this lab knows
        self.actions: Queue[Callable[[], None]] = Queue()
        self._make_widgets()
        self.on(self._show_text, self.prompt, self.number)
        self.on(self._edit, self.text)
        super().guard(lambda: self.use(test))
        threading.Thread(target=self._work, daemon=True, name="Reward Lab").start()

    def guard(self, action: Callable[[], None], *_: object) -> None:
        """Queue the action; an exception is shown in `errors`."""
        self.actions.put(action)

    def _work(self) -> None:
        while True:
            super().guard(self.actions.get())
            self.actions.task_done()

    def _make_widgets(self) -> None:
        numbers = [(str(i + 1), i) for i in range(self.group_size)]
        self.code = self.code_box("Rewards", EXAMPLE, rows=18)
        self.code.value = self.shown_source
        run, adopt = (partial(self._busy, action) for action in (self._judge, self._hand_on))
        self.run = self.button("Run", "Score the completions and run the attacks", run)
        self.adopt = self.button("Adopt", "Use these rewards in notebook 3", adopt)
        self.request = threading.Event()  # set by *Stop*, for the action in progress
        self.stop = w.Button(description="Stop", tooltip="Stop the running reward", layout=WIDE)
        self.stop.disabled = True
        self.stop.on_click(lambda _: self.request.set())
        in_order(self.stop)
        self.prompt = row_list(self.baseline.rows, "Prompt")
        self.number = w.Dropdown(options=numbers, description="Completion")
        style = {"layout": WIDE, "continuous_update": False}
        text = self.completions_P_G[0][0]
        self.text = w.Textarea(text, description="Edit", rows=4, **style)
        self.original = self.button("Reset", "Undo the edit", self._restore)
        self.status, self.view, self.summary, self.report = (w.HTML() for _ in range(4))
        row = w.HBox([self.run, self.stop, self.adopt])
        self.editor = [self.code, row, self.errors, self.status]
        self.children = self.editor

    @property
    def weights(self) -> list[float]:
        """Return the current weight of each reward, from the sliders."""
        return [slider.value for slider in self.sliders]

    def sentence(self, error: BaseException) -> str:
        """Explain what is wrong with the rewards in the box, and on which line."""
        return reward_lab.fault(error, self.code.value)

    def use(self, test: RewardTest) -> None:
        """Score the same rollouts with other rewards; edited completions are kept.

        If a reward raises, the rewards shown do not change.
        """
        with redirect_stdout(Muted()):
            self.table = test.bench.table(self.baseline.rows, self.completions_P_G)
        self.test, preset = test, test.bench.preset
        pairs = zip(preset.names, preset.reward_weights, strict=True)
        # One scale for all sliders, so that equal weights are at equal positions.
        ends = 2 * min(0.0, *preset.reward_weights), 2 * max(0.5, *preset.reward_weights)
        self.sliders = [_weight_slider(name, weight, *ends) for name, weight in pairs]
        self.on(self._reweigh, *self.sliders)
        self.children = [
            *(*self.editor, self.prompt, w.HBox([self.number, self.original]), self.text),
            *(*self.sliders, self.summary, self.view, self.report),
        ]
        self._reweigh()

    def _busy(self, action: Callable[[], None], is_edit: bool = False) -> None:
        """Run the action with *Stop* enabled, with *Run* and *Adopt* disabled unless it is an edit.

        They are disabled because the front end holds back an input's next change while the kernel
        handles an earlier one: a click would overtake text that was typed in the meantime. After an
        edit, the earlier status line is shown again.
        """
        if not turn.acquire(blocking=False):  # a reward would rewind the trainer's random numbers
            raise RuntimeError("wait until the training or the other lab in this kernel has ended")
        limit = f"a reward is stopped after {self.stage.config.rewards.seconds:g} s per completion"
        after = self.status.value if is_edit else ""
        self.status.value = notice = f"<span role='status'>Running: {limit}</span>"
        self.request = threading.Event()
        limits.stop.set(self.request)
        self.run.disabled = self.adopt.disabled = not is_edit
        self.stop.disabled = False
        try:
            action()
        except limits.Stopped as name:
            self._say(f"Stopped while {name} was running")
        finally:
            turn.release()
            self.run.disabled = self.adopt.disabled = False
            self.stop.disabled = True
            if self.status.value == notice:
                self.status.value = after

    def _score(self) -> RewardTest:
        """Load the rewards in the box if they changed, and return a test of them."""
        self.report.value = ""
        text = self.code.value
        if text != self.shown_source:
            self.use(reward_lab.try_out(self.test, text))
            self.shown_source = text
        return self.test

    def _judge(self) -> None:
        self._show_verdict(judge(self._score()))

    def _hand_on(self) -> None:
        """Adopt the rewards in the box with the current weights, and show the verdict."""
        test = self._score()
        source = self.shown_source
        self._show_verdict(reward_lab.hand_on(test, source, self.weights, self.adopted))
        self.adopted = source or self.adopted
        name = Path(self.stage.config.rewards.preset).name
        then = "trains with it" if self.verdict.passed else f"will refuse it. {self.verdict}"
        self._say(f"Adopted: {name}. 03_train_grpo {then}")

    def _reweigh(self) -> None:
        self.test = self.test.using(self.test.bench.preset._replace(reward_weights=self.weights))
        self.table = self.test.bench.weighed(self.table, self.group_size)
        self._show()

    def _show_text(self) -> None:
        self.place = prompt, number = self.prompt.value, self.number.value
        self.text.value = self.completions_P_G[prompt][number]
        self._show()

    def _restore(self) -> None:
        prompt, number = self.place
        self.text.value = self.baseline.completions_P_G[prompt][number]

    def _edit(self) -> None:
        """Score the group again with the edited text."""
        prompt, number = self.place
        if self.completions_P_G[prompt][number] != self.text.value:
            self.completions_P_G[prompt][number] = self.text.value
            self._busy(self._score_group, is_edit=True)

    def _score_group(self) -> None:
        prompt = self.place[0]
        rows, groups = [self.baseline.rows[prompt]], [self.completions_P_G[prompt]]
        lines = self.test.bench.table(rows, groups)
        lines.index = self._lines()
        self.table.loc[lines.index, lines.columns] = lines
        self._reweigh()

    def _lines(self) -> range:
        start = self.place[0] * self.group_size
        return range(start, start + self.group_size)

    def _show(self) -> None:
        group = self.table.loc[list(self._lines())]
        images = self.baseline.rows[self.place[0]].get("images", ())
        group = group.assign(images=[images] * self.group_size)
        self.view.value = tables.score_sheet(group, self.test.bench.preset, self.place[1])
        signal = self.table["signal"].to_numpy()[:: self.group_size]
        self.summary.value = (
            f"{signal.sum()} of {len(signal)} groups have advantages · mean total "
            f"{self.table['total'].mean():.3f}"
        )

    def _show_verdict(self, verdict: Verdict) -> None:
        self.verdict, self.report.value = verdict, _verdict_page(verdict)
        self._say(str(verdict))

    def _say(self, text: str) -> None:
        """Show the first line of a text as the status line."""
        first = html.escape(text.partition("\n")[0])
        self.status.value = f"<span role='status'>{first}</span>"


def lab(test: RewardTest) -> View | Checks:
    """Return the Reward Lab; if the task has an environment, read it again and check it."""
    if environment := environments.of(test.stage.config):
        cap = test.bench.grpo.max_completion_length
        return environments.check_environment(environment, test.rows, test.bench.tokenizer, cap)
    return RewardLab(test)


def _weight_slider(name: str, weight: float, low: float, high: float) -> w.FloatSlider:
    return w.FloatSlider(
        weight,
        min=low,
        max=high,
        step=WEIGHT_STEP,
        readout_format=".4g",
        description=tables.short(name),
        tooltip=f"weight of {name}",
        layout={"width": "36em"},
        style={"description_width": "16em"},
    )


def _verdict_page(verdict: Verdict) -> str:
    frames = [verdict.checks.table(), verdict.probes]
    pages = "".join(tables.table(frame) for frame in frames if frame is not None)
    text = f"<pre>{html.escape(str(verdict).partition(chr(10))[2])}</pre>"
    return f"<div class='jp-RenderedHTMLCommon'>{text}{pages}</div>"
