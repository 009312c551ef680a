"""Verify that Unsloth has applied the patches to TRL that training on a GPU needs.

Unsloth searches TRL's source for passages to replace, and only logs one that it does not find.
This module therefore looks for the effect of each patch that training relies on.
"""

import inspect
from collections.abc import Callable
from typing import Any

from grpo_nb.machine import version_of
from grpo_nb.models import Policy, cuda_available


def refuse_missing(policy: Policy, base: type) -> None:
    """Refuse to build a trainer if a patch of Unsloth's that training relies on was not applied.

    Args:
        policy: The loaded policy to train.
        base: The trainer's class.

    Raises:
        RuntimeError: Unsloth was imported after the trainer's class, or patches are missing. In the
            second case, the message lists the missing effects and the versions.
    """
    import trl

    if not issubclass(base, trl.GRPOTrainer):
        raise RuntimeError(
            "GRPOTrainer was imported before Unsloth, so it is TRL's class and not Unsloth's: "
            "restart the kernel, and import unsloth before trl"
        )
    if policy.backend != "unsloth" or not cuda_available():
        return
    if missing := [effect for effect, present in effects(policy).items() if not present]:
        versions = ", ".join(f"{name} {version_of(name)}" for name in ("unsloth", "trl", "vllm"))
        raise RuntimeError(
            "Unsloth's changes to TRL that training needs are not in place: "
            f"{'; '.join(missing)}. Installed are {versions}: install requirements.txt again and "
            "restart the kernel, or set policy.backend = 'transformers'"
        )


def effects(policy: Policy) -> dict[str, bool]:
    """Return {effect: whether it is present} for the effects of the patches that training needs."""
    import torch
    from trl import GRPOTrainer

    kinds = {kind.__name__: kind for kind in GRPOTrainer.__mro__}
    trainer = kinds.get("_UnslothGRPOTrainer", GRPOTrainer)
    scoring = _code(trainer._generate_and_score_completions)
    common = {
        "the trainer is Unsloth's": trainer is not GRPOTrainer,
        "each step switches gradient checkpointing on": "for_training" in scoring.co_names,
    }
    if not policy.vllm:
        return common
    from trl.generation.vllm_generation import VLLMGeneration

    start, sync = _code(VLLMGeneration._init_vllm), _code(VLLMGeneration.sync_weights)
    passes_lora = hasattr(VLLMGeneration.generate, "_unsloth_vllm_generation_lora_wrapped")
    dtypes = {weight.dtype for weight in policy.model.parameters() if weight.requires_grad}
    return common | {
        "TRL takes Unsloth's engine and starts no second one": "vllm_engine" in start.co_consts,
        "TRL copies no weights into that engine": "shared_weights" in sync.co_consts,
        "each generation gets the adapter": passes_lora and hasattr(policy.model, "load_lora"),
        # If the adapter had vLLM's dtype, vLLM would scale it in place and so change its weights.
        "the adapter is float32": dtypes == {torch.float32},
    }


def _code(function: Callable[..., Any]) -> Any:
    return inspect.unwrap(function).__code__
