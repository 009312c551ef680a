"""Environments, in which a model calls tools over several turns; played, tested and attacked.

`load` returns one by name, and `play` lets a model play episodes as TRL's trainer does. `answer`
samples completions whether or not the task has an environment.
"""

from grpo_nb.environments.contract import Environment, check_rows, identity, load, of, tool
from grpo_nb.environments.play import answer, figures, play, replay, tools_of

__all__ = [
    "Environment",
    "answer",
    "check_rows",
    "figures",
    "identity",
    "load",
    "of",
    "play",
    "replay",
    "tool",
    "tools_of",
]
