"""How far the training is: a line below the cell, and the pipeline's bar."""

import math
from typing import Any

from grpo_nb.runs import Stage
from grpo_nb.training.control import Update


class Progress:
    """A watcher that shows text which updates in place, and needs no widgets."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self._handle = stage, None

    def __call__(self, update: Update) -> None:
        line = update.line
        done = line["step"]
        if "eval/accuracy" in line:
            note = f"validated: accuracy {line['eval/accuracy']:.1%}"
        elif "reward" in line:
            scored = line["reward"] is not None and math.isfinite(line["reward"])
            note = f"reward {line['reward']:.2f}" if scored else "no scores, and so no update"
        else:
            note = "one more update with the same completions"
        self.stage.progress(done, update.total_steps, note)
        filled = round(30 * done / update.total_steps)
        bar = f"{'█' * filled}{'░' * (30 - filled)}"
        self._show({"text/plain": f"{bar} step {done}/{update.total_steps}  {note}"})

    def _show(self, text: dict[str, Any]) -> None:
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is None:
            return
        if self._handle is None:
            self._handle = display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)
