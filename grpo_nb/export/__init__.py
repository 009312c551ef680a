"""Stage 04: merge with a parity gate; then GGUF, the hub, a model card."""

from grpo_nb.export.adapter import copy_adapter, trained_paths
from grpo_nb.export.card import model_card
from grpo_nb.export.gguf import to_gguf
from grpo_nb.export.hub import plan_push, push
from grpo_nb.export.merging import check_complete, merge
from grpo_nb.export.parity import summary

__all__ = [
    "check_complete",
    "copy_adapter",
    "merge",
    "model_card",
    "plan_push",
    "push",
    "summary",
    "to_gguf",
    "trained_paths",
]
