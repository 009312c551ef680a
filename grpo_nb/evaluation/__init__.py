"""Evaluate whether one model beats another on held-out prompts, with what certainty, and why.

`evaluate` compares models in any notebook, and `run` those of a run: each prompt is
answered by each model, and `report` compares the models with intervals.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.evaluation.evaluate": "run",
        "grpo_nb.evaluation.report": (
            "DECODING Evaluation before_after build checks save table with_accuracy"
        ),
    },
)
