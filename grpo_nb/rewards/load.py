"""Load a run's rewards: a preset by name, or those of a Python file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_nb import rewards
from grpo_nb.rewards.file import load_source, read_about, rewards_of
from grpo_nb.rewards.sets import PRESETS, RewardSet, reward_set
from grpo_nb.runs import PROJECT_ROOT, refuse_unknown
from grpo_nb.runs.settings import RewardsConfig


def load_rewards(config: RewardsConfig) -> RewardSet:
    """Return the rewards of a run, in its form; raises what `load_preset` raises.

    Rewards of a file have the time limit `rewards.seconds`.
    """
    preset = load_preset(config.preset, config.reward_weights, config.form, config.opened)
    return preset.limited(config.seconds)


def load_preset(name: str, reward_weights: str = "", form: str = "", opened: str = "") -> RewardSet:
    """Return the preset of that name, or the reward set of a Python file.

    Args:
        name: A name in PRESETS, or a path that ends in .py.
        reward_weights: Other weights in the same order, "1, 0.5"; 0 keeps a reward in the
            metrics and out of the total.
        form: How completions are written, a name in FORMS; "" takes the form of the preset or file.
        opened: What the chat template opens at the end of a prompt.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The preset or form does not exist, the file cannot be used, or there is not one
            finite number for each reward.

    >>> load_preset("qa", "1, 0, 0.5").reward_weights
    [1.0, 0.0, 0.5]
    """
    if name.endswith(".py"):
        preset = load_python(PROJECT_ROOT / name)
    else:
        refuse_unknown("rewards.preset", name, [*PRESETS, "a .py file of rewards"])
        preset = PRESETS[name]
    if form or opened:
        preset = preset.in_form(form, opened)
    if not reward_weights.strip():
        return preset
    try:
        weights = [float(weight) for weight in reward_weights.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(preset.names) or not all(map(math.isfinite, weights)):
        raise ValueError(
            f"rewards.reward_weights = {reward_weights!r}: write {len(preset.names)} numbers "
            f"with commas between them, for {', '.join(preset.names)}"
        )
    return preset._replace(reward_weights=weights)


def load_python(
    path: Path, text: str | None = None, about: Mapping[str, Any] | None = None
) -> RewardSet:
    """Return the rewards of a Python file: functions in TRL's shape, or made by `@reward`.

    They are its `reward_funcs` with its `reward_weights`. Without these, each reward that it
    defines counts, with weight 1. Its `form` names a form, or a preset whose form is used; the
    default is tags. If it names a preset as `extends`, the set begins with that preset's rewards;
    its own rewards replace those of the same name. A `reference(row)` or `extract(text)` that it
    defines replaces that of the form.

    Args:
        path: The file.
        text: Its future content, if it is not written yet.
        about: Notes to use in place of those beside the file, as `read_about` returns them.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It raises, or contains no rewards.
    """
    notes = read_about(path) if about is None else about
    module = load_source(path, text, rewards=rewards)
    functions = {
        name: vars(module)[name] for name in ("reference", "extract") if name in vars(module)
    }
    extends, form = getattr(module, "extends", ""), getattr(module, "form", notes.get("form"))
    form = form if isinstance(form, str) else ""  # a reward may have this name, too
    of_preset = form in PRESETS or form.endswith(".py")
    base = load_preset(extends or (form if of_preset else "math"), form="" if of_preset else form)
    pairs = rewards_of(module, notes.get("ranges", {}))
    file_set = reward_set(pairs, base, own=functions or base.own)
    if not extends:
        return file_set
    for func, weight in file_set.pairs:
        base = base.adding(func, weight)
    return base._replace(own=file_set.own)
