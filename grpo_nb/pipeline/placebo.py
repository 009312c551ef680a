"""`python -m grpo_nb run --name mine --placebo shuffled`: the same training, rewarded differently.

`mine-shuffled` takes over the data, the tested rewards and the baseline rollouts of `mine` (stages
01 and 02), and runs stages 03 and 04 with the settings of `mine` and `train.placebo`.
`caused` compares the two runs.
"""

import shutil

from grpo_nb.files import write_json
from grpo_nb.names import refuse_unknown
from grpo_nb.pipeline import notebooks
from grpo_nb.pipeline.caused import PLACEBOS
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import Run, refuse_undone
from grpo_nb.runs import config as configs
from grpo_nb.training.placebo import paid_weights

TAKEN_OVER = ("01", "02")


def run_placebo(name: str, kind: str, force: bool = False) -> Run:
    """Train and evaluate a placebo of a run, or continue an interrupted placebo.

    Args:
        name: The name of a trained and evaluated run.
        kind: A name in PLACEBOS.
        force: Whether to start the stages even if a check fails, for a run that was itself forced.

    Returns:
        The run NAME-KIND. Stages that are done with the run's data and settings are not run again.

    Raises:
        ValueError: Before anything starts, from `resolve_placebo`.
        StageFailed, Stopped, RuntimeError: From `notebooks.run_pipeline`.
    """
    run, placebo, config = resolve_placebo(name, kind)
    take_over(run, placebo, config)
    if stage := placebo.undone():
        notebooks.run_pipeline(placebo.name, first=stage, force=force)
    return placebo


def resolve_placebo(name: str, kind: str) -> tuple[Run, Run, configs.RunConfig]:
    """Return the run, its placebo, and the configuration of the placebo; write nothing.

    Raises:
        ValueError: There is no such kind of placebo; the run is not done, has changed since, or
            is a placebo itself; its rewards do not allow this kind; or another run has the
            placebo's name.
    """
    refuse_unknown("placebo", kind, list(PLACEBOS))
    run, placebo = Run(name), Run(f"{name}-{kind}")
    if stage := run.undone():
        raise ValueError(
            f"a placebo needs a run that is trained and evaluated, but {run.why_undone()}: "
            f"{run.state(stage).command}"
        )
    if (own_kind := run.config().train.placebo) != "none":
        raise ValueError(
            f"{name!r} is itself a placebo, {own_kind}: name the run that it was made for"
        )
    refuse_undone(run, "05")
    stored = configs.stored(run.config())
    stored.pop("train.resume")  # it applies to one training run only
    config = configs.resolve(run.config().profile, {"train.placebo": kind}, stored=stored)
    paid_weights(load_rewards(config.rewards), kind)
    if placebo.manifest() and placebo.config().train.placebo != kind:
        raise ValueError(f"{placebo.path} exists and is not a {kind!r} placebo: rename or move it")
    return run, placebo, config


def take_over(run: Run, placebo: Run, config: configs.RunConfig) -> None:
    """Copy the files that stages 01 and 02 wrote, then their entries in the manifest."""
    entries = {stage: run.manifest()[stage] for stage in TAKEN_OVER}
    for relative in (path for entry in entries.values() for path in entry["outputs"]):
        (placebo / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(run / relative, placebo / relative)
    placebo.write_config(config)
    write_json(placebo / "manifest.json", placebo.manifest() | entries)
