# ruff: noqa: F401 (the imports below are the package's public names)
"""Rewards in TRL's shape: they take a batch of completions and return a `float | None` for each."""

from grpo_nb.answers.forms import FORMS, TAGS, Form
from grpo_nb.rewards.calls import call
from grpo_nb.rewards.code import code_execution_reward, code_generation_reward
from grpo_nb.rewards.combine import Adaptive, gated
from grpo_nb.rewards.contract import Reward, Scored, declared_range, reward
from grpo_nb.rewards.correctness import (
    environment_reward,
    exact_match_reward,
    fuzzy_match_reward,
    json_fields_reward,
    math_problem_reward,
    math_verify_reward,
    multiple_choice_reward,
    numeric_correctness_reward,
    overlap_reward,
)
from grpo_nb.rewards.familiar import (
    CODE_GENERATION_REWARDS,
    JSON_EXTRACTION_REWARDS,
    MATH_REASONING_REWARDS,
    QA_REWARDS,
    SUMMARIZATION_REWARDS,
    code_block_format_reward,
    soft_xml_format_reward,
    strict_xml_format_reward,
)
from grpo_nb.rewards.format import (
    incremental_format_reward,
    json_format_reward,
    no_syntax_error_reward,
    soft_format_reward,
)
from grpo_nb.rewards.judge import GroupJudge, LLMJudge
from grpo_nb.rewards.length import ideal_length_reward, max_length_penalty, min_length_reward
from grpo_nb.rewards.load import load_preset, load_rewards
from grpo_nb.rewards.sets import PRESETS, RewardSet, reward_set
from grpo_nb.rewards.style import (
    citation_reward,
    no_repetition_penalty,
    reasoning_quality_reward,
    worked_steps_reward,
)
