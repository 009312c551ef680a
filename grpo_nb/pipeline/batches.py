"""Run files, and the check of a run before anything starts. A run file:

name: mine
profile: tiny-cpu
train.max_steps: 200
rewards.reward_weights: "1, 0.5, 0, 0"
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.runs import NOTEBOOKS, Run, check_stages_before, refuse_unknown, resolve_stages
from grpo_nb.runs import config as configs
from grpo_nb.runs.files import read_yaml

if TYPE_CHECKING:
    from rich.table import Table

PATHS = ("data.source", "model.model_path", "rewards.preset", "rewards.cases")


class Planned(NamedTuple):
    """A run as it was asked for; `origins` says for each setting where."""

    name: str
    profile: str
    settings: dict[str, Any]
    origins: dict[str, str]


def read_run(path: Path) -> Planned:
    """One run file; a run without a `name` is called as its file."""
    content = read_yaml(path)
    name, profile = content.pop("name", path.stem), content.pop("profile", "auto")
    for setting in content:
        configs.refuse_unknown_setting(setting)
    return Planned(
        "" if name is None else str(name), profile, content, dict.fromkeys(content, path.name)
    )


def planned_runs(
    files: Sequence[str], name: str | None, profile: str | None, assignments: Sequence[str]
) -> list[Planned]:
    """The runs of the files, or the one of the command line, whose settings come on top.

    Raises:
        ValueError: One name for several runs, or something unknown.
    """
    chosen = assigned(assignments)
    default = f"{profile or 'auto'}-{time.strftime('%Y%m%d-%H%M%S')}"
    read = [read_run(Path(file)) for file in files] or [Planned(default, "auto", {}, {})]
    plans = [
        Planned(
            plan.name if name is None else name,
            plan.profile if profile is None else profile,
            with_full_paths(plan.settings) | chosen,
            plan.origins | dict.fromkeys(chosen, "--set"),
        )
        for plan in read
    ]
    names = [plan.name for plan in plans]
    for twice in {one for one in names if names.count(one) > 1}:
        raise ValueError(f"two runs would write {Run(twice).path}: give each a name of its own")
    return plans


def check_run(
    run: Run,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    last: str = "04",
    force: bool = False,
) -> tuple[configs.RunConfig, dict[str, Any]]:
    """Everything that can be checked before anything starts; writes nothing.

    Returns:
        The configuration; and what was set, now or for these stages by an earlier call, typed.

    Raises:
        ValueError: An unknown or unfit setting, rewards that cannot be loaded, a stage missing,
            no place to write.
    """
    from grpo_nb.rewards import load_preset

    for stage in (first, last):
        refuse_unknown("stage", stage, list(NOTEBOOKS))
    if last < first:
        raise ValueError(f"--from {first} --to {last}: there is no stage between them")
    settings = settings or {}
    wanted = kept_settings(run, first) | settings if first > "01" else settings
    config = resolve_stages(run, wanted, first, last, profile)
    _refuse_unknown_trl(config)
    load_preset(config.rewards.preset, config.rewards.reward_weights)
    if not force:
        check_stages_before(run, first)
    typed = {name: configs.flatten(config)[name] for name in wanted}
    for name in [one for one in settings if configs.stage_of(one) < first]:
        if typed.pop(name) != configs.flatten(run.config()).get(name):
            raise ValueError(
                f"{name} belongs to stage {configs.stage_of(name)}, which --from {first} "
                f"does not run: use --from {configs.stage_of(name)}"
            )
    refuse_read_only(run.path)
    return config, typed


def _refuse_unknown_trl(config: configs.RunConfig) -> None:
    """Here TRL may be imported: kernels, which import Unsloth first, are processes of their own."""
    if config.trl:
        from grpo_nb.training import refuse_unknown_trl

        refuse_unknown_trl(config)


def kept_settings(run: Run, first: str) -> dict[str, Any]:
    """What was set by earlier calls for the stages from `first` on, so that it is not lost."""
    kept = {k: v for k, v in run.settings().items() if configs.stage_of(k) >= first}
    kept.pop("train.resume", None)  # it was meant for one training
    return kept


def undone(run: Run) -> list[str]:
    """The stages that are not done, or not with what those before them have written since."""
    return [stage for stage in NOTEBOOKS if run.status(stage) != "done"]


def refuse_read_only(folder: Path) -> None:
    """Raise ValueError where `folder` could not be made or written to."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"{folder} cannot be written: {there} is "
            f"{'read-only' if there.is_dir() else 'no folder'}; point GRPO_NB_RUNS at a folder "
            "that can"
        )


def assigned(assignments: Sequence[str]) -> dict[str, Any]:
    """What `--set` gives, ["train.max_steps=20"], as settings."""
    return with_full_paths(dict(map(configs.parse_assignment, assignments)))


def with_full_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Files and folders that exist below the working directory, by their whole path."""
    there = {k for k in PATHS if settings.get(k) and Path(str(settings[k])).exists()}
    return {k: str(Path(v).resolve()) if k in there else v for k, v in settings.items()}


def plan_table(
    name: str, config: configs.RunConfig, origins: Mapping[str, str], first: str, last: str
) -> "Table":
    """Which stages would run, and every setting that is not the default, with its source."""
    from rich.table import Table

    stages = ", ".join(name for stage, name in NOTEBOOKS.items() if first <= stage <= last)
    table = Table(title=f"{Run(name).path}: {stages}", title_justify="left")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    table.add_row("profile", config.profile, "")
    sources = config.sources | origins
    for setting, value in configs.flatten(config).items():
        source = sources[setting].replace("set here", "settings.json")
        if source != "default":
            table.add_row(setting, str(value), source)
    return table
