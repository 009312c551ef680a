"""Decide from which checkpoint a run goes on, and which checkpoints are kept."""

import itertools
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import reward_lab
from grpo_nb.files import read_json, sha256, write_json
from grpo_nb.rewards import RewardSet
from grpo_nb.runs.config import flatten
from grpo_nb.stages.arguments import ARGUMENTS, default_of, setting_of
from grpo_nb.stages.validation import prompts_to_hold_out
from grpo_nb.training.interruptions import newest_checkpoint, step_of, steps_of
from grpo_nb.training.metrics import forget_after

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_nb.runs import Stage


class Resumption:
    """Decide whether training starts anew, or continues from a checkpoint in the run's train/.

    Args:
        stage: Stage 03; its `train.resume` decides what to do if settings have changed.
        rewards: The run's rewards.
        args: The arguments of the new training run.

    Raises:
        ValueError: Settings have changed since training was cut off, and `train.resume` is "auto".
    """

    def __init__(self, stage: "Stage", rewards: RewardSet, args: "GRPOConfig") -> None:
        self.folder, self.max_steps = stage.run / "train", args.max_steps
        self.settings = fingerprint(stage, rewards, args)
        steps = trained_steps(self.folder)
        self.plan, self._begins = self._decide(stage.config.train.resume, steps)

    def _decide(self, resume: str, steps: int) -> tuple[str, bool]:
        """Return a description of what `begin` will do, and whether it starts training anew."""
        path = self.folder / "state.json"
        before = read_json(path) if path.is_file() else {"finished": True, "settings": {}}
        settings = before["settings"]
        changes = [n for n in settings | self.settings if settings.get(n) != self.settings.get(n)]
        longer = set(changes) <= {"grpo.max_steps"}
        complete = steps >= self.max_steps
        # If a stage was cut off after training had finished, the weights are used as they are.
        resumable = not before["finished"] or (complete and not changes)
        if steps and settings and (resume == "always" or (resume == "auto" and resumable)):
            if resume == "auto" and not longer:
                raise ValueError(
                    f"{steps} steps of this run were trained with other settings "
                    f"({', '.join(changes)}): set train.resume = 'always' to continue from them, "
                    "or 'never' to start over"
                )
            if not complete:
                return f"goes on after step {steps} of {self.max_steps}", False
            again = "train.resume = 'never' trains them again"
            return f"all {steps} steps are trained, and their adapter is handed on; {again}", False
        note = f"begins at step 1 of {self.max_steps}"
        if place := place_of_old(self.folder):
            note += f"; what was trained here before ({steps} steps) is kept as {place.name}/"
        if place and longer and not complete:
            note += f". To continue up to step {self.max_steps}: train.resume = 'always'"
        return note, True

    def begins_anew(self) -> bool:
        """Return whether training will begin at step 1, with no checkpoint to continue from."""
        return self._begins or not trained_steps(self.folder)

    def begin(self) -> str | None:
        """Make train/ ready, and return the newest whole checkpoint to continue from, or None.

        If training starts anew, earlier training is moved away, or deleted if it left no weights.
        Otherwise, what was written after the checkpoint is removed.
        """
        if self._begins:
            if place := place_of_old(self.folder):
                self.folder.rename(place)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._begins = False  # a second call continues
        self.end(finished=False)
        checkpoint = newest(self.folder)
        (self.folder / "completions").mkdir(exist_ok=True)  # TRL creates it only once
        forget_after(self.folder, step_of(checkpoint))
        return checkpoint

    def end(self, finished: bool) -> None:
        """Record whether training has finished, and with which settings."""
        write_json(self.folder / "state.json", {"finished": finished, "settings": self.settings})


def fingerprint(stage: "Stage", rewards: RewardSet, args: "GRPOConfig") -> dict[str, str]:
    """Return everything that training depends on, as text: model, arguments, rewards and rows."""
    sections = ("model.", "lora.", "policy.", "train.placebo", "train.difficulty")
    settings = flatten(stage.config).items()
    values = {name: value for name, value in settings if name.startswith(sections)}
    for field in fields(args):
        if getattr(args, field.name) != default_of(field):
            values[setting_of(field.name)] = getattr(args, field.name)
    values["the prompts held out to validate on"] = prompts_to_hold_out(stage.config.train)
    values["the rewards"] = reward_lab.fingerprint(rewards)
    rows = stage.run / "data/train.parquet"
    values["data/train.parquet"] = sha256(rows) if rows.is_file() else ""  # the caller's own rows
    may_differ = {*ARGUMENTS["may_differ"], *map(setting_of, ARGUMENTS["may_differ"])}
    return {name: str(value) for name, value in values.items() if name not in may_differ}


def save_trained(model: Any, folder: Path, **gathered: Any) -> None:
    """Save the trained weights: a model's adapter, or the whole model if it has no adapter."""
    # With beta > 0 TRL adds a frozen copy of the adapter, "ref".
    only = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **only, **gathered)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest."""
    for step in steps_of(folder)[:-keep]:
        shutil.rmtree(folder / f"checkpoint-{step}")


def trained_steps(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 if there is none."""
    return step_of(newest_checkpoint(folder))


def newest(folder: Path) -> str | None:
    """Return the newest whole checkpoint, or None; remove those that are not, and say so."""
    path = newest_checkpoint(folder)
    for step in steps_of(folder):
        if step > step_of(path):
            print(f"checkpoint-{step} cannot be read: removed, its steps are trained again")
            shutil.rmtree(folder / f"checkpoint-{step}")
    return path


def place_of_old(folder: Path) -> Path | None:
    """Return where to move the files of earlier training; None if they include no weights."""
    has_weights = any(folder.rglob("*.safetensors"))
    return _unused(folder.with_name(f"{folder.name}.old")) if has_weights else None


def _unused(path: Path) -> Path:
    """Return the first of <path>-1, <path>-2, … that does not exist."""
    places = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())
