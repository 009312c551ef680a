"""`RunConfig`: every setting of a run, its meaning, and where its value came from.

Values are layered: library default < profile < task < the run's config.yaml < what you set.
In a notebook's parameters cell `-1` and `"auto"` mean "not set here". An unknown name
is refused with the nearest known one, before anything starts.
"""

from collections import ChainMap
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_nb.profiles import PROFILES, detect_profile, refuse_unknown, task_settings


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    source: str = Field("arithmetic", description="built-in set, local file, or hub dataset")
    subset: str = Field("", description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset")
    revision: str = Field("", description="commit, branch or tag of a hub dataset")
    streaming: bool = Field(False, description="read a hub dataset without storing it")
    question_column: str = Field("question", description="column of questions, texts or chats")
    answer_column: str = Field("answer", description="column that holds the gold")
    extra_columns: str = Field("", description='columns for the rewards: "a, b" or "all"')
    answer_format: str = Field(
        "auto", description="auto (#### or as is), as_is, ####, boxed, tag, json:path, regex:…"
    )
    answer_kind: Literal["number", "choice", "json", "code", "text"] = Field(
        "number", description="what a gold has to be"
    )
    system_prompt: str = Field(
        "preset", description="says the format; preset: as the rewards ask for it; may be empty"
    )
    max_rows: int = Field(0, ge=0, description="rows read from the source; 0 reads all")
    max_dropped_share: float = Field(
        0.05, ge=0, le=1, description="more faulty rows than this share are an error"
    )
    eval_rows: int = Field(256, ge=1, description="rows held out, never trained on")
    max_prompt_tokens: int = Field(256, ge=8, description="longer prompts are dropped [tokens]")
    difficulty_prompts: int = Field(
        0, ge=0, description="prompts to train on that a pilot judges first; 0: none"
    )
    min_pass_rate: float = Field(
        0.0, ge=0, lt=1, description="a judged prompt has to be solved more often"
    )
    max_pass_rate: float = Field(1.0, gt=0, le=1, description="and less often than this")
    order: Literal["shuffled", "easy_to_hard"] = Field(
        "shuffled", description="of the prompts in training"
    )
    priming_rows: int = Field(0, ge=0, description="rows written for a supervised warm-up")


class ModelConfig(Section):
    model_path: str = Field("data/tiny_base", description="folder or hub name of the base model")
    quantization: Literal["4bit", "16bit"] = Field("4bit", description="weights of the base")
    fast_inference: Literal["vllm", "off", "detect"] = Field(
        "detect", description="generate with vLLM; detect: where a GPU and vLLM are found"
    )
    max_seq_length: int = Field(512, ge=32, description="prompt + completion [tokens]")
    lora_rank: int = Field(16, ge=1, description="rank of the adapter")
    lora_alpha: int = Field(32, ge=1, description="the adapter is scaled by alpha / rank")


class RewardsConfig(Section):
    preset: str = Field("math", description="named list of rewards, or YAML file")
    reward_weights: str = Field("", description="weights in the preset's order; empty: its own")
    cases: str = Field("", description="JSONL of your own attacks and saved cases")
    pilot_prompts: int = Field(32, ge=1, description="prompts sampled from the base model")
    pilot_completions: int = Field(8, ge=2, description="completions for each of them")


class TrainConfig(Section):
    max_steps: int = Field(100, ge=1, description="optimizer steps")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup_steps: int = Field(5, ge=0, description="steps until the peak is reached")
    num_generations: int = Field(8, ge=2, description="completions per prompt: the group")
    per_device_train_batch_size: int = Field(64, ge=1, description="completions per pass")
    gradient_accumulation_steps: int = Field(1, ge=1, description="passes per step")
    max_completion_length: int = Field(48, ge=1, description="cut after this [tokens]")
    temperature: float = Field(1.0, gt=0, description="of sampling in training")
    beta: float = Field(0.0, ge=0, description="weight of the KL to the base")
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo"] = Field("dapo", description="TRL's")
    scale_rewards: Literal["group", "batch", "none"] = Field("group", description="TRL's")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize", description="TRL's; the second is GDPO"
    )


class EvaluateConfig(Section):
    eval_batch_size: int = Field(64, ge=1, description="prompts generated at once")
    show_samples: int = Field(4, ge=1, description="before/after pairs shown")


class RunConfig(Section):
    """All settings of one run; `SECTION_STAGE` says which notebook holds which section."""

    profile: str = "tiny-cpu"
    task: str = Field("math", description="what is taught; sets source, preset and gold")
    seed: int = Field(0, ge=0, description="of split, sampling and training")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rewards: RewardsConfig = RewardsConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @property
    def step_completions(self) -> int:
        """Completions that one optimizer step learns from, on one device."""
        return self.train.per_device_train_batch_size * self.train.gradient_accumulation_steps


SECTIONS = ("data", "model", "rewards", "train", "evaluate")
SECTION_STAGE = {"data": "01", "model": "01", "rewards": "02", "train": "03", "evaluate": "04"}


def setting_names() -> list[str]:
    """Every dotted name that `--set` takes, such as `train.max_steps`."""
    names = [f"{s}.{key}" for s in SECTIONS for key in type(getattr(RunConfig(), s)).model_fields]
    return ["task", "seed", *names]


def parse_assignment(assignment: str) -> tuple[str, str]:
    """`"train.max_steps=20"` to `("train.max_steps", "20")`.

    Raises:
        ValueError: No `=`, or a name that is not a setting.
    """
    name, equals, value = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment!r} has no value: write --set train.max_steps=20")
    refuse_unknown("setting", name.strip(), setting_names())
    return name.strip(), value


def resolve(profile: str, *layers: Mapping[str, Any]) -> RunConfig:
    """The effective configuration: defaults, then the profile, the task, then each layer.

    Args:
        profile: A name in PROFILES, or "auto" for the one that fits this machine.
        layers: Dotted names to values, {"train.max_steps": 20}, later ones on top; text is
            read as the setting's type.

    Raises:
        ValueError: Unknown profile, task or setting (nearest name given), a value that does
            not fit, or a batch that the group size does not divide.
    """
    profile = detect_profile() if profile == "auto" else profile
    refuse_unknown("profile", profile, list(PROFILES))
    nested: dict[str, Any] = {"profile": profile, **{section: {} for section in SECTIONS}}
    set_by_layers = ChainMap(*reversed(layers))
    task = task_settings(set_by_layers.get("task", "math"), profile)
    for name, value in ChainMap(set_by_layers, task, PROFILES[profile]).items():
        refuse_unknown("setting", name, setting_names())
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = value
    try:
        config = RunConfig(**nested)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name} = {first['input']!r}: {first['msg'].lower()}") from None
    _check_sizes(config)
    return config


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted name; `resolve(config.profile, flatten(config)) == config`."""
    return {name: attrgetter(name)(config) for name in setting_names()}


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
        parameters: The notebook's `globals()`; other names are passed over.
    """
    chosen = {
        name: parameters.get(name.rpartition(".")[2], "auto")
        for name in setting_names()
        if stage_of(name) == stage
    }
    return {name: value for name, value in chosen.items() if value not in ("auto", -1)}


def describe(config: RunConfig, set_here: Mapping[str, Any], *sections: str) -> list[dict]:
    """Rows for a table: setting, value, where the value came from, meaning."""
    rows = []
    for section in sections:
        for key, field in type(getattr(config, section)).model_fields.items():
            name = f"{section}.{key}"
            layers = {
                "set here": set_here,
                f"task {config.task}": task_settings(config.task, config.profile),
                f"profile {config.profile}": PROFILES[config.profile],
            }
            source = next((source for source, layer in layers.items() if name in layer), "default")
            row = {"setting": name, "value": attrgetter(name)(config), "from": source}
            rows.append({**row, "meaning": field.description})
    return rows
