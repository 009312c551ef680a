"""Load the policy (the model to train) by Unsloth or by transformers, and open engines."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.files import project_path, read_json, runs_root
from grpo_nb.machine import bound_kernels
from grpo_nb.models import hub
from grpo_nb.models.engine import (
    Engine,
    Sample,
    TransformersEngine,
    VllmEngine,
    free_memory,
    open_vllm,
    use_vllm,
)
from grpo_nb.models.weights import (
    ADAPTER_CONFIG,
    cuda_available,
    leaf,
    load_base,
    load_checkpoint,
    name_layers,
    never_sample_images,
    trained_base,
    unpacked,
    use_torch_head,
)
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from grpo_nb.runs.settings import ModelConfig, RunConfig

# Unsloth and TRL set these variables for their own vLLM. A later engine must not see them, whether
# it runs in this process or in a child process.
ENGINE_VARIABLES = ["VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "LOCAL_RANK", "WORLD_SIZE"]
ENGINE_VARIABLES += ["MASTER_ADDR", "MASTER_PORT"]
# Our values of Unsloth's variables for vLLM, unless the user has set them. FlashInfer's sampler
# refuses a T4, and merging the adapter into 16-bit weights rounds most of a small update away.
UNSLOTHS_VLLM = {"UNSLOTH_VLLM_NO_FLASHINFER": "1", "UNSLOTH_VLLM_MERGED_ROLLOUT": "0"}

LORA = {"r", "lora_alpha", "target_modules"}  # the arguments that peft and Unsloth share


class Policy(NamedTuple):
    """Hold a model that is being trained, and provide an engine that samples from it.

    vllm: Whether Unsloth started vLLM with the model.
    backend: "unsloth" or "transformers".
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    vllm: bool
    backend: str = "unsloth"

    @property
    def processing_class(self) -> "PreTrainedTokenizerBase | ProcessorMixin":
        """Return the processor with which TRL encodes prompts, or else the tokenizer."""
        return getattr(self.tokenizer, "processor", self.tokenizer)

    @property
    def engine(self) -> Engine:
        """Return an engine for the policy's current weights; sampling does not disturb training."""
        if self.vllm:
            return VllmEngine(self.model.vllm_engine, self.tokenizer, self.live_adapter)
        return engine_of(self.model, self.tokenizer, partial(_for_inference, self))

    def live_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's LoRA request for the adapter's current weights; ignore the arguments."""
        return self.model.load_lora(_live_folder().name, load_tensors=True)

    def generate(self, prompts: Sequence[list[Message]], **sampling: Any) -> list[list[Sample]]:
        """Sample completions, as `Engine.generate` does."""
        return self.engine.generate(prompts, **sampling)

    def close(self) -> None:
        """Free the memory and make the model unusable, even if other names still refer to it.

        A notebook's kernel keeps running after the last cell, and keeps every name.
        """
        import torch

        if hasattr(self.model, "vllm_engine"):
            self.engine.close()
            del self.model.vllm_engine
        before = _variables_before()
        for name in ENGINE_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for owner in (*self.model.modules(), *tensors):
            vars(owner).pop("quant_state", None)  # both a 4-bit layer and its weight refer to it
        for tensor in tensors:
            tensor.grad, tensor.data = None, torch.empty(0, dtype=tensor.dtype)
        self.model.is_closed = True
        free_memory()


def policy_of(model: "PreTrainedModel", processing_class: Any) -> Policy:
    """Make a policy of a model that a person loaded, by Unsloth or by transformers.

    Args:
        model: The model, with its adapter if it has one.
        processing_class: The model's tokenizer or processor.
    """
    backend = "unsloth" if hasattr(model, "for_inference") else "transformers"
    tokenizer = hub.tokenizer_of(processing_class)
    return Policy(model, tokenizer, hasattr(model, "vllm_engine"), backend)


def engine_of(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> TransformersEngine:
    """Return the fastest engine for a loaded model; the arguments are `TransformersEngine`'s."""
    from grpo_nb.models.dense import DenseEngine, dense_lacks

    kind = TransformersEngine if dense_lacks(model) else DenseEngine
    return kind(model, tokenizer, around)


def open_engine(
    model_path: str,
    *,
    adapter: Path | None,
    quantization: str,
    gpu_memory_utilization: float = 0.5,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Engine:
    """Load a model, with an adapter if one is given, and return an engine for it.

    The engine is vLLM if a GPU and vLLM are present and vLLM can load these weights, else the one
    that `engine_of` returns.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter to load; None for the model alone.
        quantization: "4bit" or "16bit".
        gpu_memory_utilization: Share of the GPU's memory that vLLM takes until it is closed.
        chat_template_kwargs: Defaults for the chat template, as in `load_tokenizer`.
    """
    tokenizer = hub.load_tokenizer(model_path, chat_template_kwargs, adapter)
    if use_vllm("detect", quantization):
        return open_vllm(model_path, adapter, quantization, gpu_memory_utilization, tokenizer)
    model = load_checkpoint(model_path, adapter=adapter, quantization=quantization)
    return engine_of(model, tokenizer)


@contextmanager
def _for_inference(policy: Policy) -> Iterator[None]:
    """Set the policy to evaluation mode without gradient checkpointing, and restore it afterwards.

    With gradient checkpointing, `generate` has no key-value cache, and its output is garbage.
    """
    model, was_training = policy.model, policy.model.training
    if policy.backend == "unsloth":
        fast_model = import_unsloth(hub.has_vision(model.config))
        fast_model.for_inference(model)
    model.eval()
    try:
        yield
    finally:
        if policy.backend == "unsloth":
            fast_model.for_training(model)
        model.train(was_training)


def set_environment(config: "RunConfig") -> None:
    """Set the variables that Unsloth and vLLM read when they are imported.

    Args:
        config: The settings of the run.

    Raises:
        RuntimeError: `model.fast_inference` is "vllm", but vLLM cannot run on this machine.
    """
    bound_kernels()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a hint to install a kernel
    _variables_before()
    if config.policy.backend == "unsloth":
        folder = str(runs_root() / ".unsloth_compiled_cache")  # else the working directory
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", folder)
    if wants_vllm(config):
        for name, value in UNSLOTHS_VLLM.items():
            os.environ.setdefault(name, value)
        os.environ["UNSLOTH_VLLM_STANDBY"] = "1" if config.model.unsloth_vllm_standby else "0"


@cache
def _variables_before() -> dict[str, str]:
    """Return ENGINE_VARIABLES as they are at the first call, before Unsloth and TRL set them."""
    return {name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ}


def wants_vllm(config: "RunConfig") -> bool:
    """Return whether Unsloth is to start vLLM with the model.

    Unsloth does not start vLLM for full fine-tuning, or if the vision tower is trained.
    """
    model = config.model
    by_unsloth = config.policy.backend == "unsloth" and not model.full_finetuning
    able = by_unsloth and not config.lora.finetune_vision_layers
    return able and use_vllm(model.fast_inference, model.quantization)


def unsloth_loads(config: "RunConfig") -> bool:
    """Return whether notebook 3 can load the policy by the two calls of an Unsloth notebook.

    `load_policy` is for all other cases: images, full fine-tuning, an adapter to begin from, and
    plain transformers.
    """
    is_lora = config.policy.backend == "unsloth" and not config.model.full_finetuning
    has_images = hub.may_have_vision(hub.find_model(config.model.model_name))
    return is_lora and not config.policy.adapter and not has_images


def load_policy(config: "RunConfig") -> Policy:
    """Load a base to train, either with a new LoRA adapter on its linear layers or in full.

    Args:
        config: The settings of the run.
    """
    name = config.model.model_name
    set_environment(config)
    with hub.quiet():
        if config.policy.backend == "unsloth":
            model = _load_unsloth(config)
        else:
            model = _load_transformers(config)
    tokenizer = hub.load_tokenizer(name, config.grpo.chat_template_kwargs)
    result = policy_of(model, tokenizer)
    if adapter := config.policy.adapter:
        folder = runs_root() / adapter / "train/adapter"
        load_weights(result, folder if folder.is_dir() else project_path(adapter))
    return result


@cache
def _live_folder() -> tempfile.TemporaryDirectory:
    """Return this process's folder, to which Unsloth writes the live adapter's configuration."""
    return tempfile.TemporaryDirectory(prefix="live_adapter")


def import_unsloth(vision: bool = False) -> Any:
    """Import and return Unsloth's `FastLanguageModel`, or its `FastVisionModel` if `vision`."""
    from unsloth import FastLanguageModel, FastVisionModel

    return FastVisionModel if vision else FastLanguageModel


def model_arguments(config: "RunConfig") -> dict[str, Any]:
    """Return the keyword arguments of `FastLanguageModel.from_pretrained` on this machine."""
    vllm = wants_vllm(config)
    names = {"gpu_memory_utilization", "unsloth_vllm_standby"}
    options = config.model.model_dump(include=names) | {"max_lora_rank": config.lora.r}
    return {
        "model_name": hub.find_model(config.model.model_name),
        "max_seq_length": config.model.max_seq_length,
        "load_in_4bit": config.model.load_in_4bit,
        "full_finetuning": config.model.full_finetuning,
        # Recomputing activations halves the memory that a GPU needs, but also a CPU's speed.
        "use_gradient_checkpointing": "unsloth" if cuda_available() else False,
        "fast_inference": vllm,
        **(options if vllm else {}),
    }


def lora_arguments(config: "RunConfig") -> dict[str, Any]:
    """Return the keyword arguments of `FastLanguageModel.get_peft_model` on this machine.

    Which layers "all-linear" means depends on the model; `name_layers` replaces it by their names.
    """
    return {
        **config.lora.model_dump(include=LORA),
        "use_gradient_checkpointing": "unsloth" if cuda_available() else False,
        "random_state": config.seed,
    }


def _load_unsloth(config: "RunConfig") -> "PreTrainedModel":
    import_unsloth()  # must precede the import of transformers, which reads the config
    vision = _reads_images(config.model)
    fast_model = import_unsloth(vision)
    hub.hide_bars()
    model, _ = fast_model.from_pretrained(**model_arguments(config))
    never_sample_images(model)
    if config.model.full_finetuning:
        return model
    model = unpacked(model)
    arguments = name_layers(model, lora_arguments(config), config.lora.finetune_vision_layers)
    if vision and not config.lora.finetune_vision_layers:
        # Unsloth matches leaf names in the decoder.
        leaves = {leaf(name) for name in arguments["target_modules"]}
        arguments |= {"target_modules": sorted(leaves), "finetune_vision_layers": False}
    return fast_model.get_peft_model(model, **arguments)


def _reads_images(config: "ModelConfig") -> bool:
    """Return whether Unsloth loads the model with `FastVisionModel`, which needs a GPU.

    Raises:
        ValueError: There is no GPU, and without a GPU Unsloth would load only a part of the model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as TEXT

    base = hub.read_config(hub.find_model(config.model_name))
    if not hub.has_vision(base) or cuda_available():
        return hub.has_vision(base)
    if TEXT.get(type(base), None) is not hub.auto_class(base)._model_mapping[type(base)]:
        why = f"Unsloth loads the vision-language model {config.model_name} on a GPU only"
        raise ValueError(f"{why}: set policy.backend = 'transformers'")
    return False


def _load_transformers(config: "RunConfig") -> "PreTrainedModel":
    import torch

    model = unpacked(load_base(config.model.model_name, config.model.quantization))
    use_torch_head()
    if config.model.full_finetuning:
        return model
    from peft import LoraConfig, get_peft_model

    # peft's preparation for 4-bit training is left out: TRL enables the input gradients, and
    # Unsloth does not cast the norms and the head to fp32 either.
    torch.manual_seed(config.seed)
    lora = config.lora.model_dump(include=LORA)
    arguments = name_layers(model, lora, config.lora.finetune_vision_layers)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **arguments))


def load_weights(policy: Policy, folder: Path) -> None:
    """Overwrite the policy's weights in place with a saved adapter or a saved full model.

    Args:
        policy: The policy. If it has an adapter, only the adapter changes.
        folder: A folder with safetensors, and with adapter_config.json if they are an adapter's.

    Raises:
        FileNotFoundError: The policy has an adapter, but the folder contains none.
        ValueError: The base, the names of the tensors or the adapter's scale differ from the
            policy's.
    """
    model = policy.model
    if hasattr(model, "peft_config"):
        from peft import load_peft_weights, set_peft_model_state_dict

        config, saved = model.peft_config["default"], read_json(folder / ADAPTER_CONFIG)
        trained_base(config.base_model_name_or_path, folder)
        if (saved["r"], saved["lora_alpha"]) != (config.r, config.lora_alpha):
            raise ValueError(
                f"the adapter in {folder} has lora.r = {saved['r']} and lora.lora_alpha = "
                f"{saved['lora_alpha']}, the policy {config.r} and {config.lora_alpha}: load the "
                "policy with those of the adapter"
            )
        result = set_peft_model_state_dict(model, load_peft_weights(str(folder), "cpu"))
        missing = [name for name in result.missing_keys if ".default." in name]
    else:
        from safetensors.torch import load_file

        files = folder.glob("*.safetensors")
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        result = model.load_state_dict(tensors, strict=False)
        missing = set(result.missing_keys) - model.all_tied_weights_keys.keys()
    if wrong := sorted([*missing, *result.unexpected_keys]):
        raise ValueError(
            f"{folder} does not fit the policy, which was loaded with another lora.target_modules "
            f"or model.full_finetuning: {wrong[0]} is only in one of them"
        )
