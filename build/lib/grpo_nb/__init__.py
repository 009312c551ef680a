"""GRPO notebook workbench: teach a language model a verifiable skill, and prove the gain.

`check_rewards` tests the rewards of any GRPO notebook. The notebooks of this project call the
modules of this package; README.md says how to start.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["RewardVerdict", "check_rewards"]


def __getattr__(name: str) -> Any:
    """Import a tool when it is used first, so that importing the package stays quick."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("grpo_nb.reward_lab.check"), name)
