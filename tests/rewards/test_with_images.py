"""In a task with images rewards get TRL's arguments, and pay what they pay for texts."""

import json
from types import SimpleNamespace

import pytest
from pictures import ROWS

from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import Adaptive, call, reward, reward_set
from grpo_nb.rewards.prompts import as_text, in_parts
from grpo_nb.rewards.sets import built_in

TEXTS = (
    *("<reasoning>2 + 2 = 4</reasoning>\n<answer>4</answer>", "<answer>5</answer>", "", "4", "A"),
    *('{"a": 4}', "```python\ndef f(a):\n    return a\n```", "so it is [1] according to 4. " * 9),
)
COLUMNS = {
    "answer": ["4"] * len(TEXTS),
    "sources": [["The source says 4."]] * len(TEXTS),
    "answer_sources": [[1]] * len(TEXTS),
    "tests": [["assert f(1) == 1"]] * len(TEXTS),
    "entry": [json.dumps({"task": "chain_sum", "options": {}, "metadata": {}})] * len(TEXTS),
    "environments": [SimpleNamespace(get_reward=lambda: 0.5)] * len(TEXTS),
}
PLAIN = [as_text(row["prompt"]) for row in ROWS[: len(TEXTS)]]
SHOWN = [in_parts(row["prompt"]) for row in ROWS[: len(TEXTS)]]
SAID = [[{"role": "assistant", "content": text}] for text in TEXTS]
PARTS = [[{"role": "assistant", "content": [{"type": "text", "text": text}]}] for text in TEXTS]
IMAGES = [row["images"] for row in ROWS[: len(TEXTS)]]


def scores_of(func, prompts, completions, **columns):
    if func.__name__ == "json_fields_reward":
        columns["answer"] = [json.dumps({"a": 4})] * len(TEXTS)
    return call(func, prompts=prompts, completions=completions, **columns)


@pytest.mark.parametrize("name", built_in())
def test_a_reward_pays_the_same_with_images_in_its_prompts(name):
    func = built_in()[name]
    before = scores_of(func, PLAIN, SAID, **COLUMNS)
    assert any(score is not None for score in before), "the comparison says something"
    for completions in (SAID, PARTS):
        assert scores_of(func, SHOWN, completions, images=IMAGES, **COLUMNS) == before
    assert scores_of(Adaptive(func), SHOWN, SAID, images=IMAGES, **COLUMNS) == before


def test_a_lifted_reward_reads_the_prompt_as_text_and_the_images_beside_it():
    calls = []

    @reward()
    def looks(response, prompt, images):
        calls.append((prompt, images))
        return 0.0

    looks(prompts=SHOWN, completions=SAID, images=IMAGES)
    assert [prompt for prompt, _ in calls] == PLAIN
    assert [images for _, images in calls] == IMAGES


def test_a_reward_in_trls_shape_gets_what_trl_gives():
    from trl.data_utils import prepare_multimodal_messages

    calls = []

    def shaped(prompts, completions, **columns):
        calls.append((prompts, completions, columns))
        return [0.0] * len(completions)

    Bench(reward_set([(shaped, 1.0)])).score(ROWS[:2], ["a", "b"])
    [(prompts, completions, columns)] = calls
    expected = [
        prepare_multimodal_messages(as_text(row["prompt"]), images=row["images"])
        for row in ROWS[:2]
    ]
    assert prompts == expected
    assert completions == [[{"role": "assistant", "content": text}] for text in "ab"]
    assert columns["images"] == [row["images"] for row in ROWS[:2]]
