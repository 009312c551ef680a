"""GRPO notebook workbench: teach a language model a verifiable skill, and prove the gain.

`check_rewards` tests the rewards of any GRPO notebook, `preflight` tries the largest step of its
trainer, `Monitor` and `Guard` watch it, and `autopsy` reads the log of any run.
The notebooks of this project call the modules of this package; README.md says how to start.
"""

from typing import Any

__version__ = "0.1.0"
TOOLS = {
    "RewardVerdict": "grpo_nb.reward_lab.check",
    "check_rewards": "grpo_nb.reward_lab.check",
    "autopsy": "grpo_nb.diagnosis",
    "Monitor": "grpo_nb.training.monitor",
    "Guard": "grpo_nb.training.guard",
    "preflight": "grpo_nb.training.preflight",
}
__all__ = ["Guard", "Monitor", "RewardVerdict", "autopsy", "check_rewards", "preflight"]


def __getattr__(name: str) -> Any:
    """Import a tool when it is used first, so that importing the package stays quick."""
    if name not in TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(TOOLS[name]), name)
