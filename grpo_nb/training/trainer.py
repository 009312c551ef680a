"""TRL's GRPOTrainer over the policy, with checkpoints, memory and metrics made safe."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from grpo_nb.models import Policy, sharded
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.combine import in_thread, waits
from grpo_nb.runs.config import RunConfig
from grpo_nb.training import ranks
from grpo_nb.training.arguments import grpo_arguments
from grpo_nb.training.checkpoints import Sealed, adaptive_rewards
from grpo_nb.training.dynamic import DynamicSampling, refuse_with_processes
from grpo_nb.training.measured import Measured
from grpo_nb.training.prefix import SharedPrompts, can_share
from grpo_nb.training.rollouts import Rollouts, choose

if TYPE_CHECKING:
    from trl import GRPOTrainer

_with_vllm: list[Path] = []  # folders of the trainers that started a vLLM in this process


def save_trained(model: Any, folder: Path, **gathered: Any) -> None:
    """What was trained of a model: its adapter, or all of it."""
    # With beta > 0 TRL lays a frozen copy beside it, "ref".
    only = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **only, **gathered)


def train_in_32_bit(model: Any) -> None:
    """TRL's trainers cast a 4-bit model's adapter to bf16; a resumed one would hold fp32."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


class Kept:
    """Of a GRPOTrainer: the sampler is at hand, and the adapter can be saved by itself."""

    row_sampler: Any = None
    _gathered: Mapping[str, Any] = MappingProxyType({})

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.row_sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        return self.row_sampler

    def save_adapter(self, folder: Path) -> None:
        """The adapter (or the whole model, if all of it is trained) and the tokenizer."""
        save_trained(self.accelerator.unwrap_model(self.model), folder, **self._gathered)
        self.processing_class.save_pretrained(folder)

    def gather_weights(self) -> None:
        """On all processes, before the first one saves: sharded weights come together there."""
        if sharded():
            self._gathered = {"state_dict": self.accelerator.get_state_dict(self.model_wrapped)}

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """On all processes: the model generates, though its weights are sharded."""
        from trl.models.utils import unwrap_model_for_generation

        whole = unwrap_model_for_generation(self.model_wrapped, self.accelerator)  # ZeRO-3
        with whole, unsharded_root(self.model_wrapped):
            yield

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        trained: list[tuple[Any, Any]] = []
        if self.use_transformers_continuous_batching:  # TRL casts to 16 bit, and leaves it so
            trained = [(one, one.data) for one in self.model.parameters() if one.requires_grad]
        with unsharded_root(self.model_wrapped):
            found = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        for weight, data in trained:
            weight.data = data
        return found


@contextmanager
def unsharded_root(model: Any) -> Iterator[None]:
    """Under FSDP2 the weights outside of the layers (embeddings, head) are gathered meanwhile.

    peft's `generate` calls the model that it wraps, past the hook that would gather them.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first layer to run takes itself for the root
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def trainer_arguments(
    config: RunConfig, folder: Path, rewards: RewardSet, policy: Policy
) -> dict[str, Any]:
    """What GRPOConfig is built from."""
    arguments = grpo_arguments(config, folder, policy.vllm, ranks.count())
    return arguments | {"reward_weights": list(rewards.reward_weights)}


def build_trainer(
    policy: Policy,
    rewards: RewardSet,
    rows: Sequence[Mapping[str, Any]],
    config: RunConfig,
    folder: Path,
) -> "GRPOTrainer":
    """A GRPOTrainer that writes completions/ and checkpoints to `folder`."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    refuse_with_processes(config.train.dynamic_sampling)
    beside = config.trl.get("vllm_mode") == "colocate"
    if beside and _with_vllm:
        raise RuntimeError(
            "trl.vllm_mode = 'colocate' starts a vLLM for each trainer, and this process has one, "
            "which keeps its memory: restart the kernel, and the training goes on. With several "
            "stages set trl.vllm_mode = 'server'"
        )
    if "ref" in getattr(policy.model, "peft_config", {}):
        policy.model.delete_adapter("ref")  # with beta > 0 TRL adds one, and refuses a second
    arguments = trainer_arguments(config, folder, rewards, policy)
    parts = (Kept, Sealed, DynamicSampling, Measured, Rollouts, SharedPrompts)
    kind = type("GRPOTrainer", (*parts, GRPOTrainer), {})
    trainer = kind(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=[in_thread(f) if waits(f) else f for f in rewards.reward_funcs],
        args=GRPOConfig(**arguments),
        # Rows may hold dicts and lists of any type, which Arrow would merge or refuse.
        train_dataset=Dataset.from_list([dict(row) for row in rows], on_mixed_types="use_json"),
    )
    _with_vllm.extend([folder] if beside else [])
    trainer.keep_checkpoints = config.train.keep_checkpoints
    trainer.dynamic_rounds = config.train.dynamic_sampling
    trainer.share_prompts = config.policy.share_prompts and can_share(policy)
    trainer.from_copy = choose(trainer, config.policy.rollouts)
    trainer.remove_callback(PrinterCallback)
    for reward in adaptive_rewards(trainer.reward_funcs):
        reward.everyones = ranks.gather  # each process scores a share of the step
    train_in_32_bit(policy.model)
    return trainer
