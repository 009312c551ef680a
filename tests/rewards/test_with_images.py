"""In a task with images rewards get TRL's arguments."""

from pictures import ROWS

from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import reward, reward_set
from grpo_nb.rewards.prompts import as_text, in_parts

SAID = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
PLAIN = [as_text(row["prompt"]) for row in ROWS[:2]]
SHOWN = [in_parts(row["prompt"]) for row in ROWS[:2]]
IMAGES = [row["images"] for row in ROWS[:2]]


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
