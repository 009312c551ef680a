# ruff: noqa: F401 (the imports below are the package's public names)
"""Evaluate whether one model beats another on held-out prompts, with what certainty, and why.

`answering` answers every prompt with each model, `report` compares the models with intervals,
`placebos` tests whether the reward caused the gain, and `leaderboard` ranks runs. `answer_file`
answers a file of questions with a run's model.
"""

from grpo_nb.evaluation.answering import Candidate, evaluate_model, run, score_rows
from grpo_nb.evaluation.placebos import caused
from grpo_nb.evaluation.report import DECODING, Evaluation, before_after, build, checks, save, table
