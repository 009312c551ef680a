# ruff: noqa: F401 (the imports below are the package's public names)
"""Prepare rows for training: read any source, validate, measure, and split without leakage.

    rows = data.prepare("openai/gsm8k", tokenizer, subset="main")
    report = data.prepare_run(run, config.data, config.seed, count_tokens)
    train = data.load(run, "train")

`load` decodes the images of the rows it returns.
"""

from grpo_nb.data.preparation import (
    Prepared,
    checks,
    prepare,
    prepare_run,
    worked_rows,
)
from grpo_nb.data.rows import answer_finder, load, plain_answer
