"""Names of `grpo_nb.pipeline.notebooks`, for those who still import them from here."""

from grpo_nb.pipeline.notebooks import *  # noqa: F403
