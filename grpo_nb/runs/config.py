"""Resolve a run's `RunConfig`: the value of every setting, and where it came from.

Values are layered: library default < profile < task < value set for the run. An unknown name is
rejected before anything starts, and the error suggests the nearest known name. A run's
`config.yaml` stores each value with its source: `grpo.max_steps: [200, set]`.

Profiles and tasks are YAML files. A profile suits a machine, and a task sets what the model learns;
settings that a task lists under a profile's name apply to that profile only. A profile's file also
states how much memory the GPU must have (`memory_gib`). None of the GPU profiles has been measured
on its GPU: tests/runs/test_config.py estimates their memory, and the preflight checks it before
training.
"""

import hashlib
import importlib.util
import json
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_nb.files import read_yaml
from grpo_nb.machine import gpu_fault, gpu_name
from grpo_nb.names import refuse_elsewhere, refuse_unknown
from grpo_nb.runs.settings import RunConfig

SECTION_STAGE = {
    **{"data": "01", "model": "01", "lora": "01", "rewards": "02"},
    **{"policy": "03", "train": "03", "grpo": "03", "evaluate": "04", "export": "04"},
}
SET = "set"  # the source of a value that was set for the run
Sourced = tuple[Any, str]  # a value and its source
GYM = "reasoning-gym:"  # the rewards of these sources are those of the task `gym`
# Stage 01 writes the prompts, which ask for the form, so the form is its setting. Stage 02 judges
# the model that GRPO starts from, so the SFT warm-up belongs there.
SETTING_STAGE = {
    **dict.fromkeys(("rewards.form", "rewards.opened"), "01"),
    **dict.fromkeys(("grpo.chat_template_kwargs", "policy.adapter"), "01"),
    **dict.fromkeys(("train.sft_steps", "train.sft_learning_rate"), "02"),
    **dict.fromkeys(("model.gpu_memory_utilization", "model.unsloth_vllm_standby"), "03"),
}
SECTIONS = tuple(SECTION_STAGE)
HERE = Path(__file__).parent
ARGUMENTS = read_yaml(HERE / "arguments.yaml")  # of TRL's GRPOConfig
TASKS = {path.stem: read_yaml(path) for path in sorted(HERE.glob("tasks/*.yaml"))}
PROFILES = {path.stem: read_yaml(path) for path in sorted(HERE.glob("profiles/*.yaml"))}
# The profiles are ordered by GPU memory [GiB], smallest first.
MEMORY_GIB = {name: profile.pop("memory_gib") for name, profile in PROFILES.items()}
PROFILES = {name: PROFILES[name] for name in sorted(PROFILES, key=MEMORY_GIB.get)}
TINY, REAL = "tiny-cpu", "smollm2-cpu"  # the profiles that need no GPU
# {"task": …, "seed": …, "data.source": …}: the meaning of each setting, except `grpo.…`.
MEANINGS = {name: RunConfig.model_fields[name].description for name in ("task", "seed")} | {
    f"{section}.{key}": field.description
    for section in SECTIONS
    for key, field in type(getattr(RunConfig(), section)).model_fields.items()
}


def stage_of(name: str) -> str:
    """Return the stage whose notebook takes the setting `name`: "03" for grpo.max_steps."""
    return SETTING_STAGE.get(name) or SECTION_STAGE.get(name.partition(".")[0], "01")


def of_stage(stage: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the settings that this stage's notebook takes."""
    return {name: value for name, value in settings.items() if stage_of(name) == stage}


def refuse_unknown_setting(name: str) -> None:
    """Raise ValueError for an unknown setting, and suggest the nearest known name.

    Arguments of GRPOConfig that another setting decides, or on which other stages rely, are refused
    as well.
    """
    names = list(MEANINGS)
    if str(name).startswith("grpo.") and name not in names:
        argument = name.removeprefix("grpo.")
        if argument in ARGUMENTS["setting_of"]:
            setting = ARGUMENTS["setting_of"][argument]
            raise ValueError(f"{name} is decided by {setting}: set that instead")
        if argument in ARGUMENTS["fixed"]:
            raise ValueError(f"{name} cannot be set: other stages rely on it; leave it out")
        refuse_elsewhere(name)
        names += [f"grpo.{argument}" for argument in names_of_grpo_config()] or [name]
    refuse_unknown("setting", str(name), names)


@cache
def names_of_grpo_config() -> tuple[str, ...]:
    """Return the names of trl.GRPOConfig's arguments; () where TRL is not installed.

    They are read from the source, because importing trl takes seconds.
    """
    specs = [importlib.util.find_spec(package) for package in ("trl", "transformers")]
    if None in specs:
        return ()
    trl, transformers = (Path(spec.submodule_search_locations[0]) for spec in specs)
    files = [trl / "trainer/grpo_config.py", *(trl / "trainer").glob("*base_config.py")]
    texts = [file.read_text("utf-8") for file in [*files, transformers / "training_args.py"]]
    return tuple(name for text in texts for name in re.findall(r"^    (\w+): ", text, re.MULTILINE))


def detect_profile(model: Any = "") -> str:
    """Return the largest profile that fits this machine's first GPU.

    Between profiles of equal memory the GPU's name decides. Without a GPU that has at least 14 GiB
    and supports CUDA 13, the result is `tiny-cpu`, whose model trains anywhere.

    Args:
        model: The `model.model_name` that is set, if any. If it is set and no GPU fits, the result
            is `smollm2-cpu` instead, whose other settings suit a real model.
    """
    name, _, memory = ("" if gpu_fault() else gpu_name()).rpartition(",")
    mib = re.match(r"\s*(\d+) MiB", memory)
    gib = int(mib[1]) / 1024 if mib else 0
    most = max(need for need in MEMORY_GIB.values() if need <= gib)
    if not most:
        return REAL if model else TINY
    largest = [profile for profile in PROFILES if MEMORY_GIB[profile] == most]
    matching = [profile for profile in largest if profile.partition("-")[0] in name.lower()]
    return (matching or largest)[0]


def task_settings(task: str, profile: str) -> dict[str, Any]:
    """Return the settings of a task under a profile."""
    refuse_unknown("task", task, list(TASKS))
    everywhere = {name: v for name, v in TASKS[task].items() if name not in PROFILES}
    return everywhere | TASKS[task].get(profile, {})


def resolve(
    profile: str, *layers: Mapping[str, Any], stored: Mapping[str, Sourced] | None = None
) -> RunConfig:
    """Return the effective configuration, with the source of each value.

    Args:
        profile: A name in PROFILES, or "auto" for the one that fits this machine.
        layers: Values that are set, by dotted name, such as {"grpo.max_steps": 20}; applied in
            order over all other values. Text is converted to the setting's type. For further
            arguments of GRPOConfig, which have no type here, text is read as a Python literal if
            possible.
        stored: Values with their sources, from a configuration that was resolved before. A value
            that differs from what its source gives counts as set, because somebody edited it.

    Raises:
        ValueError: The profile, task or setting is unknown (the message gives the nearest name), a
            value does not fit its setting, or settings do not fit together (`_misfits`).
    """
    stored = stored or {}
    values = {name: value for name, (value, _) in stored.items()}
    last = ChainMap(*map(dict, reversed(layers)), values)
    profile = detect_profile(last.get("model.model_name")) if profile == "auto" else profile
    refuse_unknown("profile", profile, list(PROFILES))
    task = last.get("task", "math")
    if task == "math" and str(last.get("data.source")).startswith(GYM):
        task, layers = "gym", (*layers, {"task": "gym"})
    below = {f"profile {profile}": PROFILES[profile], f"task {task}": task_settings(task, profile)}
    sourced = {name: (value, "default") for name, value in flatten(RunConfig()).items()}
    for source, layer in below.items():
        sourced |= {name: (value, source) for name, value in layer.items()}
    for name, (value, source) in stored.items():
        edited = sourced.get(name, (value, ""))[1] == source and sourced[name][0] != value
        sourced[name] = value, SET if edited else source
    for layer in layers:
        sourced |= {name: (value, SET) for name, value in layer.items()}
    return _checked(profile, sourced)


def _checked(profile: str, sourced: Mapping[str, Sourced]) -> RunConfig:
    """Build the configuration; refuse unknown names, wrong values and conflicting settings."""
    sources = {name: source for name, (_, source) in sourced.items()}
    fields: dict[str, Any] = {"profile": profile, "sources": sources}
    for name, (value, _) in sourced.items():
        refuse_unknown_setting(name)
        section, _, key = name.rpartition(".")
        (fields.setdefault(section, {}) if section else fields)[key] = value
    try:
        config = RunConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name} = {first['input']!r}: {first['msg'].lower()}") from None
    for why in _misfits(config):
        raise ValueError(why)
    return config


def _misfits(config: RunConfig) -> Iterator[str]:
    """Yield each conflict of settings: what does not fit, and what to change."""
    data, model, grpo = config.data, config.model, config.grpo
    rows, parts = grpo.per_device_train_batch_size, grpo.gradient_accumulation_steps
    if rows * parts % grpo.num_generations:
        batch = -(-rows * parts // grpo.num_generations) * grpo.num_generations
        yield (
            f"grpo.num_generations = {grpo.num_generations} does not divide the batch: "
            f"per_device_train_batch_size {rows} x gradient_accumulation_steps {parts} = "
            f"{rows * parts}; take a batch of {batch}"
        )
    need = data.max_prompt_tokens + grpo.max_completion_length
    if need > model.max_seq_length:
        yield (
            f"model.max_seq_length = {model.max_seq_length} is less than data.max_prompt_tokens + "
            f"grpo.max_completion_length = {need}; raise it to {need}"
        )
    if config.train.sft_steps and not data.sft_rows:
        yield "train.sft_steps has no rows to learn from: set data.sft_rows = 64 in stage 01"
    if model.full_finetuning and model.load_in_4bit:
        yield "model.full_finetuning trains no 4-bit weights: set model.load_in_4bit = False"
    is_whole = model.full_finetuning or config.lora.finetune_vision_layers
    if model.fast_inference == "vllm" and (is_whole or config.policy.backend != "unsloth"):
        yield (
            "model.fast_inference = 'vllm' needs policy.backend = 'unsloth' and LoRA on the layers "
            "for text: set model.fast_inference = 'detect'"
        )
    by_trl = config.policy.backend == "transformers" and not model.load_in_4bit
    if "vllm_mode" in grpo.model_extra and not by_trl:
        yield (
            "grpo.vllm_mode needs policy.backend = 'transformers' and model.load_in_4bit = False: "
            "set both, or leave grpo.vllm_mode out"
        )


def refuse_few_rows(config: RunConfig, rows: int) -> None:
    """Raise ValueError if there are fewer training rows than one step needs."""
    train, prompts = config.train, config.step_completions // config.grpo.num_generations
    validated = min(train.eval_prompts, rows // 10) if train.eval_steps else 0
    resized = {"steps_per_generation", "generation_batch_size"} & set(config.grpo.model_extra)
    if rows - validated < prompts and not resized:
        raise ValueError(
            f"{rows - validated} rows to train on ({rows} - {validated} for validation) are fewer "
            f"than the {prompts} prompts of a step: give more rows (data.source, data.max_rows), "
            "or lower grpo.per_device_train_batch_size"
        )


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return the value of every setting, by its dotted name."""
    values = {name: attrgetter(name)(config) for name in MEANINGS}
    return values | {f"grpo.{name}": value for name, value in config.grpo.model_extra.items()}


def stored(config: RunConfig) -> dict[str, Sourced]:
    """Return every value with its source, by dotted name."""
    return {name: (value, config.sources[name]) for name, value in flatten(config).items()}


def set_values(config: RunConfig) -> dict[str, Any]:
    """Return the values that were set, by dotted name; the others come from profile and task."""
    return {name: value for name, (value, source) in stored(config).items() if source == SET}


def digest(config: RunConfig, stage: str) -> str:
    """Return the sha256 of a stage's settings, which shows whether they have changed."""
    text = json.dumps(of_stage(stage, flatten(config)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> RunConfig:
    """Read a run's config.yaml; a value without a source counts as set.

    Raises:
        ValueError: The file is damaged, another version wrote it, or a value is wrong.
    """
    return _read(path, path.read_bytes())


@lru_cache(maxsize=16)
def _read(path: Path, _: bytes) -> RunConfig:
    """Parse the file; caching the result saves 30 ms while the content stays the same."""
    content = read_yaml(path)
    pairs = {
        name: tuple(entry) if isinstance(entry, list) and len(entry) == 2 else (entry, SET)
        for name, entry in content.get("settings", {}).items()
    }
    try:
        return resolve(content.get("profile"), stored=pairs)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error} (if another version of grpo_nb made this run, choose another "
            "run_name, or move the folder away)"
        ) from None


def describe(config: RunConfig, *sections: str) -> list[dict[str, Any]]:
    """Return table rows of these sections: setting, value, where the value came from, meaning."""
    return [
        {"setting": name, "value": value, "from": source}
        | {"meaning": MEANINGS.get(name, "an argument of TRL's GRPOConfig")}
        for name, (value, source) in stored(config).items()
        if name in sections or name.partition(".")[0] in sections
    ]
