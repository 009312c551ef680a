from grpo_nb.rewards.catalogue import PATH, markdown
from grpo_nb.rewards.presets import built_in


def test_the_page_is_what_the_rewards_declare():
    assert PATH.read_text(encoding="utf-8") == markdown(), "run python -m grpo_nb.rewards.catalogue"


def test_every_reward_is_listed_and_says_what_it_resists():
    page = markdown()
    for name, func in built_in().items():
        assert f"`{name}`" in page
        if hasattr(func, "settings"):
            assert func.settings.resists, name


def test_the_names_in_circulation_are_all_there():
    from grpo_nb import rewards

    names = """exact_match fuzzy_match numeric_correctness math_verify code_execution
        no_syntax_error strict_xml_format soft_xml_format incremental_format json_format
        code_block_format ideal_length min_length reasoning_quality citation math_problem
        code_generation"""
    for name in [f"{name}_reward" for name in names.split()]:
        assert callable(getattr(rewards, name))
    assert callable(rewards.max_length_penalty)
    assert callable(rewards.no_repetition_penalty)
