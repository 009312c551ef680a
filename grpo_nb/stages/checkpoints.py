"""Mark checkpoints that are complete, and resume training only from such a checkpoint.

transformers writes a checkpoint to the folder train/checkpoint-<step>. When it is complete, `seal`
adds sealed.json, with the SHA-256 of each file. A folder without sealed.json does not count. One
whose files differ from sealed.json is renamed and not used.
"""

import itertools
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import reward_lab
from grpo_nb.files import digests, read_json, sha256, write_json
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.combine import Adaptive
from grpo_nb.stages.arguments import ARGUMENTS, default_of, setting_of
from grpo_nb.stages.validation import prompts_to_hold_out
from grpo_nb.training.metrics import forget_after

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_nb.runs import Stage

SEAL = "sealed.json"
GOES_ON = "run this again to continue from there"


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

    def begin(self) -> Path | None:
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
    config, values = stage.config, {}
    for section in ("model", "lora", "policy"):
        settings = getattr(config, section).model_dump()
        values |= {f"{section}.{name}": value for name, value in settings.items()}
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name not in ARGUMENTS["may_differ"] and value != default_of(field):
            values[setting_of(field.name)] = value
    values["grpo.max_steps"] = args.max_steps
    if config.train.placebo != "none":
        values["train.placebo"] = config.train.placebo
    if config.train.difficulty:
        values["train.difficulty"] = True
    values["the prompts held out to validate on"] = prompts_to_hold_out(config.train)
    values["the rewards"] = reward_lab.fingerprint(rewards)
    rows = stage.run / "data/train.parquet"
    values["data/train.parquet"] = sha256(rows) if rows.is_file() else ""  # the caller's own rows
    return {n: str(value) for n, value in values.items() if n not in ARGUMENTS["may_differ"]}


def save_trained(model: Any, folder: Path, **gathered: Any) -> None:
    """Save the trained weights: a model's adapter, or the whole model if it has no adapter."""
    # With beta > 0 TRL adds a frozen copy of the adapter, "ref".
    only = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **only, **gathered)


def adaptive_rewards(rewards: RewardSet) -> list[Adaptive]:
    """Return the rewards whose weights change in training; checkpoints include their state."""
    return [reward for reward in rewards.reward_funcs if isinstance(reward, Adaptive)]


def seal(folder: Path) -> None:
    """Record that a folder is complete, with the SHA-256 of each of its files."""
    write_json(folder / SEAL, _digests(folder))


def remove_old(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest."""
    for step in steps_of(folder)[:-keep]:
        shutil.rmtree(folder / f"checkpoint-{step}")


def _digests(folder: Path) -> dict[str, str]:
    return {name: value for name, value in digests(folder).items() if name != SEAL}


def is_whole(folder: Path) -> bool:
    """Return whether the folder's files are exactly those that were sealed."""
    try:
        return read_json(folder / SEAL) == _digests(folder)
    except (OSError, ValueError):
        return False


def whole_or_aside(folder: Path) -> bool:
    """Return whether the folder is whole; rename a damaged folder, and print its new path."""
    if is_whole(folder):
        return True
    if folder.is_dir():
        place = _unused(folder.with_name(f"damaged-{folder.name}"))
        folder.rename(place)
        print(f"{folder.name} differs from what was written: it is kept as {place}, and not used")
    return False


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, oldest first; copies under other names do not count."""
    names = [path.name.partition("-")[2] for path in folder.glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def step_of(checkpoint: Path | None) -> int:
    """Return the step of a checkpoint; 0 for None."""
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def trained_steps(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 if there is none."""
    newest_first = reversed(steps_of(folder))
    return next((step for step in newest_first if is_whole(folder / f"checkpoint-{step}")), 0)


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None; remove or rename broken ones, and say so."""
    for step in reversed(steps_of(folder)):
        checkpoint = folder / f"checkpoint-{step}"
        if not (checkpoint / SEAL).exists():
            print(f"{checkpoint.name} is half written: removed, its steps are trained again")
            shutil.rmtree(checkpoint)
        elif whole_or_aside(checkpoint):
            return checkpoint
    return None


def place_of_old(folder: Path) -> Path | None:
    """Return where to move the files of earlier training; None if they include no weights."""
    has_weights = any(folder.rglob("*.safetensors"))
    return _unused(folder.with_name(f"{folder.name}.old")) if has_weights else None


def _unused(path: Path) -> Path:
    """Return the first of <path>-1, <path>-2, … that does not exist."""
    places = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())
