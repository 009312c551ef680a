"""Environments: what a model acts in, by tools and over turns; played, tested and attacked.

`load` reads one by name; `play` lets a model play it, as TRL's trainer will; `answer` is what asks
a model, whether or not its task has an environment.
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
