"""Forms: for each of them the same task is asked for, read, rewarded, attacked and referred to."""

import pytest
from hackable import lifted
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb import reward_lab
from grpo_nb.answers import FORMS, TAGS, find_form
from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import Adaptive, gated, load_preset, reward_set
from grpo_nb.rewards import numeric_correctness_reward as correct
from grpo_nb.rewards import soft_format_reward as formed
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve

EVERY = [*FORMS, "tags:think,answer", "tags:start_working_out,SOLUTION"]
THINK = "<think>\n"
each_form = pytest.mark.parametrize("name", EVERY)
each_opened = pytest.mark.parametrize("opened", ["", THINK], ids=["", "opened"])
SUMS = [(47, 38), (1, 1), (9, 6)]
ROWS = [{"prompt": [], "question": f"{a} + {b}?", "answer": str(a + b)} for a, b in SUMS]


def scores(preset, text, row=ROWS[0]):
    [line] = Bench(preset).score([row], [text])
    return dict(zip(preset.names, line, strict=True))


@each_opened
@each_form
def test_reference_wins_attacks_lose_and_a_wrong_answer_too(name, opened, runs_dir):
    preset = load_preset("math", form=name, opened=opened)
    for row in ROWS:
        full = {func.__name__: func.range[1] for func in preset.reward_funcs}
        assert scores(preset, preset.reference(row), row) == full
        wrong = scores(preset, preset.reference({"answer": "999"}), row)
        assert wrong.pop(correct.__name__) == 0 and all(wrong.values())
    said = [preset.reference(ROWS[0]), "I do not know"]
    samples = [[Sample(text, len(text), False) for text in said]] * len(ROWS)
    stage = Stage(Run("formed"), "02", resolve("tiny-cpu", {}))
    verdict = reward_lab.judge(RewardTest(stage, ROWS, Baseline(ROWS, samples), Bench(preset)))
    assert verdict.passed and len(verdict.probes) > 15, verdict


@each_form
def test_an_honest_answer_in_another_form_earns_nothing_for_its_format(name):
    for other in EVERY if find_form(name).has("marks") else ():
        text = find_form(other).reference(ROWS[0])
        assert find_form(name).is_well_formed(text) == (other == name), other


NO_MARKS = st.text(st.characters(codec="utf-8", exclude_characters="<>#`{}\\")).map(str.strip)


@each_form
@settings(max_examples=50)
@given(reasoning=NO_MARKS.filter(bool), answer=NO_MARKS.filter(bool))
def test_what_is_written_is_read(name, reasoning, answer):
    for opened in ("", THINK):
        form, line = find_form(name)._replace(opened=opened), " ".join(answer.split())
        said = form.write(reasoning, line)
        assert form.extract(said) == line
        assert form.is_well_formed(said) and form.progress(said) == 1
        assert form.reasoning(said).strip() == (reasoning if form.has("reasoning") else "")


READ = [  # form, what the template opened, completion, what is read, whether it is well-formed
    ("think+boxed", "", r"<think>1+1=2</think>It is \boxed{4}.", "4", True),
    ("think+boxed", "", r"<think>\boxed{3}? no</think>\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
    ("think+boxed", "", r"1+1=2</think>\boxed{4}", "4", False),
    ("think+boxed", "", r"<think>1+1=2 \boxed{4}", None, False),
    ("think+boxed", "", r"<think>a</think>\boxed{3} \boxed{4}", r"\boxed{3}, \boxed{4}", False),
    ("think+boxed", THINK, "1+1=2</think>\nThe answer is \\boxed{4}", "4", True),
    ("think+boxed", THINK, "</think>\nThe answer is \\boxed{4}", "4", False),
    ("think+boxed", THINK, r"1+1=2 so \boxed{4}", None, False),
    ("tags:think,answer", THINK, "1+1=2</think><answer>4</answer>", "4", True),
    ("tags", THINK, "hm</think>\n<reasoning>a</reasoning><answer>4</answer>", "4", True),
    ("tags", THINK, "<reasoning>a</reasoning><answer>4</answer>", None, False),
    ("tags:a,b", "", "<a>1</a><b>4</b>", "4", True),
    ("tags", "", "</answer>85<answer>", None, False),
    ("tags", "", "<answer><answer>1</answer></answer>", "1", False),
    ("tags", "", r"<answer>\boxed{85}</answer>", "85", False),
    ("tags", "", r"\boxed{85", r"\boxed{85", False),
    ("boxed", "", r"1+1=2 \boxed{4}, so.", "4", True),
    ("boxed", "", r"a \boxed{}", "", False),
    ("boxed", "", r"a \boxed{3} or \boxed {4}", r"\boxed{3}, \boxed{4}", False),
    ("hash", "", "1+1=2\n#### 4", "4", True),
    ("hash", "", "1+1=2\n#### 3\n#### 4", "4", False),
    ("hash", "", "1+1=2\n#### 4\nI hope so", "4\nI hope so", False),
    ("code", "", "4", "4", False),
    ("plain", "", "<answer>4</answer>", "4", False),
    ("plain", "", "Ann ran. So did Bob.", "Ann ran. So did Bob.", True),
]


@pytest.mark.parametrize(("name", "opened", "text", "answer", "formed"), READ)
def test_what_is_read_and_what_is_well_formed(name, opened, text, answer, formed):
    form = find_form(name)._replace(opened=opened)
    assert (form.extract(text), form.is_well_formed(text)) == (answer, formed)
    assert 0 <= form.progress(text) <= 1


FLOODS = ("<think>", "</think>", "<answer>", "<answer", "</answer>", r"\boxed{", "{}", "#### ")


@each_opened
@each_form
def test_a_megabyte_of_anything_is_read_in_linear_time(name, opened):
    form = find_form(name)._replace(opened=opened)
    for flood in (*FLOODS, "```python\n", "{"):
        text = flood * (1_000_000 // len(flood))
        form.extract(text), form.is_well_formed(text), form.progress(text), form.reasoning(text)


@pytest.mark.parametrize("name", ["tag", "tags:a", "tags:a,a", "tags:a b,c", "hash:a,b", "tags:"])
def test_a_form_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=r"rewards\.form '?tag'?: did you mean|rewards.form = "):
        find_form(name)


def test_a_set_follows_its_form():
    math = load_preset("math")
    assert math.form == TAGS
    assert math.in_form("tags").reward_funcs == math.reward_funcs
    boxed = math.in_form("boxed")
    assert "\\boxed{}" in boxed.form.system_prompt and boxed.names == math.names
    assert math.in_form("code").names == math.names[:3]  # without that of the reasoning
    assert math.in_form("plain").names == [correct.__name__]
    again, text = boxed.in_form("tags"), math.reference(ROWS[0])
    assert scores(again, text) == scores(math, text)
    asks = load_preset("summarization", form="tags").form.system_prompt
    assert asks.endswith("</answer>. The result is a summary of the text in one sentence.")


def test_gates_and_rewards_of_ones_own_follow_or_stay():
    mine = lifted(lambda completions, **_: [1.0] * len(completions), "mine")
    other = formed.configured("boxed_beside", form=find_form("boxed"))
    gate = gated(correct, by=formed, name="gate")
    pairs = [(correct, 1), (gate, 1), (Adaptive(formed), 1), (mine, 1), (other, 1)]
    made = reward_set(pairs).in_form("hash")
    assert [made.names[1], *made.names[3:]] == ["gate", "mine", "boxed_beside"]
    assert list(scores(made, "1+1=2\n#### 85").values()) == [1, 1, 1, 1, 0]
    assert made.reward_funcs[3] is mine
    assert gate.by is formed  # the gate that was given is as it was
