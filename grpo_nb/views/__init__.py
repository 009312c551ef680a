# ruff: noqa: F401 (the imports below are the package's public names)
"""Show tables and charts, and give the notebooks their widgets.

`show_tables` makes a notebook display DataFrames in full; `score_sheet` and `completions` render
tables; `charts` draws a run's training, many runs, and an evaluation. `TrainingDashboard` shows
training as it runs, `Chat` asks a run's models, and `lab` opens the interactive `RewardLab`. The
widgets are optional: a notebook that is run from top to bottom gives the same results without them.
"""

from grpo_nb.views.charts import before_after, learning_curves, training_charts, warm_up_chart
from grpo_nb.views.chat import Chat
from grpo_nb.views.dashboard import TrainingDashboard
from grpo_nb.views.reward_lab import RewardLab, lab
from grpo_nb.views.tables import completions, score_sheet, show_tables
