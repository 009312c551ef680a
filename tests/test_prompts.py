"""What a completion says: its text, its tags, its answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.rewards.answers import extract_boxed, extract_hash_answer, extract_tag
from grpo_nb.rewards.forms import TAGS
from grpo_nb.rewards.prompts import build_prompt, completion_text


def test_a_prompt_without_system_prompt_is_one_user_turn():
    assert build_prompt("2 + 2?", "") == [{"role": "user", "content": "2 + 2?"}]


@given(st.text().filter(lambda text: "answer>" not in text))
def test_what_stands_between_the_tags_is_extracted_and_stripped(inner):
    assert TAGS.extract(f"before<answer>{inner}</answer>after") == inner.strip()


@given(st.text(alphabet="<>/answer 12"))
def test_extraction_never_raises_and_never_returns_a_tag(text):
    TAGS.extract(text)
    inner = extract_tag(text, "answer")
    assert inner is None or ("<answer>" not in inner and "</answer>" not in inner)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", None),
        ("   ", None),
        ("85", "85"),
        ("<answer>85", None),  # opened and never closed: truncated
        ("</answer>85<answer>", None),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("<answer><answer>1</answer>", "1"),
        ("<answer>1</answer></answer>", "1"),
        (r"<answer>\boxed{85}</answer>", "85"),
        (r"so \boxed{1} then \boxed{2}", r"\boxed{1}, \boxed{2}"),
        (r"\boxed{85", r"\boxed{85"),
        ("steps\n#### 85", "85"),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_complete_answer_counts(text, answer):
    assert TAGS.extract(text) == answer


def test_a_megabyte_of_tags_is_read_in_linear_time():
    for flood in ("<answer>" * 130_000, "</answer>" * 110_000, "<answer" * 150_000):
        assert extract_tag(flood, "answer") is None
    assert extract_boxed(r"\boxed{" * 150_000) is None
    assert extract_boxed(r"\boxed{" + "{}" * 500_000 + "}") == "{}" * 500_000


def test_every_shape_of_completion_gives_its_text():
    assistant = {"role": "assistant"}
    parts = [{"type": "text", "text": "8"}, {"type": "image"}, {"type": "text", "text": "5"}]
    assert completion_text("85") == "85"
    assert completion_text([assistant | {"content": "85"}]) == "85"
    assert completion_text([assistant | {"content": parts}]) == "85"
    assert completion_text([assistant | {"content": None}]) == ""
    assert completion_text([assistant]) == ""
    assert completion_text([]) == ""


def test_the_last_hash_mark_counts():
    assert extract_hash_answer("#### 1\nno: #### 2") == "2"
    assert extract_hash_answer("####") is None
    assert extract_hash_answer("18") is None
