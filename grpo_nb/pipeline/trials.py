"""The trials of a sweep file: a grid, a list or random draws of any settings.

name: rates
settings: {train.max_steps: 100}
grid: {train.learning_rate: [1e-3, 3e-4]}
seeds: [0, 1, 2]
retries: 1

In place of `grid`: `list: [{train.beta: 0.01}, …]`, or `random: {train.learning_rate: {low:
1e-5, high: 1e-3, log: true}, train.loss_type: [dapo, grpo]}` with `draws: 20`.
"""

import math
import random
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.pipeline.notebooks import check_run, with_full_paths
from grpo_nb.runs import Run, refuse_unknown
from grpo_nb.runs import config as configs
from grpo_nb.runs.files import read_yaml
from grpo_nb.runs.profiles import detect_profile

if TYPE_CHECKING:
    from rich.table import Table

MOST_DRAWS = 10_000
KINDS = ("grid", "list", "random")
KEYS = ("name", "profile", "settings", *KINDS, "draws", "seed", "seeds", "retries")


class Trial(NamedTuple):
    """One run of a sweep: `swept` is what sets it apart, `settings` all that is set, typed."""

    name: str
    swept: dict[str, Any]
    settings: dict[str, Any]


class Sweep(NamedTuple):
    """A sweep file, checked; `retries` is how often a trial that failed is tried again."""

    name: str
    profile: str
    trials: list[Trial]
    retries: int


def read_sweep(path: Path, elsewhere: bool = False) -> Sweep:
    """The sweep of a file, each trial checked as `grpo-nb run` would.

    Args:
        path: A YAML file.
        elsewhere: Its trials run on other machines, so that this one's GPU says nothing.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not YAML, an unknown key or setting, nothing to vary, two equal trials.
    """
    content = read_yaml(path)
    for key in content:
        refuse_unknown("key of a sweep", key, list(KEYS))
    name, shared = content.get("name", path.stem) or "", content.get("settings") or {}
    profile = content.get("profile", "auto")
    if elsewhere and profile == "auto":
        raise ValueError(f"{path}: name the cluster's profile; auto would look at this machine")
    profile = detect_profile() if profile == "auto" else profile
    if not isinstance(shared, dict):
        raise ValueError(f"{path}: settings: write `setting: value` pairs")
    trials: list[Trial] = []
    for number, swept in enumerate(_points(path, content)):
        for twice in swept.keys() & shared.keys():
            raise ValueError(f"{path}: {twice} is varied, and set in settings: leave one out")
        if swept in [trial.swept for trial in trials]:
            raise ValueError(f"{path}: two trials are the same run: {words(swept)}")
        run = Run(f"{name}-{number:03}")
        _, settings = check_run(run, profile, with_full_paths(shared | swept))
        trials.append(Trial(run.name, swept, settings))
    return Sweep(str(name), profile, trials, _count(path, content, "retries", 1, least=0))


def _points(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each trial varies, in order; seeds last, so that they vary fastest."""
    kinds = [kind for kind in KINDS if kind in content]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none of them"
        raise ValueError(f"{path}: a sweep has one of grid, list and random; found {found}")
    kind, space = kinds[0], content[kinds[0]]
    if not isinstance(space, list if kind == "list" else dict) or not space:
        raise ValueError(f"{path}: {kind} is empty: nothing to vary")
    points = space
    if kind == "grid":
        for name, values in space.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"{path}: grid: {name}: write a list of values; it has {values!r}")
        points = [dict(zip(space, values, strict=True)) for values in product(*space.values())]
    elif kind == "random":
        points = _draws(path, space, content)
    if not all(isinstance(point, dict) for point in points):
        raise ValueError(f"{path}: list: write {{setting: value, …}} for each trial")
    for setting in {name for point in points for name in point}:
        configs.refuse_unknown_setting(setting)
    seeds = content.get("seeds", [None])
    if not isinstance(seeds, list) or not seeds:
        raise ValueError(f"{path}: seeds = {seeds!r}: write a list, such as [0, 1, 2]")
    if "seeds" in content and any("seed" in point for point in points):
        raise ValueError(f"{path}: seed is varied, and in seeds: leave one out")
    by_seed = [{} if seed is None else {"seed": seed} for seed in seeds]
    return [point | seed for point, seed in product(points, by_seed)]


def _draws(
    path: Path, space: Mapping[str, Any], content: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Different points; more `draws` add to the same first ones."""
    count = _count(path, content, "draws", 20, least=1)
    if count > MOST_DRAWS:
        raise ValueError(f"{path}: draws = {count}: write at most {MOST_DRAWS}")
    rng, drawn = random.Random(_count(path, content, "seed", 0, least=0)), []
    for _ in range(100 * count):
        point = {name: _draw(rng, f"{path}: random: {name}", s) for name, s in space.items()}
        if point not in drawn:
            drawn.append(point)
        if len(drawn) == count:
            return drawn
    raise ValueError(f"{path}: random has {len(drawn)} different points; lower draws = {count}")


def _draw(rng: random.Random, where: str, space: Any) -> Any:
    """One value: of a list, or between low and high, rounded to three digits."""
    if isinstance(space, list) and space:
        return rng.choice(space)
    match space:
        case {"low": int() | float() as low, "high": int() | float() as high, **more} if (
            low < high and more.keys() <= {"log"}
        ):
            log = more.get("log", False)
        case _:
            raise ValueError(
                f"{where}: write a list of values, or {{low: 1e-5, high: 1e-3, log: true}}"
            )
    if log and low <= 0:
        raise ValueError(f"{where}: log needs low > 0; it is {low}")
    value = math.exp(rng.uniform(math.log(low), math.log(high))) if log else rng.uniform(low, high)
    whole = isinstance(low, int) and isinstance(high, int)
    return round(value) if whole else float(f"{value:.3g}")


def _count(path: Path, content: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = content.get(key, default)
    if type(value) is not int or value < least:
        raise ValueError(f"{path}: {key} = {value!r}: write a whole number from {least} on")
    return value


def words(swept: Mapping[str, Any]) -> str:
    """What sets a trial apart, for a line of a table."""
    return ", ".join(f"{name} = {value}" for name, value in swept.items())


def trial_table(sweep: Sweep) -> "Table":
    """A line for each trial, with what sets it apart."""
    from rich.table import Table

    title = f"sweep {sweep.name}: {len(sweep.trials)} trials, {sweep.profile}"
    table = Table("run", "settings", title=title, title_justify="left")
    for trial in sweep.trials:
        table.add_row(trial.name, words(trial.swept))
    return table
