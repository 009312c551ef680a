"""Define `RunConfig` and its sections: each setting with its default, limits and meaning.

The defaults suit an instruct model of about 0.5 B parameters with LoRA.
"""

import ast
from contextlib import suppress
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Group settings, which are immutable; unknown names, NaN and infinity are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """Define a setting: its default, its meaning as shown in tables, and the value's limits."""
    return Field(default, description=meaning, **limits)


def _literal(value: Any) -> Any:
    """Read a text as a Python literal, or as true or false; return anything else unchanged."""
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(value.title() if value in ("true", "false") else value)
    return value


AnswerKind = Literal["number", "math", "choice", "json", "code", "text"]
LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
SCALES = {"true": "group", "false": "none"}  # as TRL converts them
ScaleRewards = Annotated[
    Literal["group", "batch", "none"],
    BeforeValidator(lambda value: SCALES.get(str(value).lower(), value)),
]
FastInference = Annotated[
    Literal["vllm", "off", "detect"],
    BeforeValidator(lambda value: {"true": "vllm", "false": "off"}.get(str(value).lower(), value)),
]
Options = Annotated[
    dict[str, Any],  # YAML on a command line
    BeforeValidator(lambda value: yaml.safe_load(value) if isinstance(value, str) else value),
]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]  # the second is GDPO


class DataConfig(Section):
    """Hold the settings of the data: the source, its columns, and how rows are prepared."""

    source: str = setting("arithmetic", "built-in set, file, hub dataset, reasoning-gym:TASK")
    options: Options = setting({}, "sizes of a task of reasoning-gym, such as {max_terms: 3}")
    levels: int = setting(0, "levels of a task of reasoning-gym; 0: none", ge=0, le=9)
    shots: int = setting(0, "worked turns of other rows before each question", ge=0, le=16)
    subset: str = setting("", "configuration name of a hub dataset")
    split: str = setting("train", "split of a hub dataset")
    revision: str = setting("", "commit, branch or tag of a hub dataset")
    streaming: bool = setting(False, "read a hub dataset without storing it")
    question_column: str = setting("question", "questions (texts or chats)")
    answer_column: str = setting("answer", "reference answers")
    image_column: str = setting("images", 'images, if there are any; "": none')
    image_pixels: int = setting(262_144, "larger images are scaled down to this [pixels]", ge=1024)
    extra_columns: str = setting("", 'further columns for the rewards: "a, b" or "all"')
    answer_format: str = setting("auto", "auto: #### or as_is; boxed, tag, regex:…")
    answer_kind: AnswerKind = setting("number", "required type of the reference answers")
    system_prompt: str = setting("preset", "asks for the format; preset: what the rewards expect")
    max_rows: int = setting(0, "rows read from the source; 0 reads all", ge=0)
    max_dropped_share: float = setting(0.05, "an error if more rows are faulty", ge=0, le=1)
    eval_rows: int = setting(256, "held-out rows, at most data.eval_share of all", ge=1)
    eval_share: float = setting(0.2, "largest share of the rows to hold out", gt=0, lt=1)
    max_prompt_tokens: int = setting(256, "longer prompts are dropped [tokens]", ge=8)
    environment: str = setting("", "environment of the task: guess, calculator, mine.py:Guess …")
    sft_rows: int = setting(0, "for an SFT warm-up, at most half of the training rows", ge=0)


class ModelConfig(Section):
    """Hold arguments of `FastLanguageModel.from_pretrained`, under Unsloth's names."""

    model_name: str = setting("Qwen/Qwen2.5-0.5B-Instruct", "folder or hub name of the base model")
    max_seq_length: int = setting(1024, "prompt + completion [tokens]", ge=32)
    load_in_4bit: bool = setting(True, "base weights in 4 bit, else in 16")
    full_finetuning: bool = setting(False, "train every weight, and no adapter")
    fast_inference: FastInference = setting("detect", "generate with vLLM: vllm, off, detect")
    gpu_memory_utilization: float = setting(0.5, "vLLM's GPU share without standby", gt=0, lt=1)
    unsloth_vllm_standby: bool = setting(False, "vLLM frees its memory during the update")

    @property
    def quantization(self) -> str:
        """Return "4bit" or "16bit", the precision of the base weights."""
        return "4bit" if self.load_in_4bit else "16bit"


class AdapterConfig(Section):
    """Hold arguments of `FastLanguageModel.get_peft_model`, under Unsloth's and peft's names."""

    r: int = setting(16, "rank of the adapter", ge=1)
    lora_alpha: int = setting(32, "the adapter is scaled by lora_alpha / r", ge=1)
    target_modules: str = setting("all-linear", 'layers with an adapter, or "q_proj, v_proj"')
    finetune_vision_layers: bool = setting(False, "an adapter on the part that reads images, too")


class RewardsConfig(Section):
    """Hold the settings of the rewards, of the form of completions, and of the baseline."""

    preset: str = setting("math", "named set of rewards, or a .py file of rewards")
    reward_weights: str = setting("", "weights in the preset's order; empty: the preset's")
    form: str = setting("", "tags, think+boxed, boxed, hash, code, plain; empty: preset's")
    opened: str = setting("", "tag that the chat template opens: <think>; set by notebook 1")
    about: Options = setting({}, "what notebook 2 measured of a .py file's rewards; set by it")
    baseline_prompts: int = setting(32, "prompts that the base model answers", ge=1)
    baseline_completions: int = setting(8, "completions per baseline prompt", ge=2)


class GrpoConfig(Section):
    """Hold arguments of `trl.GRPOConfig`: those with a default or limit of ours, and any other."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(_literal)]]

    max_steps: int = setting(250, "optimizer steps", ge=1)
    learning_rate: float = setting(2e-5, "peak learning rate", gt=0, le=10)
    warmup_steps: int = setting(10, "steps until the peak is reached", ge=0)
    num_generations: int = setting(8, "completions per prompt: the group size", ge=2)
    per_device_train_batch_size: int = setting(8, "completions per micro-batch", ge=1)
    gradient_accumulation_steps: int = setting(4, "micro-batches per step", ge=1)
    max_completion_length: int = setting(512, "longer completions are truncated [tokens]", ge=1)
    temperature: float = setting(1.0, "sampling temperature in training", ge=0.01, le=100)
    beta: float = setting(0.0, "weight of the KL to the start", ge=0, le=1000)
    loss_type: LossType = setting("dapo", "TRL's loss")
    scale_rewards: ScaleRewards = setting("group", "TRL's advantage scaling")
    multi_objective_aggregation: Aggregation = setting("sum_then_normalize", "of rewards")
    chat_template_kwargs: Options = setting({}, "such as {enable_thinking: false}")
    optim: str = setting("auto", "optimizer; auto: adamw_8bit on a GPU, else adamw_torch")
    save_steps: int = setting(25, "steps between checkpoints", ge=1)
    save_total_limit: int = setting(2, "newest checkpoints kept on disk", ge=1)
    report_to: str = setting("none", 'trackers: "tensorboard", "trackio", "wandb"')


class TrainConfig(Section):
    """Hold the settings of training that are not TRL's: warm-up, validation, guard, placebo."""

    sft_steps: int = setting(0, "SFT warm-up steps on data.sft_rows", ge=0)
    sft_learning_rate: float = setting(2e-4, "learning rate of the SFT warm-up", gt=0, le=10)
    eval_steps: int = setting(25, "steps between validations; 0: never", ge=0)
    eval_prompts: int = setting(64, "validation prompts: at most a tenth of the rows", ge=1)
    guard_steps: int = setting(50, "steps between the identity guard's tests; 0: off", ge=0)
    placebo: Literal["none", "shuffled"] = setting("none", "a placebo: shuffled rewards")
    difficulty: bool = setting(False, "draw the rows from which something can still be learnt")


class PolicyConfig(Section):
    """Hold the settings by which the policy is loaded, initialized and sampled."""

    backend: Literal["unsloth", "transformers"] = setting("unsloth", "loads and trains the policy")
    adapter: str = setting("", "run or folder whose adapter initializes the policy")
    rollouts: Literal["auto", "model"] = setting("auto", "auto: the dense engine samples on a CPU")
    share_prompts: bool = setting(True, "compute a prompt once for its group where possible")


class EvaluateConfig(Section):
    """Hold the settings of the evaluation in stage 04."""

    eval_batch_size: int = setting(64, "sequences generated at once, samples included", ge=1)
    samples: int = setting(4, "sampled completions per prompt: k of pass@k", ge=1)
    show_samples: int = setting(4, "before/after pairs shown", ge=1)
    adapter: bool = setting(False, "the adapter answers, too, even if the merged model is the same")


class ExportConfig(Section):
    """Hold the settings of the merge in stage 04, and of its GGUF files."""

    parity_prompts: int = setting(32, "held-out prompts of the parity gate", ge=1)
    gguf: str = setting("", 'GGUF files for llama.cpp and Ollama: "q8_0, q4_k_m"')


class RunConfig(Section):
    """Hold all settings of one run; `config.stage_of` says which stage takes each."""

    profile: str = ""
    sources: dict[str, str] = setting({}, "where each setting's value came from")
    task: str = setting("math", "what is taught; sets source, preset and answers")
    seed: int = setting(0, "random seed of split, sampling and training", ge=0, lt=2**32)
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    lora: AdapterConfig = AdapterConfig()
    rewards: RewardsConfig = RewardsConfig()
    policy: PolicyConfig = PolicyConfig()
    train: TrainConfig = TrainConfig()
    grpo: GrpoConfig = GrpoConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()

    @property
    def step_completions(self) -> int:
        """Return the number of completions in one optimizer step, over all processes together."""
        return self.grpo.per_device_train_batch_size * self.grpo.gradient_accumulation_steps
