"""Views for a notebook: the Reward Lab and the completion browser.

They hold no logic and nothing that a later cell needs; `bench` and `sheet` do the work, and
the notebook shows the same without them.
"""

from grpo_nb.widgets.browser import CompletionBrowser
from grpo_nb.widgets.reward_lab import RewardLab

__all__ = ["CompletionBrowser", "RewardLab"]
