"""The sections of a run's configuration: every setting, its default, its limits and its meaning."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_true_for_a_number(cls, value: Any, about: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[about.field_name].annotation is not bool:
            raise ValueError("true and false are no value of this setting")
        return value


def rare(default: Any, description: str, **limits: Any) -> Any:
    """A setting without a line of its own in the notebooks: it is set by the parameter `more`."""
    return Field(default, description=description, json_schema_extra={"rare": True}, **limits)


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
    quantization: Literal["4bit", "16bit", "fp8"] = Field("4bit", description="weights of the base")
    fast_inference: Literal["vllm", "off", "detect"] = Field(
        "detect", description="generate with vLLM; detect: where a GPU and vLLM are found"
    )
    max_seq_length: int = Field(512, ge=32, description="prompt + completion [tokens]")
    lora_rank: int = Field(16, ge=1, description="rank of the adapter")
    lora_alpha: int = Field(32, ge=1, description="the adapter is scaled by alpha / rank")


class RewardsConfig(Section):
    preset: str = Field("math", description="named list of rewards, or a .py file of rewards")
    reward_weights: str = Field("", description="weights in the preset's order; empty: its own")
    cases: str = Field("", description="JSONL of your own attacks and saved cases")
    pilot_prompts: int = Field(32, ge=1, description="prompts sampled from the base model")
    pilot_completions: int = Field(8, ge=2, description="completions for each of them")


LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]


class TrainConfig(Section):
    max_steps: int = Field(100, ge=1, description="optimizer steps")
    learning_rate: float = Field(1e-3, gt=0, le=10, description="peak learning rate")
    warmup_steps: int = Field(5, ge=0, description="steps until the peak is reached")
    num_generations: int = Field(8, ge=2, description="completions per prompt: the group")
    per_device_train_batch_size: int = Field(64, ge=1, description="completions per pass")
    gradient_accumulation_steps: int = Field(1, ge=1, description="passes per step")
    max_completion_length: int = Field(48, ge=1, description="cut after this [tokens]")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of sampling in training")
    beta: float = Field(0.0, ge=0, le=1000, description="weight of the KL to the base")
    loss_type: LossType = Field("dapo", description="TRL's")
    scale_rewards: Literal["group", "batch", "none"] = Field("group", description="TRL's")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize", description="TRL's; the second is GDPO"
    )
    stages: str = Field("", description="YAML file of the stages; empty: one, as set here")
    priming_steps: int = Field(0, ge=0, description="supervised steps on the primed rows first")
    eval_steps: int = Field(25, ge=0, description="validate every so many steps; 0: never")
    resume: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: go on where a training with these settings was cut off"
    )
    report_to: str = Field("none", description='trackers: "tensorboard", "trackio", "wandb"')
    dynamic_sampling: int = rare(
        0, "rounds in which groups without signal are drawn anew; 0: never", ge=0
    )
    priming_learning_rate: float = rare(1e-3, "of the supervised steps", gt=0, le=10)
    save_steps: int = rare(25, "a checkpoint every so many steps", ge=1)
    keep_checkpoints: int = rare(2, "the newest that stay on disk", ge=1)
    eval_prompts: int = rare(64, "training rows set aside to validate on", ge=1)
    early_stop_evals: int = rare(0, "stop after so many without a new best; 0: never", ge=0)
    keep: Literal["best", "last"] = rare("best", "adapter handed on: best validated, or last")


class PolicyConfig(Section):
    backend: Literal["unsloth", "transformers"] = Field(
        "unsloth", description="loads the policy; transformers: with peft and bitsandbytes"
    )
    finetuning: Literal["lora", "full"] = Field("lora", description="what is trained")
    gpu_memory_utilization: float = rare(0.5, "of the GPU, for vLLM [share]", gt=0, lt=1)
    standby: bool = rare(False, "vLLM gives its memory back during the update")
    rollouts: Literal["auto", "model", "copy"] = rare(
        "auto", "samples come from the policy or a dense copy; auto: the copy on a CPU"
    )
    share_prompts: bool = rare(True, "the update runs a prompt once for its group, if it can")
    optim: str = rare("auto", "TRL's; auto: adamw_8bit on a GPU, else adamw_torch")


class EvaluateConfig(Section):
    eval_batch_size: int = Field(
        64, ge=1, description="sequences generated at once, samples included"
    )
    samples: int = Field(4, ge=1, description="sampled completions a prompt: k of pass@k")
    show_samples: int = Field(4, ge=1, description="before/after pairs shown")


MergeMode = Literal["merged_16bit", "merged_16bit_original_base"]


class ExportConfig(Section):
    merge: MergeMode = rare(
        "merged_16bit", "base as trained on, dequantised, + adapter; or another policy"
    )
    max_shard_gb: float = rare(1.0, "of a safetensors file [GB]", gt=0)
    parity_prompts: int = rare(32, "held-out prompts that adapter and merged model answer", ge=1)


class Thresholds(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    window: int = Field(10, ge=4, description="a curve is averaged over [steps]")
    patience: int = Field(50, ge=8, description="least time to call a curve flat [steps]")
    certainty: float = Field(4, gt=0, description="a change beyond noise [standard errors]")
    solved: float = Field(0.85, gt=0, le=1, description="counts as learnt [share of its range]")
    flat: float = Field(0.05, gt=0, description="less rise in half a patience [share of the rest]")
    no_signal: float = Field(0.95, gt=0, le=1, description="groups of equal rewards [share]")
    entropy: float = Field(0.25, gt=0, lt=1, description="left at collapse [share of the start]")
    dominant: float = Field(0.8, gt=0, le=1, description="of one reward in the spread [share]")
    truncated: float = Field(0.3, gt=0, le=1, description="completions cut [share]")
    longer: float = Field(1.5, gt=1, description="completions, for the same reward [ratio]")
    spike: float = Field(4, gt=1, description="to the greatest of a patience before [ratio]")
    skipped: float = Field(0.05, gt=0, le=1, description="completions without score [share]")
    slower: float = Field(1.5, gt=1, description="step to its prediction [ratio]")
