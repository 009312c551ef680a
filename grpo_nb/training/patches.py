"""What Unsloth has to have changed in TRL before a training on a GPU begins.

Unsloth rewrites TRL's source by its text, and where it does not find that text it only logs so.
Each change that a training relies on is therefore looked up by its effect.
"""

import inspect
from collections.abc import Callable
from typing import Any

from grpo_nb.machine import version_of
from grpo_nb.models import Policy, cuda_available


def refuse_missing(policy: Policy, base: type) -> None:
    """Refuse to build a trainer where a change that a training relies on is missing.

    Args:
        policy: The policy to train, loaded.
        base: The class that our trainer was built on.

    Raises:
        RuntimeError: Unsloth was imported after our trainer; or a change is missing, with the
            changes and the versions.
    """
    import trl

    if trl.GRPOTrainer is not base:
        raise RuntimeError(
            "Unsloth was imported after the trainer, which is built on TRL's class and not on "
            "Unsloth's: restart the kernel, and load the policy before training.Trainer is used"
        )
    if policy.backend != "unsloth" or not cuda_available():
        return
    if missing := [effect for effect, there in effects(policy).items() if not there]:
        versions = ", ".join(f"{name} {version_of(name)}" for name in ("unsloth", "trl", "vllm"))
        raise RuntimeError(
            f"Unsloth has not changed TRL as this training relies on: {'; '.join(missing)}. "
            f"Installed are {versions}: install requirements.txt again and restart the kernel, or "
            "set policy.backend = 'transformers'"
        )


def effects(policy: Policy) -> dict[str, bool]:
    """Return each effect that a training relies on, and whether it is there."""
    import torch
    from trl import GRPOTrainer

    kinds = {kind.__name__: kind for kind in GRPOTrainer.__mro__}
    written = kinds.get("_UnslothGRPOTrainer", GRPOTrainer)
    scoring = _code(written._generate_and_score_completions)
    common = {
        "the trainer is Unsloth's": written is not GRPOTrainer,
        "each step switches gradient checkpointing on": "for_training" in scoring.co_names,
    }
    if not policy.vllm:
        return common
    from trl.generation.vllm_generation import VLLMGeneration

    start, sync = _code(VLLMGeneration._init_vllm), _code(VLLMGeneration.sync_weights)
    handed = hasattr(VLLMGeneration.generate, "_unsloth_vllm_generation_lora_wrapped")
    trained = {weight.dtype for weight in policy.model.parameters() if weight.requires_grad}
    return common | {
        "TRL takes Unsloth's engine and starts no second one": "vllm_engine" in start.co_consts,
        "TRL copies no weights into that engine": "shared_weights" in sync.co_consts,
        "each generation gets the adapter": handed and hasattr(policy.model, "load_lora"),
        # vLLM scales an adapter of its own type in place, and with it the one that is trained.
        "the adapter is float32": trained == {torch.float32},
    }


def _code(function: Callable[..., Any]) -> Any:
    return inspect.unwrap(function).__code__
