# ruff: noqa: F401 (what is imported here is what the room hands out)
"""What a person looks at: tables, pictures, and the widgets of the notebooks.

`table` and `score_sheet` are tables, `charts` draws a training, many runs and an evaluation,
`TrainingDashboard` shows a training as it runs, `Chat` asks a run's models, and `lab`, which is the
`RewardLab` or the `EnvironmentLab`, and `CompletionBrowser` are for hands. A notebook that is run
from top to bottom gives the same without.
"""

from grpo_nb.views.charts import before_after, learning_curves, prompt_lengths, training_charts
from grpo_nb.views.chat import Chat
from grpo_nb.views.dashboard import TrainingDashboard
from grpo_nb.views.environment_lab import EnvironmentLab
from grpo_nb.views.reward_lab import RewardLab, lab, open_lab
from grpo_nb.views.tables import score_sheet, table
from grpo_nb.views.widgets import CompletionBrowser
