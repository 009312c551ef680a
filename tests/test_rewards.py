import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.rewards import (
    incremental_format_reward,
    load_preset,
    numeric_correctness_reward,
    reasoning_quality_reward,
    reward,
    soft_xml_format_reward,
)

GOOD = "<reasoning>7+8=15, 4+3+1=8</reasoning><answer>85</answer>"
MATH = load_preset("math")


def one(func, text, **columns):
    return func(completions=[text], **{name: [value] for name, value in columns.items()})[0]


def as_trl_calls(func, completions, **columns):
    """With every keyword TRL 1.15 passes."""
    return func(
        prompts=[[{"role": "user", "content": "?"}]] * len(completions),
        completions=completions,
        completion_ids=[[1]] * len(completions),
        trainer_state=None,
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
        **columns,
    )


@pytest.mark.parametrize("func", MATH.reward_funcs)
def test_every_shape_of_completion_scores_alike(func):
    message = {"role": "assistant", "content": GOOD}
    parts = [{"type": "text", "text": GOOD[:20]}, {"type": "text", "text": GOOD[20:]}]
    shapes = [GOOD, [message], [{"role": "assistant", "content": parts}]]
    assert as_trl_calls(func, shapes, answer=["85"] * 3) == [1.0] * 3
    nothing = ["", [], [{"role": "assistant", "content": None}]]
    assert as_trl_calls(func, nothing, answer=["85"] * 3) == [0.0] * 3


@pytest.mark.parametrize("func", MATH.reward_funcs)
@given(text=st.text(alphabet="<>/ranswe oig1+=2.,x", max_size=200))
def test_scores_stay_in_the_declared_range(func, text):
    low, high = func.range
    assert low <= one(func, text, answer="85") <= high


@pytest.mark.parametrize("func", MATH.reward_funcs)
def test_a_megabyte_of_anything_is_scored(func):
    for flood in ("<answer>", "<reasoning>1+1", "1+", "1 + ", " ", "<reasoning>" + "9" * 99):
        assert one(func, flood * (1_000_000 // len(flood)), answer="85") is not None


@pytest.mark.parametrize("func", MATH.reward_funcs)
def test_rewards_pickle_and_run_in_threads(func):
    again = pickle.loads(pickle.dumps(func))
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda _: one(again, GOOD, answer="85"), range(64)))
    assert scores == [1.0] * 64


def test_names_are_unique_and_weights_fit():
    assert len(set(MATH.names)) == len(MATH.reward_funcs) == len(MATH.reward_weights)


def test_correctness_outweighs_all_the_rest():
    weights = dict(zip(MATH.names, MATH.reward_weights, strict=True))
    correctness = weights.pop("numeric_correctness_reward")
    assert correctness > sum(weights.values())


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(ValueError, match="'maths': did you mean 'math'"):
        load_preset("maths")


def test_no_answer_earns_correctness_by_saying_several_things():
    cheats = [
        "<answer>84 85</answer>",
        "<answer>84</answer><answer>85</answer>",
        "<answer>" + " ".join(map(str, range(100))) + "</answer>",
        "<reasoning>85</reasoning>",
        "<answer></answer>",
        "85",
    ]
    assert numeric_correctness_reward(completions=cheats, answer=["85"] * 6) == [0.0] * 6


def test_a_gold_that_is_no_number_gives_none_not_zero():
    assert one(numeric_correctness_reward, GOOD, answer="eighty-five") is None


@pytest.mark.parametrize(
    ("text", "soft", "incremental"),
    [
        (GOOD, 1.0, 1.0),
        (f"\n{GOOD}\n".replace("><", ">\n<"), 1.0, 1.0),
        ("<reasoning>a</reasoning><answer></answer>", 0.0, 1.0),
        ("<reasoning> </reasoning><answer>1</answer>", 0.0, 1.0),
        ("<answer>1</answer><reasoning>a</reasoning>", 0.0, 0.5),
        (f"so: {GOOD}", 0.0, 1.0),
        (f"{GOOD} done", 0.0, 1.0),
        (GOOD + GOOD, 0.0, 0.0),
        ("<reasoning>a</reasoning><answer>1", 0.0, 0.75),
        ("<reasoning>a", 0.0, 0.25),
        ("<reasoning><answer></answer></reasoning>", 0.0, 0.5),
        ("a", 0.0, 0.0),
    ],
)
def test_format(text, soft, incremental):
    assert one(soft_xml_format_reward, text) == soft
    assert one(incremental_format_reward, text) == incremental


@pytest.mark.parametrize(
    ("steps", "score"),
    [
        ("7+8=15, 4+3+1=8", 1.0),
        ("12-7=5, 5-1=3", 0.5),
        ("she earned 0.2 x 50 = $10", 1.0),
        ("1,000 + 500 = 1,500", 1.0),
        ("2+3*4=14", 1.0),
        ("10/4=2.5", 1.0),
        ("3-5=-2", 1.0),
        ("1/0=5", 0.0),
        ("7+8=15" + " and 7+8=15" * 20 + ", 1+1=3", 0.5),
        ("therefore, first, because, thus", 0.0),
        ("a=1", 0.0),
    ],
)
def test_reasoning_is_judged_by_its_equations(steps, score):
    assert one(reasoning_quality_reward, f"<reasoning>{steps}</reasoning>") == score


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"needs the column 'answer'.*\['gold'\]"):
        numeric_correctness_reward(completions=["1"], gold=["1"])


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="'answer' has 1 values for 2 completions"):
        numeric_correctness_reward(completions=["1", "2"], answer=["1"])


def test_an_exception_raises_with_the_completion_it_came_from():
    @reward()
    def broken(response: str) -> float:
        return float(response)

    with pytest.raises(ValueError, match="could not convert") as caught:
        broken(completions=["1", "x"])
    assert caught.value.__notes__ == ["in reward broken, completion 1 of the batch"]


def test_skipped_failures_are_none_and_counted():
    counted = {}

    @reward(on_error="skip")
    def fragile(response: str) -> float:
        return float(response)

    completions = ["1", "x", "nan", "inf"]
    scores = fragile(completions=completions, log_metric=counted.__setitem__)
    assert scores == [1.0, None, None, None]
    assert counted == {"fragile/skipped": 3.0}


def test_a_score_out_of_range_is_refused():
    @reward(high=0.5)
    def generous(response: str) -> float:
        return 2.0

    with pytest.raises(ValueError, match=r"generous gave 2.0, outside .* \[0.0, 0.5\]"):
        generous(completions=["x"])


def test_optional_columns_may_be_absent():
    @reward()
    def lenient(response: str, unit: str = "") -> float:
        return float(unit in response)

    assert lenient(completions=["5 cm"]) == [1.0]
    assert lenient(completions=["5 cm"], unit=["kg"]) == [0.0]
