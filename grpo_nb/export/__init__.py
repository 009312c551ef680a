"""The merge of stage 04 with its parity gate, and the model card."""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.export.card": "model_card write_card",
        "grpo_nb.export.merging": "merge refuse_incomplete",
        "grpo_nb.export.of_run": "merge_run trained_paths",
    },
)
