"""Rewards in TRL's shape: a batch of completions in, one `float | None` each out."""

from grpo_nb.rewards.contract import Preset, reward
from grpo_nb.rewards.correctness import numeric_correctness_reward
from grpo_nb.rewards.format import incremental_format_reward, soft_xml_format_reward
from grpo_nb.rewards.presets import load_preset
from grpo_nb.rewards.quality import reasoning_quality_reward

__all__ = [
    "Preset",
    "incremental_format_reward",
    "load_preset",
    "numeric_correctness_reward",
    "reasoning_quality_reward",
    "reward",
    "soft_xml_format_reward",
]
