# ruff: noqa: F401 (what is imported here is what the room hands out)
"""Multi-turn environments: their contract, and examples."""

from grpo_nb.environments.contract import tool
