"""Define further names, known from guides to GRPO, for rewards and sets of this package.

The lists hold functions in TRL's shape: `GRPOTrainer(reward_funcs=MATH_REASONING_REWARDS, …)`.
Their weights are `PRESETS[…].reward_weights`, for `GRPOConfig(reward_weights=…)`.
"""

from grpo_nb.answers import FORMS
from grpo_nb.rewards.format import soft_format_reward
from grpo_nb.rewards.sets import PRESETS

# Both require each tag once, in order, with content, and no other text. Line breaks are ignored.
strict_xml_format_reward = soft_format_reward.configured("strict_xml_format_reward")
soft_xml_format_reward = soft_format_reward.configured("soft_xml_format_reward")
code_block_format_reward = soft_format_reward.configured(
    "code_block_format_reward", form=FORMS["code"]
)
MATH_REASONING_REWARDS = list(PRESETS["math"].reward_funcs)
CODE_GENERATION_REWARDS = list(PRESETS["code"].reward_funcs)
SUMMARIZATION_REWARDS = list(PRESETS["summarization"].reward_funcs)
QA_REWARDS = list(PRESETS["qa"].reward_funcs)
JSON_EXTRACTION_REWARDS = list(PRESETS["json_extraction"].reward_funcs)
