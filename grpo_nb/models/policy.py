"""The policy: a model that is being trained, by Unsloth or by plain transformers and peft."""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.machine import bound_kernels, several_gpus
from grpo_nb.models import lm_head
from grpo_nb.models.chat import find_model, hub_errors, load_tokenizer, quiet
from grpo_nb.models.engine import Engine, Sample, VllmEngine, engine_of, free_memory
from grpo_nb.models.vllm import use_vllm
from grpo_nb.models.weights import cuda_available, load_base, load_weights, unpacked
from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import Run, project_path, refuse_changed, refuse_unknown, runs_root
from grpo_nb.runs.config import ModelConfig, PolicyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT = PolicyConfig()
# Unsloth and TRL set these for the engine in their own process; another engine, in this process or
# in a child of it, would take them for its own.
LEFT_BEHIND = (
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# What Unsloth does with vLLM unless the person says otherwise. FlashInfer's sampler refuses a T4,
# and folding the adapter into 16-bit weights rounds most of a small update away.
UNSLOTHS_VLLM = {"UNSLOTH_VLLM_NO_FLASHINFER": "1", "UNSLOTH_VLLM_MERGED_ROLLOUT": "0"}


class Policy(NamedTuple):
    """A model that is being trained, and what generates its completions.

    environment: The variables of LEFT_BEHIND as they were before the model was loaded.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    vllm: bool
    backend: str = "unsloth"
    environment: Mapping[str, str] | None = None

    @property
    def engine(self) -> Engine:
        """Answers as the policy stands now; a training that is under way goes on unchanged."""
        if self.vllm:
            return VllmEngine(self.model.vllm_engine, self.tokenizer, self.live_adapter)
        return engine_of(self.model, self.tokenizer, partial(_for_inference, self))

    @property
    def folds_adapter(self) -> bool:
        """Return whether Unsloth adds the adapter to vLLM's weights instead of handing it over."""
        return self.vllm and hasattr(self.model.vllm_engine, "_unsloth_merged_rollout_wrapped")

    def live_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's request for the adapter as it is now, whatever the caller names it.

        Unsloth writes the adapter's configuration into the folder that it is given.
        """
        return self.model.load_lora(_live_folder().name, load_tensors=True)

    def generate(self, prompts: Sequence[list[Message]], **sampling: Any) -> list[list[Sample]]:
        """As `Engine.generate`."""
        return self.engine.generate(prompts, **sampling)

    def close(self) -> None:
        """Give the memory back, whoever still holds the model; it is of no more use then.

        A kernel lives on after its notebook, and so does every name in it.
        """
        import torch

        if self.vllm:
            self.engine.close()
            del self.model.vllm_engine
        for name in LEFT_BEHIND if self.environment is not None else ():
            os.environ.pop(name, None)
        os.environ.update(self.environment or {})
        for module in self.model.modules():
            vars(module).pop("quant_state", None)  # of a layer in 4 bit, beside its weight's own
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            vars(tensor).pop("quant_state", None)
            tensor.grad, tensor.data = None, torch.empty(0, dtype=tensor.dtype)
        free_memory()


@contextmanager
def _for_inference(policy: Policy) -> Iterator[None]:
    """Evaluation mode, in which nothing is checkpointed; then the mode that was before.

    With gradient checkpointing `generate` has no key-value cache, and gives garbage.
    """
    model, training = policy.model, policy.model.training
    if policy.backend == "unsloth":
        from unsloth import FastLanguageModel as fast

        fast.for_inference(model)
    model.eval()
    try:
        yield
    finally:
        if policy.backend == "unsloth":
            fast.for_training(model)
        model.train(training)


def load_policy(config: ModelConfig, seed: int, policy: PolicyConfig = DEFAULT) -> Policy:
    """The base model, itself to be trained or with a fresh LoRA adapter on every linear layer.

    Args:
        config: Which model, how its weights are kept, rank of the adapter.
        seed: Of the adapter's initial weights.
        policy: Which library loads it, and what of it is trained.
    """
    bound_kernels()
    vllm = use_vllm(config.fast_inference, config.quantization, "Unsloth", policy)
    environment = {name: os.environ[name] for name in LEFT_BEHIND if name in os.environ}
    if policy.backend == "unsloth" and (note := several_gpus()):
        print(note)
    with quiet(), hub_errors(config.model_path):
        if policy.backend == "unsloth":
            model = _load_unsloth(config, seed, policy, vllm)
        else:
            model = _load_transformers(config, seed, policy)
    tokenizer = load_tokenizer(config.model_path, config.chat_template_kwargs)
    vllm = vllm and has_engine(model, config)
    loaded = Policy(model, tokenizer, vllm, policy.backend, environment)
    if config.adapter:
        trained = runs_root() / config.adapter / "train/adapter"
        if trained.is_dir():
            refuse_changed(Run(config.adapter), "03", "or set model.adapter to another")
        load_weights(loaded, trained if trained.is_dir() else project_path(config.adapter))
    return loaded


def has_engine(model: "PreTrainedModel", config: ModelConfig) -> bool:
    """Return whether Unsloth started vLLM, as it was asked to; if not, say who generates.

    Raises:
        RuntimeError: It did not, and `model.fast_inference` is "vllm".
    """
    if hasattr(model, "vllm_engine"):
        return True
    reason = f"Unsloth does not run {config.model_path} with vLLM on this GPU"
    if config.fast_inference == "vllm":
        raise RuntimeError(f"{reason}: set model.fast_inference = 'detect'")
    print(f"{reason}: transformers generates the completions, which takes longer")
    return False


@cache
def _live_folder() -> tempfile.TemporaryDirectory:
    """Return this process's folder for the configuration of its live adapter."""
    return tempfile.TemporaryDirectory(prefix="live_adapter")


def import_unsloth() -> Any:
    """Unsloth's `FastLanguageModel`."""
    # On a GPU Unsloth writes compiled code, by default into the working directory.
    compiled = str(runs_root() / ".unsloth_compiled_cache")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", compiled)
    from unsloth import FastLanguageModel

    return FastLanguageModel


def _load_unsloth(
    config: ModelConfig, seed: int, policy: PolicyConfig, vllm: bool
) -> "PreTrainedModel":
    options: dict[str, Any] = {}
    if vllm:
        options = {
            "max_lora_rank": config.lora_rank,
            "gpu_memory_utilization": policy.gpu_memory_utilization,
            "unsloth_vllm_standby": policy.standby,
        }
        for name, value in UNSLOTHS_VLLM.items():
            os.environ.setdefault(name, value)
        _announce_standby(policy.standby)
    fast = import_unsloth()
    # Recomputing activations halves a GPU's memory need and slows a CPU by half.
    checkpointing = "unsloth" if cuda_available() else False
    model, _ = fast.from_pretrained(
        find_model(config.model_path),
        max_seq_length=config.max_seq_length,
        load_in_4bit=config.quantization == "4bit",
        full_finetuning=policy.finetuning == "full",
        use_gradient_checkpointing=checkpointing,
        fast_inference=vllm,
        **options,
    )
    if policy.finetuning == "full":
        return model
    model = unpacked(model)
    return fast.get_peft_model(
        model,
        **_lora(config, model),
        use_gradient_checkpointing=checkpointing,
        random_state=seed,
    )


def _announce_standby(standby: bool) -> None:
    """Unsloth reads this variable when it is imported, and lays out the GPU's memory by it."""
    name, value = "UNSLOTH_VLLM_STANDBY", "1" if standby else "0"
    if "unsloth" in sys.modules and os.environ.get(name, "0") != value:
        raise RuntimeError(
            f"policy.standby = {standby} comes too late: Unsloth was imported with the other "
            "value. Restart the kernel"
        )
    os.environ[name] = value


def _load_transformers(config: ModelConfig, seed: int, policy: PolicyConfig) -> "PreTrainedModel":
    import torch

    model = unpacked(load_base(config.model_path, config.quantization))
    if not cuda_available():
        lm_head.install()
    if policy.finetuning == "full":
        return model
    from peft import LoraConfig, get_peft_model

    # Input gradients for checkpointing are TRL's to enable; the rest of peft's preparation for
    # 4 bit casts norms and head to fp32, which Unsloth does not either.
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**_lora(config, model), task_type="CAUSAL_LM"))


def _lora(config: ModelConfig, model: "PreTrainedModel") -> dict[str, Any]:
    """Arguments of peft's LoraConfig; Unsloth passes them on to it.

    Raises:
        ValueError: `model.lora_targets` names what the model does not have.
    """
    layers, experts, others = trainable_weights(model)
    if config.lora_targets != "all-linear":
        names = config.lora_targets.replace(" ", "").split(",")
        for name in names:
            refuse_unknown("model.lora_targets", name, sorted(set(map(_leaf, layers + experts))))
        layers = [name for name in layers if _leaf(name) in names]
        experts = [name for name in experts if _leaf(name) in names]
    kinds = set(map(_leaf, layers))  # a name that only these have stands for all of them
    return {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": layers if kinds & set(map(_leaf, others)) else sorted(kinds),
        "target_parameters": experts or None,
    }


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


class Weights(NamedTuple):
    """What of a model an adapter may train, by names as without an adapter.

    layers: Linear layers of the decoder.
    experts: Stacked weights of experts, one tensor for all of them.
    others: Linear layers that stay as they are: what reads images, routers, and mamba's
        `out_proj`, whose fused kernel reads the weight past an adapter (peft refuses it, too).
    """

    layers: list[str]
    experts: list[str]
    others: list[str]


def trainable_weights(model: "PreTrainedModel") -> Weights:
    """Of a base, with adapters or without. The head is in none of the three."""
    from torch.nn import Linear

    decoder = dict.fromkeys(model.get_decoder().modules())
    mamba = {m.out_proj for m in decoder if hasattr(m, "A_log") and hasattr(m, "in_proj")}
    layers, others = [], []
    for name, module in model.named_modules():
        name = name.removesuffix(".base_layer")
        if not isinstance(module, Linear) or ".lora_" in name:
            continue
        if module in decoder and module not in mamba and _leaf(name) not in ("gate", "router"):
            layers.append(name)
        elif module is not model.get_output_embeddings():
            others.append(name)
    stacked = [name for name, _ in model.named_parameters() if ".experts." in name]
    experts = [name for name in stacked if not name.endswith((".weight", "bias"))]
    return Weights(layers, [name.replace(".base_layer", "") for name in experts], others)
