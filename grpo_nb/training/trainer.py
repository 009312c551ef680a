"""TRL's GRPOTrainer over the policy, with checkpoints, memory and metrics made safe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.config import RunConfig
from grpo_nb.models import Policy
from grpo_nb.rewards import RewardSet
from grpo_nb.training.arguments import grpo_arguments
from grpo_nb.training.checkpoints import Sealed
from grpo_nb.training.halving import Halving
from grpo_nb.training.measured import Measured
from grpo_nb.training.prefix import SharedPrompts, can_share
from grpo_nb.training.rollouts import Rollouts, choose

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Kept:
    """Of a GRPOTrainer: the sampler is at hand, and the adapter can be saved by itself."""

    row_sampler: Any = None

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.row_sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        return self.row_sampler

    def save_adapter(self, folder: Path) -> None:
        """The adapter (or the whole model, if all of it is trained) and the tokenizer."""
        model = self.accelerator.unwrap_model(self.model)
        # With beta > 0 TRL lays a frozen copy beside it, "ref".
        only = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
        model.save_pretrained(folder, **only)
        self.processing_class.save_pretrained(folder)


def trainer_arguments(
    config: RunConfig, folder: Path, rewards: RewardSet, policy: Policy
) -> dict[str, Any]:
    """What GRPOConfig is built from."""
    arguments = grpo_arguments(config, folder, policy.vllm)
    return arguments | {"reward_weights": list(rewards.reward_weights)}


def build_trainer(
    policy: Policy,
    rewards: RewardSet,
    rows: Sequence[Mapping[str, Any]],
    config: RunConfig,
    folder: Path,
) -> "GRPOTrainer":
    """A GRPOTrainer that writes completions/ and checkpoints to `folder`."""
    import torch
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    if "ref" in getattr(policy.model, "peft_config", {}):
        policy.model.delete_adapter("ref")  # with beta > 0 TRL adds one, and refuses a second
    arguments = trainer_arguments(config, folder, rewards, policy)
    parts = (Kept, Sealed, Measured, Halving, Rollouts, SharedPrompts, GRPOTrainer)
    kind = type("GRPOTrainer", parts, {})
    trainer = kind(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=list(rewards.reward_funcs),
        args=GRPOConfig(**arguments),
        # Rows may hold dicts and lists of any type, which Arrow would merge or refuse.
        train_dataset=Dataset.from_list([dict(row) for row in rows], on_mixed_types="use_json"),
    )
    trainer.keep_checkpoints = config.train.keep_checkpoints
    trainer.share_prompts = config.policy.share_prompts and can_share(policy)
    trainer.from_copy = choose(trainer, config.policy.rollouts)
    trainer.remove_callback(PrinterCallback)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:  # TRL casts a 4-bit model's adapter to bf16
            parameter.data = parameter.data.to(torch.float32)
    return trainer
