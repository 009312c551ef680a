"""Evaluate whether one model beats another on held-out prompts, with what certainty, and why.

`evaluate` compares models in any notebook. For a run, `answering` answers every prompt with each
model, `report` compares the models with intervals, `placebos` tests whether the reward caused the
gain, and `leaderboard` ranks runs. `answer_file` answers a file of questions with a run's model.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.evaluation.answering": "Candidate evaluate_model run score_rows",
        "grpo_nb.evaluation.placebos": "caused",
        "grpo_nb.evaluation.report": ("DECODING Evaluation before_after build checks save table"),
    },
)
