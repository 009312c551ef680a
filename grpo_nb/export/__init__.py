"""Stage 04's merge with its parity gate, and the model card."""

from grpo_nb.export.card import model_card, write_card
from grpo_nb.export.merging import check_complete, merge, trained_paths

__all__ = ["check_complete", "merge", "model_card", "trained_paths", "write_card"]
