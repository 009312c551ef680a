# ruff: noqa: F401 (the imports below are the package's public names)
"""Play, test and attack environments, in which a model calls tools over several turns.

`load` returns an environment by its name. `check_environment` finds its faults. `play` lets a model
play episodes as TRL's trainer does. `answer` samples completions whether or not the task has an
environment.
"""

from grpo_nb.environments.check import check_environment
from grpo_nb.environments.contract import Environment, identity, load, of, tool
from grpo_nb.environments.play import answer, check_rows, play, replay, tools_of
