"""Evaluate whether one model beats another on held-out prompts, with what certainty, and why.

`evaluate` compares models: each prompt is answered by each model, and `report` compares the models
in pairs, prompt by prompt, with the intervals and tests of `stats`. `options` gives it the rewards
and settings of a run.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.evaluation.evaluate": "options",
        "grpo_nb.evaluation.report": (
            "DECODING Evaluation before_after build checks save table with_accuracy"
        ),
    },
)
