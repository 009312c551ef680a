"""Named lists of rewards with weights: correctness heaviest, format as a first step.

Weights are sums of powers of two where they can be. With 0.3 and 0.1 the rounding of equal
totals leaves a standard deviation of 1e-7, which TRL counts as a signal: its
frac_reward_zero_std then stays near 0 when every completion of a group earns the same.
"""

from grpo_nb.config import refuse_unknown
from grpo_nb.rewards.contract import Preset
from grpo_nb.rewards.correctness import numeric_correctness_reward
from grpo_nb.rewards.format import incremental_format_reward, soft_xml_format_reward
from grpo_nb.rewards.quality import reasoning_quality_reward

PRESETS = {
    "math": Preset(
        [
            numeric_correctness_reward,
            soft_xml_format_reward,
            incremental_format_reward,
            reasoning_quality_reward,
        ],
        [1.0, 0.25, 0.25, 0.125],
    ),
}


def load_preset(name: str) -> Preset:
    """The preset of that name.

    >>> load_preset("math").names[0]
    'numeric_correctness_reward'
    """
    refuse_unknown("rewards.preset", name, list(PRESETS))
    return PRESETS[name]
