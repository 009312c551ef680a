"""`@reward`: failures, columns, reasons."""

import sys
from types import SimpleNamespace

import pytest

from grpo_nb.rewards import Scored, call, reward


def test_a_column_that_is_missing_or_of_another_length_is_named():
    @reward()
    def needs(response: str, answer: str) -> float:
        return 0.0

    with pytest.raises(ValueError, match=r"needs the column 'answer'.*\['expected'\]"):
        needs(completions=["1"], expected=["1"])
    with pytest.raises(ValueError, match="'answer' has 1 values for 2 completions"):
        needs(completions=["1", "2"], answer=["1"])


def test_a_failure_raises_with_its_completion_or_is_skipped_counted_and_explained():
    def fragile(response: str) -> float:
        return float(response)

    with pytest.raises(ValueError, match="could not convert") as caught:
        reward()(fragile)(completions=["1", "x"])
    assert caught.value.__notes__ == ["in reward fragile, completion 1 of the batch"]
    fragile, counted, completions = reward(on_error="skip")(fragile), {}, ["1", "x", "nan", "inf"]
    scores = fragile(completions=completions, log_metric=counted.__setitem__)
    assert scores == [1.0, None, None, None]
    assert counted == {"fragile/skipped": 3.0}
    reasons = [scored.reason for scored in fragile.explain(completions=completions)]
    assert reasons[1].startswith("ValueError: could not convert")
    assert reasons[2:] == ["the scorer gave nan", "the scorer gave inf"]


def test_a_score_out_of_range_is_refused():
    generous = reward(high=0.5)(lambda response: 2.0)
    with pytest.raises(ValueError, match=r"gave 2.0, outside its declared range \[0.0, 0.5\]"):
        generous(completions=["x"])


def test_optional_columns_prompt_and_trainer_state_are_read_and_reasons_logged():
    @reward(high=10)
    def reads(response: str, prompt: str, unit: str = "", trainer_state=None) -> Scored:
        return Scored(len(prompt) + trainer_state.global_step, f"{response}{unit}")

    logged, given = {}, {"prompts": ["ab"], "trainer_state": SimpleNamespace(global_step=3)}
    assert reads(completions=["5"], **given, log_extra=logged.__setitem__) == [5.0]
    assert logged == {"reads/reason": ["5"]}
    assert reads.explain(completions=["5"], **given, unit=["kg"])[0].reason == "5kg"


def test_past_the_allowed_share_of_none_it_raises():
    @reward(max_none_share=0.05)
    def dry(response: str) -> Scored:
        return Scored(None if response == "x" else 1.0, "no expected")

    assert dry(completions=["a"] * 19 + ["x"]).count(None) == 1
    assert dry(completions=["x"]) == [None]
    with pytest.raises(RuntimeError, match=r"could not score 2 of 20 .* no expected"):
        dry(completions=["a"] * 18 + ["x"] * 2)


def test_leaving_the_program_is_an_error_of_the_reward():
    leaver = reward()(lambda response: sys.exit(7))
    with pytest.raises(RuntimeError, match=r"called sys.exit\(7\): return a score or None") as left:
        call(leaver, completions=["x"])
    assert "completion 0 of the batch" in left.value.__notes__[0]
    skipping = reward(on_error="skip")(leaver.score)
    assert call(skipping, completions=["x"]) == [None]

    async def leaves(**_):
        sys.exit()

    for func in (leaves, lambda **_: sys.exit()):
        with pytest.raises(RuntimeError, match=r"reward .* called sys.exit\(None\)"):
            call(func, completions=["x"])
