"""The merge of stage 04 with its parity gate."""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.export.merging": "merge",
        "grpo_nb.export.of_run": "merge_run questions_of trained_paths where",
    },
)
