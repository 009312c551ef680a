"""Define the types of a check's result and of what a training reports after each step."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Check(NamedTuple):
    """Hold the result of one check.

    name: What was checked; unique within its stage.
    state: "ok"; "note" if the result is for information; "warning" if it deserves attention; "stop"
        if continuing is pointless; "not yet" if the stage or run that the check needs has not been
        executed.
    evidence: What was observed, with its numbers.
    fix: What to change if the state is not "ok".
    """

    name: str
    state: Literal["ok", "note", "warning", "stop", "not yet"]
    evidence: str
    fix: str = ""


def shown(name: str, state: str, evidence: str, fix: str) -> str:
    """Format a check as one line of text, with its fix on the line below."""
    line = f"{state:<8} {name:<22} {evidence}"
    return f"{line}\n{'':12} → {fix}" if fix else line


class Checks(list[Check]):
    """Collect checks, and display them as a table in a notebook and in a terminal."""

    def table(self) -> "pd.DataFrame":
        """Return a table with one row per check: name, state, evidence, fix."""
        import pandas as pd

        return pd.DataFrame(list(self), columns=Check._fields)

    def refuse(self, force: bool = False) -> None:
        """Raise ValueError naming every check whose state is "stop", unless `force` is set."""
        stops = [f"{c.name}: {c.evidence}. {c.fix}".strip() for c in self if c.state == "stop"]
        if stops and not force:
            raise ValueError("; ".join(stops) + " (to continue anyway: force = True, or --force)")

    def __str__(self) -> str:
        return self.table().to_string(index=False)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.table())


class Update(NamedTuple):
    """Describe a step or a validation to a watcher.

    line: The line of metrics.jsonl. After a step, its keys are TRL's (reward,
        rewards/<name>/mean and /std, frac_reward_zero_std, completions/mean_length and
        /clipped_ratio, entropy, kl, clip_ratio/…, grad_norm, learning_rate, step_time), "step",
        and with a run's trainer seconds/generation, seconds/reward, seconds/update,
        tokens_per_second, memory_gib and groups/distinct.
        After a validation, the keys are "step", eval/reward, eval/accuracy (if a reward is known to
        say what is right), and with a run's trainer eval/exact, eval/format and eval/seconds.
    total_steps: The number of steps of the training.
    completions: The completions of this step, one dict each: question, completion, each reward,
        reward (the weighted total) and advantage; empty after a validation.
    alerts: The new alerts; the state of a serious one is "stop".
    """

    line: dict[str, Any]
    total_steps: int
    completions: Sequence[dict[str, Any]]
    alerts: Sequence[Check]


Watcher = Callable[[Update], None]
