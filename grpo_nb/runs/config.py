"""`RunConfig`: every setting of a run, its meaning, and where its value came from.

Values are layered: library default < profile < task < the run's config.yaml < what you set.
In a notebook's parameters cell `-1` and `"auto"` mean "not set here". An unknown name
is refused with the nearest known one, before anything starts.
"""

import ast
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from pydantic import Field, ValidationError

from grpo_nb.runs.profiles import PROFILES, detect_profile, refuse_unknown, task_settings
from grpo_nb.runs.settings import (
    DataConfig,
    EvaluateConfig,
    ExportConfig,
    ModelConfig,
    PolicyConfig,
    RewardsConfig,
    Section,
    Thresholds,
    TrainConfig,
)


class RunConfig(Section):
    """All settings of one run; `SECTION_STAGE` says which notebook holds which section."""

    profile: str = "tiny-cpu"
    task: str = Field("math", description="what is taught; sets source, preset and gold")
    seed: int = Field(0, ge=0, lt=2**32, description="of split, sampling and training")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rewards: RewardsConfig = RewardsConfig()
    policy: PolicyConfig = PolicyConfig()
    train: TrainConfig = TrainConfig()
    health: Thresholds = Thresholds()
    trl: dict[str, Any] = Field({}, description="more of GRPOConfig's own arguments")
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()

    @property
    def step_completions(self) -> int:
        """Completions that one optimizer step learns from, on one device."""
        return self.train.per_device_train_batch_size * self.train.gradient_accumulation_steps


SECTION_STAGE = {
    **{"data": "01", "model": "01", "rewards": "02", "policy": "03", "train": "03"},
    **{"health": "03", "trl": "03", "evaluate": "04", "export": "04"},
}
SECTIONS = tuple(section for section in SECTION_STAGE if section != "trl")
MORE = "more"  # the notebooks' parameter for the settings without a line of their own
NEXT_ASSIGNMENT = re.compile(r";(?=\s*(?:[a-z]+\.\w+\s*=|$))")  # a value may hold a ";"


def setting_names() -> list[str]:
    """Every dotted name that `--set` takes, such as `train.max_steps`; `trl.…` comes on top."""
    names = [f"{s}.{key}" for s in SECTIONS for key in type(getattr(RunConfig(), s)).model_fields]
    return ["task", "seed", *names]


def is_rare(name: str) -> bool:
    """Whether a setting has no line of its own in the notebooks' parameters cells."""
    section, _, key = name.rpartition(".")
    if section in ("", "health", "trl"):
        return bool(section)
    extra = type(getattr(RunConfig(), section)).model_fields[key].json_schema_extra
    return bool(extra and extra["rare"])


def refuse_unknown_setting(name: str) -> None:
    """Raise ValueError with the nearest name; names below `trl.` are TRL's to check."""
    if not re.fullmatch(r"trl\.\w+", str(name)):
        refuse_unknown("setting", str(name), setting_names())


def parse_assignment(assignment: str) -> tuple[str, Any]:
    """`"train.max_steps=20"` to `("train.max_steps", "20")`; a value of TRL's to its type.

    Raises:
        ValueError: No `=`, or a name that is not a setting.
    """
    name, equals, value = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment!r} has no value: write --set train.max_steps=20")
    refuse_unknown_setting(name.strip())
    if name.startswith("trl."):
        try:
            return name.strip(), ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return name.strip(), value  # text
    return name.strip(), value


def resolve(profile: str, *layers: Mapping[str, Any]) -> RunConfig:
    """The effective configuration: defaults, then the profile, the task, then each layer.

    Args:
        profile: A name in PROFILES, or "auto" for the one that fits this machine.
        layers: Dotted names to values, {"train.max_steps": 20}, later ones on top; text is
            read as the setting's type.

    Raises:
        ValueError: Unknown profile, task or setting (nearest name given), a value that does
            not fit, a batch that the group size does not divide, or 4-bit weights to train.
    """
    if not isinstance(profile, str) or not profile:
        raise ValueError(f"profile = {profile!r}: write a name, such as tiny-cpu, or leave it out")
    profile = detect_profile() if profile == "auto" else profile
    refuse_unknown("profile", profile, list(PROFILES))
    nested: dict[str, Any] = {"profile": profile, **{section: {} for section in SECTION_STAGE}}
    set_by_layers = ChainMap(*reversed(layers))
    task = task_settings(set_by_layers.get("task", "math"), profile)
    for name, value in ChainMap(set_by_layers, task, PROFILES[profile]).items():
        refuse_unknown_setting(name)
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = value
    try:
        config = RunConfig(**nested)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name} = {first['input']!r}: {first['msg'].lower()}") from None
    _check_sizes(config)
    kept = config.model.quantization
    if config.policy.finetuning == "full" and kept != "16bit":
        raise ValueError(
            f"policy.finetuning = 'full' with model.quantization = {kept!r}: such weights cannot "
            "be trained; set model.quantization = '16bit', or policy.finetuning = 'lora'"
        )
    return config


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted name; `resolve(config.profile, flatten(config)) == config`."""
    own = {name: attrgetter(name)(config) for name in setting_names()}
    return own | {f"trl.{name}": value for name, value in config.trl.items()}


def stored(config: RunConfig) -> dict[str, Any]:
    """What config.yaml holds."""
    return {"profile": config.profile, **flatten(config)}


def _check_sizes(config: RunConfig) -> None:
    train, model, data = config.train, config.model, config.data
    batch = train.per_device_train_batch_size * train.gradient_accumulation_steps
    if batch % train.num_generations:
        raise ValueError(
            f"train.num_generations = {train.num_generations} does not divide the batch: "
            f"per_device_train_batch_size {train.per_device_train_batch_size} x "
            f"gradient_accumulation_steps {train.gradient_accumulation_steps} = {batch}; "
            f"take a batch of {-(-batch // train.num_generations) * train.num_generations}"
        )
    need = data.max_prompt_tokens + train.max_completion_length
    if need > model.max_seq_length:
        raise ValueError(
            f"model.max_seq_length = {model.max_seq_length} is less than "
            f"data.max_prompt_tokens + train.max_completion_length = {need}; raise it to {need}"
        )


def stage_of(name: str) -> str:
    """The stage whose notebook holds the setting `name`, such as "03" for train.max_steps."""
    return SECTION_STAGE.get(name.partition(".")[0], "01")


def from_parameters(stage: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings a notebook's parameters cell sets; `-1` and "auto" set nothing.

    Args:
        stage: "01" … "04".
        parameters: The notebook's `globals()`; names that other cells gave are passed over.
            `more` holds rare settings: "train.save_steps=10; trl.epsilon_high=0.28".

    Raises:
        ValueError: The parameters cell or `more` has an unknown name, or one of another stage.
    """
    _refuse_unknown_parameters(stage, parameters.get("In", []))
    chosen = {
        name: parameters.get(name.rpartition(".")[2], "auto")
        for name in setting_names()
        if stage_of(name) == stage and not is_rare(name)
    }
    chosen = {name: value for name, value in chosen.items() if value not in ("auto", -1)}
    for assignment in filter(str.strip, NEXT_ASSIGNMENT.split(parameters.get(MORE, ""))):
        name, value = parse_assignment(assignment.strip())
        if stage_of(name) != stage:
            raise ValueError(f"more: {name} belongs to notebook {stage_of(name)}, not {stage}")
        chosen[name] = value
    return chosen


def _parameters_of(stage: str) -> list[str]:
    """The names that the parameters cell of a stage's notebook may give."""
    of_stage = [name for name in setting_names() if stage_of(name) == stage]
    own = [name.rpartition(".")[2] for name in of_stage if not is_rare(name)]
    more = [MORE] if any(map(is_rare, of_stage)) else []
    return ["run_name", "profile" if stage == "01" else "force", *own, *more]


def _refuse_unknown_parameters(stage: str, history: Sequence[str]) -> None:
    """Raise ValueError if the parameters cell, or what papermill put below it, has a wrong name.

    Args:
        history: The source of every cell that ran; empty outside of a notebook.
    """
    for name in _given_by_parameters_cell(history):
        for other in [one for one in SECTION_STAGE.values() if name in _parameters_of(one)]:
            if name not in _parameters_of(stage):
                raise ValueError(f"{name} belongs to notebook {other}, not {stage}")
        refuse_unknown(f"parameter of notebook {stage}", name, _parameters_of(stage))


def _given_by_parameters_cell(history: Sequence[str]) -> list[str]:
    """Names in the last cell that has a `run_name: str = …` line, and in papermill's after it.

    Where no cell has the type, the last cell that gives `run_name` is the parameters cell.
    """
    cells = [(source, dict(_assigned(source))) for source in history]
    ours = [i for i, (source, _) in enumerate(cells) if source.startswith("# Parameters\n")]
    named = [i for i, (_, names) in enumerate(cells) if "run_name" in names and i not in ours]
    typed = [i for i in named if cells[i][1]["run_name"]]
    last = (typed or named or [-1])[-1]
    return [name for i, (_, names) in enumerate(cells) if i == last or i in ours for name in names]


def _assigned(source: str) -> Iterator[tuple[str, bool]]:
    """Each name that a cell assigns at its top level, and whether with a type."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # it did not run
        return
    for node in body:
        if isinstance(node, ast.AnnAssign | ast.Assign | ast.AugAssign):
            for target in getattr(node, "targets", None) or [node.target]:
                for name in [n for n in ast.walk(target) if isinstance(n, ast.Name)]:
                    if isinstance(name.ctx, ast.Store):
                        yield name.id, isinstance(node, ast.AnnAssign)


def to_parameters(stage: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`from_parameters` the other way: under the names of that stage's parameters cell."""
    chosen = {name: value for name, value in settings.items() if stage_of(name) == stage}
    own = {name.rpartition(".")[2]: v for name, v in chosen.items() if not is_rare(name)}
    rare = {name: value for name, value in chosen.items() if is_rare(name)}
    text = {k: repr(v) if k.startswith("trl.") else v for k, v in rare.items()}  # of its type
    more = "; ".join(f"{name}={value}" for name, value in text.items())
    return own | ({MORE: more} if more else {})


def source_of(config: RunConfig, set_here: Mapping[str, Any], name: str) -> str:
    """Which layer the setting's value came from: "set here", "task …", "profile …", …"""
    if name in set_here:
        return "set here"
    layers = {
        f"task {config.task}": task_settings(config.task, config.profile),
        f"profile {config.profile}": PROFILES[config.profile],
        "default": flatten(RunConfig()),
    }
    for source, layer in layers.items():
        if name in layer:
            return source if layer[name] == flatten(config)[name] else "config.yaml"
    return "config.yaml"


def describe(config: RunConfig, set_here: Mapping[str, Any], *sections: str) -> list[dict]:
    """Rows for a table: setting, value, where the value came from, meaning."""
    rows = []
    # With standby it sets vLLM's share itself: unsloth_zoo/vllm_utils.py 2026.10.9, load_vllm.
    unsloths = config.policy.standby and config.policy.backend == "unsloth"
    for section in sections:
        for key, field in type(getattr(config, section)).model_fields.items():
            name = f"{section}.{key}"
            source = source_of(config, set_here, name)
            row = {"setting": name, "value": attrgetter(name)(config), "from": source}
            if unsloths and name == "policy.gpu_memory_utilization":
                row |= {"value": "set by Unsloth", "from": "policy.standby"}
            rows.append({**row, "meaning": field.description})
    return rows
