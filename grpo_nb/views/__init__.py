"""Show tables and charts, and give the notebooks their widgets.

`show_tables` makes a notebook display DataFrames in full, and `completions` puts a few completions
side by side. `charts` draws a run's training and an evaluation. `TrainingDashboard` shows training
as it runs, and `RewardLab` shows what rewards pay. The widgets are optional: a notebook that is run
from top to bottom gives the same results without them.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.views.charts": "before_after training_charts",
        "grpo_nb.views.dashboard": "TrainingDashboard",
        "grpo_nb.views.reward_lab": "RewardLab lab",
        "grpo_nb.views.tables": "completions show_tables",
    },
)
