"""`python -m grpo_nb run --name mine --control shuffled`: the same training, paid otherwise.

`mine-shuffled` takes over what stages 01 and 02 of `mine` wrote, and runs 03 and 04 with the
settings of `mine` and `train.control`: the same data, prompts and baseline rollouts, nothing of
which is made again. `evaluation.controls` compares the two.
"""

import shutil
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from grpo_nb.evaluation.controls import CONTROLS
from grpo_nb.pipeline import notebooks
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import NOTEBOOKS, Run, check_stages_before, refuse_unknown, write_json
from grpo_nb.runs import config as configs
from grpo_nb.training.placebo import paid_weights

TAKEN_OVER = ("01", "02")


def run_control(name: str, kind: str, force: bool = False, console: Console | None = None) -> Run:
    """Train and evaluate a control of a run. One that was interrupted goes on.

    Args:
        name: Of the run, which is trained and evaluated.
        kind: A name in CONTROLS.
        force: Start stages although a check fails, where the run's own were forced.
        console: Where is said how far it is; None: nowhere.

    Returns:
        The run NAME-KIND. What of it is done already is not done again.

    Raises:
        ValueError: Before anything starts, as of `check_control`.
        StageFailed: As of `notebooks.run_pipeline`; Stopped and RuntimeError too.
    """
    run, control, config = check_control(name, kind)
    if not control.manifest():
        take_over(run, control, config)
    if left := notebooks.undone(control):
        settings = _settings_of(config)
        notebooks.run_pipeline(
            control.name, config.profile, settings, left[0], force=force, console=console
        )
    return control


def check_control(name: str, kind: str) -> tuple[Run, Run, configs.RunConfig]:
    """The run, its control, and with which settings that is trained; writes nothing.

    Raises:
        ValueError: No such control; a run that is not done, has changed since, or is a control
            itself; rewards that this control cannot be made of; or a run of the control's name that
            is none of this run as it is now.
    """
    refuse_unknown("control", kind, list(CONTROLS))
    run, control = Run(name), Run(f"{name}-{kind}")
    if left := notebooks.undone(run):
        raise ValueError(
            f"a control needs a run that is trained and evaluated, and {NOTEBOOKS[left[0]]} of "
            f"{name!r} is {run.status(left[0])}: python -m grpo_nb run --name {name} "
            f"--from {left[0]}"
        )
    if (own := run.config().train.control) != "none":
        raise ValueError(f"{name!r} is itself a control, {own}: name the run that it stands beside")
    check_stages_before(run, "05")
    known = configs.flatten(run.config())
    known.pop("train.resume")  # it was meant for one training
    config = configs.resolve(run.config().profile, known, {"train.control": kind})
    paid_weights(load_rewards(config.rewards), kind)
    if control.manifest() and not _is_of(run, control, config):
        raise ValueError(
            f"{control.path} exists already, and is no control of {name!r} as it is now: move it "
            "away, and give the same command again"
        )
    return run, control, config


def _is_of(run: Run, control: Run, config: configs.RunConfig) -> bool:
    """Whether it took these stages over, and has these settings."""
    same = all(
        control.manifest().get(stage, {}).get("outputs") == run.manifest()[stage]["outputs"]
        for stage in TAKEN_OVER
    )
    return same and _trained_by(control.config()) == _trained_by(config)


def _trained_by(config: configs.RunConfig) -> Mapping[str, Any]:
    return {k: v for k, v in configs.flatten(config).items() if configs.stage_of(k) < "04"}


def _settings_of(config: configs.RunConfig) -> dict[str, Any]:
    """What of stages 03 and 04 was set, over what profile and task say."""
    known = configs.flatten(config)
    before = {name: v for name, v in known.items() if configs.stage_of(name) < "03"}
    unset = configs.flatten(configs.resolve(config.profile, before))
    return {name: value for name, value in known.items() if value != unset.get(name)}


def take_over(run: Run, control: Run, config: configs.RunConfig) -> None:
    """Copy what stages 01 and 02 wrote, and last their entries of the manifest."""
    entries = {stage: run.manifest()[stage] for stage in TAKEN_OVER}
    for relative in (path for entry in entries.values() for path in entry["outputs"]):
        (control / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(run / relative, control / relative)
    control.write_config(config)
    entries["02"] |= {"config": configs.stored(config)}
    write_json(control / "manifest.json", entries)
