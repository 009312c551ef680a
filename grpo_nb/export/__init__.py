"""Stage 04: merge with a parity gate; then GGUF, the hub, a model card."""

from grpo_nb.export.merge import check_complete, copy_adapter, merge
from grpo_nb.export.parity import summary

__all__ = ["check_complete", "copy_adapter", "merge", "summary"]
