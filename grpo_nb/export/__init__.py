# ruff: noqa: F401 (what is imported here is what the room hands out)
"""Stage 04's merge with its parity gate, and the model card."""

from grpo_nb.export.card import model_card, write_card
from grpo_nb.export.merging import check_complete, merge, trained_paths
