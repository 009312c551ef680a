"""Stage 04's merge with its parity gate; the model card, and the upload to the hub."""

from grpo_nb.export.hub import model_card, plan_push, push
from grpo_nb.export.merging import check_complete, merge, trained_paths

__all__ = ["check_complete", "merge", "model_card", "plan_push", "push", "trained_paths"]
