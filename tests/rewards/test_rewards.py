"""Every built-in reward: the contract, the adversarial tables, the properties of all, its page."""

import runpy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb import rewards
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.rewards.sets import PRESETS, built_in

GOOD = "<reasoning>7+8=15, 4+3+1=8</reasoning><answer>85</answer>"
EXPECTED = {"json_fields_reward": '{"a": 1}', "multiple_choice_reward": "B"}
COLUMNS = {"entry": '{"task": "chain_sum", "options": {}, "metadata": {}}'}
SLOW = {"code_execution_reward", "code_generation_reward", "math_verify_reward"}  # a process each
ALL = {name: func for name, func in built_in().items() if name not in (*SLOW, "environment_reward")}
each_reward = pytest.mark.parametrize("func", ALL.values(), ids=list(ALL))
ALPHABET = '<>/ranswe oig1+=2.,x{}[]":`\n\\½٣é'


def score_all(func, completions, **given):
    values = COLUMNS | {"answer": EXPECTED.get(func.__name__, "85")} | given
    columns = {name: [values[name]] * len(completions) for name in func.columns}
    return func(completions=completions, **columns)


def one(func, text, **given):
    return score_all(func, [text], **given)[0]


@each_reward
@settings(max_examples=40)
@given(texts=st.lists(st.text(alphabet=ALPHABET, max_size=80), min_size=1, max_size=4))
def test_scores_are_finite_in_range_deterministic_and_blind_to_row_order(func, texts):
    low, high = func.range
    scores = score_all(func, texts)
    assert all(low <= score <= high for score in scores)
    assert score_all(func, texts) == scores
    assert score_all(func, texts[::-1]) == scores[::-1]
    assert [one(func, text) for text in texts] == scores


@each_reward
def test_a_megabyte_of_anything_is_scored(func):
    floods = ("<answer>", "<reasoning>1+1", "1+", "1 + ", " ", "<answer>1</answer>", "[1] ", "{")
    floods += ("```python\n", "a ", r"\boxed{", "1,", "<think>", "½", '{"a":', "#### ")
    for flood in floods:
        assert one(func, flood * (1_000_000 // len(flood))) is not None


def test_in_a_preset_correctness_weighs_most():
    for preset in PRESETS.values():
        first, *others = preset.reward_weights
        assert first >= sum(others)


def test_tolerance_is_an_option_with_a_name_of_its_own():
    loose = rewards.numeric_correctness_reward.configured(relative=0.01)
    assert loose.__name__ == "numeric_correctness_reward_relative_0.01"
    assert one(loose, "100", answer="101") == 1.0
    assert one(loose, "100", answer="102") == 0.0
    with pytest.raises(ValueError, match="has no option 'relativ'; it has absolute, relative"):
        rewards.numeric_correctness_reward.configured(relativ=0.01)


def test_golds_that_are_no_numbers_give_none_and_too_many_of_them_raise():
    with pytest.raises(RuntimeError, match=r"could not score 30 of 30 .* 'many' is not a number"):
        score_all(rewards.numeric_correctness_reward, [GOOD] * 30, answer="many")


TABLES = {
    "numeric_correctness_reward": [
        ("<answer>85</answer>", 1.0, "tagged"),
        ("<answer>84</answer><answer>85</answer>", 1.0, "the last answer counts"),
        ("<answer>85", 0.0, "truncated"),
    ],
    "soft_format_reward": [
        (f"\n{GOOD}\n".replace("><", ">\n<"), 1.0, "white space is free"),
        ("<reasoning> </reasoning><answer>1</answer>", 0.0, "empty reasoning"),
        (f"so: {GOOD}", 0.0, "text before"),
        (GOOD + GOOD, 0.0, "twice"),
    ],
    "incremental_format_reward": [
        (GOOD, 1.0, "all four"),
        ("<reasoning>a", 0.25, "a first step"),
        ("<reasoning><answer></answer></reasoning>", 0.5, "crossed"),
    ],
    "no_syntax_error_reward": [
        ("<answer>def f(x): return x</answer>", 1.0, "in the answer tag"),
        ("```python\n'all good'\n```", 0.0, "does nothing"),
        ("x = 1", 0.0, "code in prose"),
        ("```python\n" + "-" * 90_000 + "1\n```", 0.0, "a bomb for the parser's stack"),
    ],
    "json_format_reward": [
        ('{"a": 1}', 1.0, "an object"),
        ('<answer>```json\n{"a": 1}\n```</answer>', 1.0, "fenced, tagged"),
        ("1", 0.0, "a bare scalar"),
        ('{"a": NaN}', 0.0, "NaN is not JSON"),
        ("[" * 100_000, 0.0, "a bomb for the parser"),
    ],
    "json_fields_reward": [
        ('{"a": 1}', 1.0, "equal"),
        ('{"a": true}', 0.0, "true is not 1"),
        ('{"a": "1"}', 0.0, "text is not a number"),
        ('{"a": 1, "b": 2}', 0.5, "an extra field"),
    ],
    "reasoning_quality_reward": [
        ("<reasoning>12-7=5, 5-1=3</reasoning>", 0.5, "one that does not"),
        ("<reasoning>0.2 x 50 = $10</reasoning>", 1.0, "units"),
        ("<reasoning>1/0=5</reasoning>", 0.0, "a division by zero"),
        ("<reasoning>7+8=15" + " 7+8=15" * 9 + " 1+1=3</reasoning>", 0.5, "repetition"),
        ("<reasoning>therefore because thus so</reasoning>", 0.0, "talk"),
        ("7+8=15", 0.0, "outside the tag"),
    ],
    "no_repetition_penalty": [("a b c a b c a b c", -4 / 7, "a loop")],
    "multiple_choice_reward": [
        ("<answer>B</answer>", 1.0, "bare"),
        ("<answer>b. Paris</answer>", 1.0, "with its text"),
        ("<answer>B or A</answer>", 0.0, "two options"),
        ("<answer>Boats</answer>", 0.0, "a word"),
    ],
    "exact_match_reward": [("<answer>850</answer>", 0.0, "contains the expected")],
    "fuzzy_match_reward": [
        ("<answer>85</answer>", 1.0, "equal"),
        ("<answer>nothing alike at all</answer>", 0.0, "below the threshold"),
    ],
    "overlap_reward": [("85 85 85 85", 0.4, "stuffing costs precision"), ("", 0.0, "nothing")],
}  # fmt: skip
READ_ANSWERS = {name for name, func in ALL.items() if "answer" in func.columns}
CASES = [(name, *case) for name, cases in TABLES.items() for case in cases]


@pytest.mark.parametrize("name", sorted(READ_ANSWERS - {"json_fields_reward"}))
def test_nothing_does_not_equal_an_empty_gold(name):
    """In a graded reward 0 may be the middle: what counts is that nothing is paid."""
    scores = score_all(ALL[name], ["", "<answer></answer>"], answer="")
    assert not any(score and score > 0 for score in scores)


@pytest.mark.parametrize(("name", "text", "score", "reason"), CASES)
def test_adversarial_tables(name, text, score, reason):
    assert one(ALL[name], text) == pytest.approx(score), reason


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("ideal_length_reward", {100: 1.0, 150: 0.6065}),
        ("min_length_reward", {10: 0.5, 10_000: 1.0}),
        ("max_length_penalty", {2: 0.0, 768: -0.5}),
    ],
)
def test_length_is_in_tokens_where_trl_gives_them_else_in_words(name, scores):
    ids = [[0] * tokens for tokens in scores]
    scored = ALL[name].explain(completions=["two words"] * 2, completion_ids=ids)
    assert [one.score for one in scored] == pytest.approx(list(scores.values()), abs=1e-4)
    assert [one.reason for one in scored] == [f"{tokens} tokens" for tokens in scores]
    assert ALL[name].explain(completions=["two words"])[0].reason == "2 words"


TESTS = {"function": "f", "cases": [[[1], 2], [[2], 3]]}
ADDS = "```python\ndef f(x):\n    return x + 1\n```"


@pytest.mark.parametrize(
    ("text", "score", "reason"),
    [
        (ADDS, 1.0, ""),
        ("<answer>def f(x): return x + 1</answer>", 1.0, ""),
        (ADDS.replace("x + 1", "2"), 0.5, "wrong value: got 2, expected 3"),
        (ADDS.replace("x + 1", "1 / 0"), 0.0, "raised ZeroDivisionError"),
        ("```python\nwhile True: pass\n```", 0.0, "timed out after 1 s"),
        ("def f(x): return x + 1", 0.0, "no code in a fenced block"),
    ],
)
def test_code_is_scored_by_its_tests(text, score, reason):
    func = rewards.code_execution_reward.configured(seconds=1.0)
    (scored,) = func.explain(completions=[text], tests=[TESTS])
    assert scored.score == score
    assert reason in scored.reason


def test_code_generation_weighs_format_syntax_and_execution():
    texts = [ADDS, ADDS.replace("x + 1", "2"), "```python\ndef f(:\n```", "nothing"]
    scores = rewards.code_generation_reward(completions=texts, tests=[TESTS] * 4)
    assert scores == [1.0, 0.625, 0.125, 0.0]


def test_the_page_is_what_the_rewards_declare():
    page = (PROJECT_ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    markdown = runpy.run_path(str(PROJECT_ROOT / "docs/list_rewards.py"))["markdown"]
    assert page == markdown(), "run python docs/list_rewards.py"
    assert set(built_in()) <= set(dir(rewards))


LISTS = {
    "MATH_REASONING_REWARDS": "math",
    "CODE_GENERATION_REWARDS": "code",
    "SUMMARIZATION_REWARDS": "summarization",
    "QA_REWARDS": "qa",
    "JSON_EXTRACTION_REWARDS": "json_extraction",
}
TAGGED, BLOCK = "<reasoning>\na\n</reasoning>\n<answer>\n2\n</answer>", "```python\nx = 1\n```"


KNOWN = """exact_match fuzzy_match numeric_correctness math_verify code_execution math_problem
    soft_format incremental_format json_format ideal_length min_length reasoning_quality
    no_syntax_error code_generation"""


def test_lists_and_formats_that_people_know_are_ours_under_their_names():
    names = {f"{name}_reward" for name in KNOWN.split()}
    assert names | {"max_length_penalty", "no_repetition_penalty"} <= set(dir(rewards))
    for name, preset in LISTS.items():
        funcs = getattr(rewards, name)
        assert isinstance(funcs, list) and funcs == PRESETS[preset].reward_funcs
        assert funcs is not PRESETS[preset].reward_funcs, "who appends to it changes no preset"
    for name, pays in (
        ("strict_xml", [1, 1, 0]),
        ("soft_xml", [1, 1, 0]),
        ("code_block", [0, 0, 1]),
    ):
        func = getattr(rewards, f"{name}_format_reward")
        assert func.__name__ == f"{name}_format_reward"
        assert score_all(func, [TAGGED, TAGGED.replace("\n", ""), BLOCK]) == pays
