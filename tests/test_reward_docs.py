import re
import runpy

from grpo_nb.rewards.presets import built_in
from grpo_nb.runs import PROJECT_ROOT

WRITTEN = runpy.run_path(str(PROJECT_ROOT / "docs/list_rewards.py"))["markdown"]()


def test_the_page_is_what_the_rewards_declare():
    page = (PROJECT_ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    assert page == WRITTEN, "run python docs/list_rewards.py"


def test_every_reward_is_listed_and_says_what_it_resists():
    for name, func in built_in().items():
        assert f"`{name}`" in WRITTEN
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


def test_every_reward_of_trl_is_listed_beside_ours():
    import trl.rewards

    listed = re.findall(r"^\| `(\w+)` \| (–|`\w+`) \|", WRITTEN, re.MULTILINE)
    theirs = {name for name in dir(trl.rewards) if name.endswith(("_reward", "_punishment"))}
    assert {name for name, _ in listed} == theirs
    assert {ours.strip("`") for _, ours in listed} - {"–"} <= built_in().keys()
