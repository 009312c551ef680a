"""Checkpoints that are whole or not there, and how a training goes on from one.

A checkpoint is a folder train/checkpoint-<step>, as transformers writes it. When all of it is
there, `seal` writes sealed.json, the SHA-256 of each file; what is not sealed does not count, and
what differs from its seal is set aside.
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
        steps = trained_steps(self.folder)
        self.plan, self._begins = self._decide(stage.config.train.resume, steps)
        self.plan += damage_after(steps, self.folder)

    def _decide(self, resume: str, steps: int) -> tuple[str, bool]:
        """What `begin` will do, in words, and whether it makes room for another training."""
        path = self.folder / "state.json"
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

    def begins_anew(self) -> bool:
        """Return whether `begin` will return no checkpoint."""
        return self._begins or not trained_steps(self.folder)

    def begin(self) -> Path | None:
        """Make room, or forget what came after the newest whole checkpoint; return that."""
        if self._begins:
            if place := place_of_old(self.folder):
                self.folder.rename(place)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._begins = False  # run again, it goes on
        self.end(finished=False)
        checkpoint = newest(self.folder)
        whole_or_aside(self.folder / "best")
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


def seal(folder: Path) -> None:
    """Record that a folder is complete, with the SHA-256 of each of its files."""
    write_json(folder / SEAL, _digests(folder))


def remove_old(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest."""
    for old in steps_of(folder)[:-keep]:
        shutil.rmtree(folder / f"checkpoint-{old}")


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SEAL]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def is_whole(folder: Path) -> bool:
    """Return whether every file is there, with the bytes it had when the folder was sealed."""
    try:
        return read_json(folder / SEAL) == _digests(folder)
    except (OSError, ValueError):
        return False


def whole_or_aside(folder: Path) -> bool:
    """Return whether the folder is whole; rename it if it is damaged, and say so."""
    if is_whole(folder):
        return True
    if folder.is_dir():
        place = _unused(folder.with_name(f"damaged-{folder.name}"))
        folder.rename(place)
        print(f"{folder.name} differs from what was written: it is kept as {place}, and not used")
    return False


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, oldest first; a copy under another name is none."""
    names = [path.name.partition("-")[2] for path in folder.glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def trained_steps(folder: Path) -> int:
    """Return the last step that a whole checkpoint holds; 0 without one."""
    newest_first = reversed(steps_of(folder))
    return next((step for step in newest_first if is_whole(folder / f"checkpoint-{step}")), 0)


def damage_after(steps: int, folder: Path) -> str:
    """Name the newer checkpoints that `newest` will set aside, for the plan; "" without any."""
    newer = [f"checkpoint-{step}" for step in steps_of(folder) if step > steps]
    names = " and ".join(name for name in newer if (folder / name / SEAL).exists())
    return f"; {names}: not as written, and will not be used" if names else ""


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None; newer ones go, and it is said where."""
    for step in reversed(steps_of(folder)):
        checkpoint = folder / f"checkpoint-{step}"
        if not (checkpoint / SEAL).exists():
            print(f"{checkpoint.name} is half written: removed, its steps are trained again")
            shutil.rmtree(checkpoint)
        elif whole_or_aside(checkpoint):
            return checkpoint
    return None


def place_of_old(folder: Path) -> Path | None:
    """Return where what was trained goes when another training begins; None without weights."""
    has_weights = any(folder.rglob("*.safetensors"))
    return _unused(folder.with_name(f"{folder.name}.old")) if has_weights else None


def _unused(path: Path) -> Path:
    """Return the first of <path>-1, <path>-2, … that does not exist."""
    places = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())
