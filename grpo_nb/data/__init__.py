# ruff: noqa: F401 (the imports below are the package's public names)
"""Prepare rows for training: read any source, validate, measure, and split without leakage.

    report = data.prepare(run, config.data, config.seed, count_tokens)
    rows = data.load(run, "train")

`load` decodes the images of the rows it returns.
"""

from grpo_nb.data.preparation import prepare, with_system_prompt, worked_rows
from grpo_nb.data.report import LEAKS, REPEATED, checks
from grpo_nb.data.store import load, replace_train
from grpo_nb.data.validate import CONTRADICTORY, refuse_unusable_rows
