"""Keep a run's folder train/: decide where training goes on, and read its completions.

Training goes on from its newest whole checkpoint if nothing on which the weights depend has
changed; only `grpo.max_steps` may be larger. Otherwise training begins anew, and the earlier
training is kept as train.old-1/.
"""

import itertools
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import reward_lab
from grpo_nb.files import read_json, sha256, write_json
from grpo_nb.reward_lab.table import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import message_text, transcript
from grpo_nb.runs.config import ARGUMENTS, flatten
from grpo_nb.stages.arguments import default_of, setting_of
from grpo_nb.stages.validation import prompts_to_hold_out
from grpo_nb.training import logs
from grpo_nb.training.interruptions import newest_checkpoint, step_of, steps_of

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_nb.runs import Run, Stage

SHUFFLED = "a placebo: these scores are shuffled within each group, and not what each text earned"


def plan(folder: Path, settings: dict[str, str], max_steps: int) -> tuple[str, bool]:
    """Return a sentence on what training will do, and whether training goes on from a checkpoint.

    Args:
        folder: The run's train/.
        settings: The `fingerprint` of the training.
        max_steps: The number of steps of the training.
    """
    steps, path = trained_steps(folder), folder / "state.json"
    before = read_json(path)["settings"] if path.is_file() else {}
    changes = [n for n in before | settings if before.get(n) != settings.get(n)]
    if steps and (not changes or (changes == ["grpo.max_steps"] and steps < max_steps)):
        if steps < max_steps:
            return f"goes on after step {steps} of {max_steps}", True
        return f"all {steps} steps are trained: to train them again, remove {folder}", True
    note = f"begins at step 1 of {max_steps}"
    if place := place_of_old(folder):
        others = f", with other {', '.join(changes)}" if before and changes else ""
        note += f"; what was trained here before ({steps} steps{others}) is kept as {place.name}/"
    return note, False


def begin(folder: Path, settings: dict[str, str], goes_on: bool) -> str | None:
    """Make train/ ready, and return the newest whole checkpoint to continue from, or None.

    If training begins anew, earlier training is moved away, or deleted if it left no weights.
    Damaged checkpoints are removed.
    """
    if not goes_on:
        if place := place_of_old(folder):
            folder.rename(place)
        shutil.rmtree(folder, ignore_errors=True)
    write_json(folder / "state.json", {"settings": settings})
    (folder / "completions").mkdir(exist_ok=True)  # TRL creates it only once
    path = newest_checkpoint(folder)
    for step in [step for step in steps_of(folder) if step > step_of(path)]:
        print(f"checkpoint-{step} cannot be read: removed, its steps are trained again")
        shutil.rmtree(folder / f"checkpoint-{step}")
    return path


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


def trained_steps(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 if there is none."""
    return step_of(newest_checkpoint(folder))


def place_of_old(folder: Path) -> Path | None:
    """Return where to move the files of earlier training; None if they include no weights."""
    if not any(folder.rglob("*.safetensors")):
        return None
    places = (folder.with_name(f"{folder.name}.old-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())


def read_completions(run: "Run", preset: RewardSet) -> pd.DataFrame:
    """Return every completion of a training run, as a table.

    Args:
        run: A trained run.
        preset: The run's rewards; its `correct_func` decides what is correct.

    Returns:
        The columns step, question, reference, completion, each reward, advantage and correct. If a
        placebo shuffled the rewards, a sentence about this is printed.
    """
    table = logs.read_completions(run / "train")
    table["question"] = [message_text(prompt[-1]) for prompt in table["prompt"]]
    table["completion"] = list(map(transcript, table["completion"]))
    texts = ["step", "question", "reference", "completion"]
    table = table.reindex(columns=[*texts, *preset.names, "advantage"])
    table["correct"] = passed(table, preset)
    if run.config().train.placebo == "shuffled":
        print(SHUFFLED)
    return table
