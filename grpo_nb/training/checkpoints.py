"""Checkpoints that are whole or not there: written aside, sealed, renamed, and checked on return.

A checkpoint is a folder `checkpoint-<step>` of a stage, as transformers' Trainer writes it,
with `sealed.json`: size and sha256 of each file.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_nb.rewards.combine import Adaptive
from grpo_nb.runs import sha256, write_json
from grpo_nb.training import ranks
from grpo_nb.training.metrics import stage_folders

SEAL = "sealed.json"
ASIDE = ".saving"


class Sealed:
    """Of a Trainer: checkpoints appear complete under their name, and the last k are kept."""

    keep_checkpoints: int
    _aside: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside or super()._get_output_dir(trial))  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        self._aside = folder / ASIDE
        ranks.from_main(lambda: shutil.rmtree(self._aside, ignore_errors=True))
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            ranks.from_main(lambda: self._seal_and_rename(self._aside / name, folder / name))
        except Exception as error:  # safetensors and torch have errors of their own for a full disk
            raise OSError(
                f"checkpoint-{self.state.global_step} could not be written "
                f"({type(error).__name__}: {error}); {_free(folder)}. Earlier checkpoints are as "
                "they were: make room, run this again, and training goes on from the newest"
            ) from error
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside = None

    def _seal_and_rename(self, written: Path, target: Path) -> None:
        for reward in adaptive_rewards(self.reward_funcs):
            reward.save(written)
        seal(written)
        shutil.rmtree(target, ignore_errors=True)
        written.replace(target)
        for old in steps_of(target.parent)[: -self.keep_checkpoints]:
            shutil.rmtree(target.parent / f"checkpoint-{old}")


def adaptive_rewards(rewards: Any) -> list[Adaptive]:
    return [reward for reward in rewards if isinstance(reward, Adaptive)]


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there"


def steps_of(folder: Path) -> list[int]:
    """The steps of a stage's checkpoints, oldest first."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def seal(checkpoint: Path) -> None:
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    known = {str(path.relative_to(checkpoint)): _identity(path) for path in files}
    write_json(checkpoint / SEAL, known)


def _identity(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint; "" for a whole one."""
    if not (checkpoint / SEAL).is_file():
        return f"it has no {SEAL}"
    try:
        known = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
    except ValueError:
        return f"its {SEAL} cannot be read"
    for name, identity in known.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != identity["bytes"]:
            return f"{name} has {path.stat().st_size} bytes of {identity['bytes']}"
        if sha256(path) != identity["sha256"]:
            return f"{name} has changed"
    return ""


def newest(folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint of a stage, or None; says which damaged ones it passed over."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    for step in reversed(steps_of(folder)):
        checkpoint = folder / f"checkpoint-{step}"
        if not (wrong := damage(checkpoint)):
            return checkpoint
        say(f"{checkpoint.name} is damaged ({wrong}): passed over")
        shutil.rmtree(checkpoint)
    return None


def aside(folder: Path) -> Path | None:
    """Where the weights below a folder go when another training begins there; None: none are."""
    if not any(folder.rglob("*.safetensors")):
        return None
    places = (folder.with_name(f"{folder.name}.old-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())


def clear(folder: Path) -> None:
    """Make room for another training; what was trained is kept `aside`."""
    if place := aside(folder):
        folder.rename(place)
    shutil.rmtree(folder, ignore_errors=True)


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def trained_steps(folder: Path) -> int:
    """The last step that a checkpoint or a finished stage holds."""
    total = 0
    for stage in stage_folders(folder):
        if (stage / "stage.json").is_file():
            total += json.loads((stage / "stage.json").read_text(encoding="utf-8"))["steps"]
        elif steps := steps_of(stage):
            total += steps[-1]
    return total
