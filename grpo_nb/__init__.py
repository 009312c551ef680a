"""GRPO notebook workbench: teach a language model a verifiable skill, and prove the gain.

Each tool takes objects that a notebook with TRL or Unsloth has anyway. `check_rewards` tests
rewards, `RewardLab` shows what they pay, and `sample` gives completions to both. `preflight` tries
a trainer's largest step, `difficulty` lets the trainer draw the rows that still teach something,
and `Monitor` and `Guard` watch the training. `autopsy` reads the log of any run. `evaluate`
compares models, `placebo` shuffles the rewards to show whether they caused a gain, and `merge`
writes the trained model. `reward` turns a scorer of one completion into a reward function for TRL,
`check_environment` plays an environment without a model, and `prepare` reads rows. `start` begins a
stage of a run, as each notebook of this project does.
"""

from grpo_nb.lazy import exports

__version__ = "0.1.0"
TOOLS = {
    "grpo_nb.reward_lab.check": "RewardVerdict check_rewards",
    "grpo_nb.reward_lab.sampling": "sample",
    "grpo_nb.rewards.contract": "reward",
    "grpo_nb.training.placebo": "placebo",
    "grpo_nb.data.preparation": "prepare",
    "grpo_nb.diagnosis": "autopsy",
    "grpo_nb.environments.check": "check_environment",
    "grpo_nb.evaluation.evaluate": "evaluate",
    "grpo_nb.export.merging": "merge",
    "grpo_nb.runs.directory": "start",
    "grpo_nb.training.difficulty": "difficulty",
    "grpo_nb.training.guard": "Guard",
    "grpo_nb.training.monitor": "Monitor",
    "grpo_nb.training.preflight": "preflight",
    "grpo_nb.views.reward_lab": "RewardLab",
}
__all__ = ["Guard", "Monitor", "RewardLab", "RewardVerdict"]
__all__ += ["autopsy", "check_environment", "check_rewards", "difficulty", "evaluate", "merge"]
__all__ += ["placebo", "preflight", "prepare", "reward", "sample", "start"]
__getattr__ = exports(__name__, TOOLS)
