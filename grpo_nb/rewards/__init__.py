"""Rewards in TRL's shape: they take a batch of completions and return a `float | None` for each."""

from grpo_nb.lazy import exports

PLACES = {
    "grpo_nb.answers.forms": "FORMS TAGS Form",
    "grpo_nb.rewards.calls": "call",
    "grpo_nb.rewards.contract": "Reward Scored declared_range reward",
    "grpo_nb.rewards.gym": "gym_reward",
    "grpo_nb.rewards.judge": "GroupJudge LLMJudge",
    "grpo_nb.rewards.library": """code_execution_reward code_generation_reward
        environment_reward exact_match_reward fuzzy_match_reward ideal_length_reward
        incremental_format_reward json_fields_reward json_format_reward math_verify_reward
        max_length_penalty min_length_reward multiple_choice_reward no_repetition_penalty
        no_syntax_error_reward numeric_correctness_reward overlap_reward reasoning_quality_reward
        soft_format_reward""",
    "grpo_nb.rewards.load": "load_preset load_rewards",
    "grpo_nb.rewards.sets": """CODE_GENERATION_REWARDS JSON_EXTRACTION_REWARDS
        MATH_REASONING_REWARDS QA_REWARDS SUMMARIZATION_REWARDS Adaptive PRESETS RewardSet
        code_block_format_reward gated math_problem_reward reward_set soft_xml_format_reward
        strict_xml_format_reward""",
}
__all__ = " ".join(PLACES.values()).split()
__getattr__ = exports(__name__, PLACES)


def __dir__() -> list[str]:
    """List the rewards, so that a notebook completes their names."""
    return __all__
