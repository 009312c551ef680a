"""Checkpoints that are whole or not there, and how a training goes on from one.

A checkpoint is a folder train/checkpoint-<step>, as transformers writes it. When all of it is
there, `seal` writes sealed.json, the size of each file; what is not sealed does not count.
"""

import itertools
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import reward_lab
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.combine import Adaptive
from grpo_nb.runs import Stage, sha256, write_json
from grpo_nb.runs.files import read_json
from grpo_nb.training.arguments import default_of, setting_of
from grpo_nb.training.metrics import forget_after
from grpo_nb.training.validation import prompts_to_hold_out

if TYPE_CHECKING:
    from trl import GRPOConfig

SEAL = "sealed.json"
GOES_ON = "run this again, and it goes on from there"
# Arguments that may differ between a training and its resumption: of the machine, of what is
# shown, or how the same step is cut.
MAY_DIFFER = (
    *("output_dir", "run_name", "report_to", "disable_tqdm", "use_cpu", "local_rank", "project"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    *("logging_dir", "per_device_eval_batch_size", "ddp_timeout"),
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "deepspeed", "fsdp", "fsdp_config"),
    *("accelerator_config", "parallelism_config", "ddp_find_unused_parameters", "hub_token"),
    *("policy.gpu_memory_utilization", "policy.standby"),
)


class Resumption:
    """Whether a training begins or goes on with what the run's train/ holds.

    Args:
        stage: Stage 03; its `train.resume` decides where settings have changed.
        rewards: The run's set.
        args: Of the training that is asked for.

    Raises:
        ValueError: It was cut off with other settings, and `train.resume` is "auto".
    """

    def __init__(self, stage: Stage, rewards: RewardSet, args: "GRPOConfig") -> None:
        self.folder, self.max_steps = stage.run / "train", args.max_steps
        self.settings = fingerprint(stage, rewards, args)
        self.plan, self._begins = self._decide(stage.config.train.resume)

    def _decide(self, resume: str) -> tuple[str, bool]:
        """What `begin` will do, in words, and whether it makes room for another training."""
        path, steps = self.folder / "state.json", trained_steps(self.folder)
        known = read_json(path) if path.is_file() else {"finished": True, "settings": {}}
        names = {**known["settings"], **self.settings}
        changed = [n for n in names if known["settings"].get(n) != self.settings.get(n)]
        longer = set(changed) <= {"train.max_steps"}
        complete = steps >= self.max_steps
        # A finished one is handed on; its stage may not be finished, and asks again.
        wanted = not known["finished"] or (complete and not changed)
        if steps and known["settings"] and (resume == "always" or (resume == "auto" and wanted)):
            if resume == "auto" and not longer:
                raise ValueError(
                    f"{steps} steps of this run were trained with other settings "
                    f"({', '.join(changed)}): set train.resume = 'always' to go on from them, or "
                    "'never' to begin again"
                )
            if not complete:
                return f"goes on after step {steps} of {self.max_steps}", False
            again = "train.resume = 'never' trains them again"
            return f"all {steps} steps are trained, and their adapter is handed on; {again}", False
        note = f"begins at step 1 of {self.max_steps}"
        if place := place_of_old(self.folder):
            note += f"; what was trained here before ({steps} steps) is kept as {place.name}/"
        if place and longer and not complete:
            note += f". To train it on to {self.max_steps} steps: train.resume = 'always'"
        return note, True

    def begin(self) -> Path | None:
        """Make room, or forget what came after the newest whole checkpoint; return that."""
        if self._begins:
            if place := place_of_old(self.folder):
                self.folder.rename(place)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._begins = False  # run again, it goes on
        self.end(finished=False)
        checkpoint = newest(self.folder)
        (self.folder / "completions").mkdir(exist_ok=True)  # TRL makes it once
        forget_after(self.folder, step_of(checkpoint))
        return checkpoint

    def end(self, finished: bool) -> None:
        write_json(self.folder / "state.json", {"finished": finished, "settings": self.settings})


def fingerprint(stage: Stage, rewards: RewardSet, args: "GRPOConfig") -> dict[str, str]:
    """What a training depends on, as text: model, arguments, rewards and rows."""
    config = stage.config
    sections = {"model": config.model, "policy": config.policy}
    known = {f"{k}.{name}": v for k, of in sections.items() for name, v in of.model_dump().items()}
    known = {name: value for name, value in known.items() if name not in MAY_DIFFER}
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name not in MAY_DIFFER and value != default_of(field):
            known[setting_of(field.name)] = value
    known["train.max_steps"] = args.max_steps
    if config.train.control != "none":
        known["train.control"] = config.train.control
    known["the prompts held out to validate on"] = prompts_to_hold_out(config.train)
    known["the rewards"] = reward_lab.fingerprint(rewards, reward_lab.keeps_values(stage.run))
    rows = stage.run / "data/train.parquet"
    known["data/train.parquet"] = sha256(rows) if rows.is_file() else ""  # rows of a caller's own
    return {name: str(value) for name, value in known.items()}


def save_trained(model: Any, folder: Path, **gathered: Any) -> None:
    """Save what was trained of a model: its adapter, or all of it."""
    # With beta > 0 TRL adds a frozen copy beside it, "ref".
    only = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **only, **gathered)


def adaptive_rewards(rewards: RewardSet) -> list[Adaptive]:
    """Those whose weight changes as training goes on: a checkpoint holds their state."""
    return [reward for reward in rewards.reward_funcs if isinstance(reward, Adaptive)]


def seal(checkpoint: Path, keep: int) -> None:
    """Say that a checkpoint is whole, and remove all but the newest."""
    write_json(checkpoint / SEAL, _sizes(checkpoint))
    for old in steps_of(checkpoint.parent)[:-keep]:
        shutil.rmtree(checkpoint.parent / f"checkpoint-{old}")


def _sizes(checkpoint: Path) -> dict[str, int]:
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != SEAL]
    return {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}


def is_whole(checkpoint: Path) -> bool:
    """Whether every file is there, in the size it had when the checkpoint was sealed."""
    try:
        return read_json(checkpoint / SEAL) == _sizes(checkpoint)
    except (FileNotFoundError, ValueError):
        return False


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints, oldest first; a copy under another name is none."""
    names = [path.name.partition("-")[2] for path in folder.glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def trained_steps(folder: Path) -> int:
    """The last step that a whole checkpoint holds; 0 without one."""
    whole = [step for step in steps_of(folder) if is_whole(folder / f"checkpoint-{step}")]
    return max(whole, default=0)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None; removes newer ones that are not, and says so."""
    steps = trained_steps(folder)
    for step in steps_of(folder):
        if step > steps:
            name = f"checkpoint-{step}"
            print(f"{name} is damaged or half written: removed, it is trained again")
            shutil.rmtree(folder / name)
    return folder / f"checkpoint-{steps}" if steps else None


def place_of_old(folder: Path) -> Path | None:
    """Where what was trained goes when another training begins; None: no weights are there."""
    if not any(folder.rglob("*.safetensors")):
        return None
    places = (folder.with_name(f"{folder.name}.old-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())
