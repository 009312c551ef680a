"""Views for a notebook: the Reward Lab, the training dashboard, the completion browser, the chat.

They hold no logic and nothing that a later cell needs; `bench`, `sheet`, `dashboard` and `infer` do
the work, and the notebook shows the same without them.
"""

from grpo_nb.views.widgets.browser import CompletionBrowser
from grpo_nb.views.widgets.chat import ChatPanel
from grpo_nb.views.widgets.dashboard import TrainingDashboard
from grpo_nb.views.widgets.reward_lab import RewardLab

__all__ = ["ChatPanel", "CompletionBrowser", "RewardLab", "TrainingDashboard"]
