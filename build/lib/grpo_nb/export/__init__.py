# ruff: noqa: F401 (the imports below are the package's public names)
"""The merge of stage 04 with its parity gate, and the model card."""

from grpo_nb.export.card import model_card, write_card
from grpo_nb.export.merging import merge, refuse_incomplete, trained_paths
