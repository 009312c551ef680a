"""Completions from a dense copy of the policy, on a CPU several times faster than from itself.

A 4-bit policy dequantises every weight for every token, and its LoRA layers run beside. The copy
holds what both amount to as plain fp32 weights, renewed before each generation. The gradient
comes from the policy as ever; `sampling/logp_difference` says how far the two are apart.
"""

from typing import TYPE_CHECKING, Any

from grpo_nb.models import cuda_available
from grpo_nb.training import decode
from grpo_nb.training.prefix import full_attention

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Rollouts:
    """Of a GRPOTrainer: generates from a dense copy, where `from_copy` says so."""

    from_copy: bool = False
    _copy: "DenseCopy | None" = None
    _sampled: Any = None

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> Any:
        import torch

        if not self.from_copy or images is not None or multimodal_fields:
            return super()._generate_single_turn(  # type: ignore[misc]
                prompt_ids, images, multimodal_fields, *args, **kwargs
            )
        model = self.accelerator.unwrap_model(self.model)
        with torch.no_grad():
            self._copy = self._copy or DenseCopy(model)
            return decode.sample(
                self._copy.renewed(),
                prompt_ids,
                max_completion_length=self.max_completion_length,
                stops=self.eos_token_ids,
                pad=self._tokenizer.pad_token_id,
                temperature=self.temperature,
                processors=_processors(self),
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        fresh = self.from_copy and "old_per_token_logps" not in inputs
        self._sampled = inputs if fresh else None
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._sampled = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._sampled is not None and "sampling_per_token_logps" in self._sampled:
            mask = self._sampled["completion_mask"]
            apart = (result[0].detach() - self._sampled["sampling_per_token_logps"]).abs() * mask
            mean = (apart.sum() / mask.sum().clamp(min=1)).item()
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["sampling/logp_difference"].append(mean)
        return result


def _processors(trainer: Any) -> Any:
    """TRL's settings of sampling beside the temperature, as transformers' generate applies them."""
    from transformers import generation

    found = generation.LogitsProcessorList()
    if trainer.repetition_penalty not in (None, 1.0):
        found.append(generation.RepetitionPenaltyLogitsProcessor(trainer.repetition_penalty))
    if trainer.top_k:
        found.append(generation.TopKLogitsWarper(trainer.top_k))
    if trainer.top_p is not None and trainer.top_p < 1:
        found.append(generation.TopPLogitsWarper(trainer.top_p))
    if trainer.min_p is not None:
        found.append(generation.MinPLogitsWarper(trainer.min_p))
    return found


def choose(trainer: Any, rollouts: str) -> bool:
    """Whether completions come from a copy.

    Args:
        trainer: A GRPOTrainer.
        rollouts: `policy.rollouts`.

    Raises:
        ValueError: "copy", and it is not possible here.
    """
    if rollouts == "model" or (rollouts == "auto" and cuda_available()):
        return False
    lacking = _lacks(trainer)
    if lacking and rollouts == "copy":
        raise ValueError(f"policy.rollouts = 'copy' needs {lacking}: set it to 'auto'")
    return not lacking


def _lacks(trainer: Any) -> str:
    """What is missing to generate from a copy, or nothing."""
    from peft.tuners.lora import LoraLayer

    args, model = trainer.args, trainer.model
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    needs = {
        "no vLLM and no continuous batching": not (
            trainer.use_vllm or trainer.use_transformers_continuous_batching
        ),
        "no trl.generation_kwargs and no trl.cache_implementation": not (
            args.generation_kwargs or args.cache_implementation
        ),
        "policy.finetuning = 'lora'": bool(layers) and all("lora_" in name for name in trained),
        "LoRA without variants such as DoRA": not any(module.lora_variant for module in layers),
        "one process": trainer.accelerator.num_processes == 1,
        "a decoder of text with full attention in every layer": (
            not trainer._is_vlm and base._supports_sdpa and full_attention(base)
        ),
    }
    return next((need for need, met in needs.items() if not met), "")


class DenseCopy:
    """The policy's base with its LoRA merged in, without quantisation.

    Args:
        policy: A peft model; its base may be quantised.
    """

    def __init__(self, policy: "PreTrainedModel") -> None:
        import torch
        from peft.tuners.lora import LoraLayer

        base = policy.get_base_model()
        modules = dict(base.named_modules())
        config = type(base.config).from_dict(_plain(base.config))
        with torch.random.fork_rng():  # its first weights are drawn, and the training's are not
            self.model = type(base)._from_config(
                config, dtype=_dtype(base), attn_implementation=decode.attention()
            )
        self.model.to(base.device).eval().requires_grad_(False)
        for name, weight in self.model.state_dict().items():
            weight.copy_(_dense(modules, name))
        self.merged = [
            (
                module,
                self.model.get_submodule(name).weight,
                self.model.get_submodule(name).weight.clone(),
            )
            for name, module in modules.items()
            if isinstance(module, LoraLayer)
        ]

    def renewed(self) -> "PreTrainedModel":
        """The copy, with the adapter as it is now."""
        import torch

        for module, weight, base in self.merged:
            torch.add(base, module.get_delta_weight("default"), out=weight.data)
        return self.model


def _plain(config: Any) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k != "quantization_config"}


def _dtype(base: "PreTrainedModel") -> "torch.dtype":
    import torch

    return base.dtype if cuda_available() else torch.float32


def _dense(modules: dict[str, Any], name: str) -> "torch.Tensor":
    """A weight of the base by its name, dequantised."""
    from peft.utils.integrations import dequantize_module_weight

    path, _, leaf = name.rpartition(".")
    module = getattr(modules[path], "base_layer", modules[path])
    return dequantize_module_weight(module) if leaf == "weight" else getattr(module, leaf)
