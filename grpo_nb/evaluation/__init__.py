"""Evaluate whether one model beats another on held-out prompts, with what certainty, and why.

`evaluate` lets each model answer each prompt. `report` compares the models in pairs, prompt by
prompt, with the intervals and tests of `stats`. `options` returns the rewards and settings of a run
as arguments of `evaluate`.
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
