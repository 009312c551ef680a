"""A Reward Lab to drive without a browser."""

from hackable import ROWS

from grpo_nb.rewards import load_preset
from grpo_nb.views import RewardLab

MATH = load_preset("math")
RIGHT = "<reasoning>1+1=2</reasoning><answer>{}</answer>"


def open_lab(reward_funcs=None, rows=ROWS, **options):
    """The preset's rewards, with two completions of the first row: right, and cut off."""
    sampled = [[RIGHT.format(ROWS[0]["answer"]), "7"]]
    options = {"reward_weights": None if reward_funcs else MATH.reward_weights, **options}
    return RewardLab(reward_funcs or MATH.reward_funcs, rows, sampled, **options)
