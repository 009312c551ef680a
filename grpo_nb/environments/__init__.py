"""Environments: what a model acts in, by tools and over turns; played, tested and attacked.

`load` reads one by name; `play` lets a model play it, as TRL's trainer will; `answer` is what asks
a model, whether or not its task has an environment.
"""

from grpo_nb.environments.contract import Environment, check_rows, load, tool
from grpo_nb.environments.play import answer, play, replay

__all__ = ["Environment", "answer", "check_rows", "load", "play", "replay", "tool"]
