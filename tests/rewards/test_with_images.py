"""In a task with images rewards get TRL's arguments."""

from pictures import ROWS

from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import reward, reward_set
from grpo_nb.rewards.prompts import as_text

SHOWN = ROWS[:2]


def test_a_reward_in_trls_shape_gets_what_trl_gives_and_a_lifted_one_the_prompt_as_text():
    from trl.data_utils import prepare_multimodal_messages

    calls, looks = [], []

    def shaped(prompts, completions, images, **_):
        calls.append((prompts, completions, images))
        return [0.0] * len(completions)

    @reward()
    def lifted(response, prompt, images):
        looks.append((prompt, images))
        return 0.0

    Bench(reward_set([(shaped, 1.0), (lifted, 1.0)])).score(SHOWN, ["a", "b"])
    plain, images = [as_text(row["prompt"]) for row in SHOWN], [row["images"] for row in SHOWN]
    prompts = list(map(prepare_multimodal_messages, plain, images))
    completions = [[{"role": "assistant", "content": text}] for text in "ab"]
    assert calls == [(prompts, completions, images)]
    assert looks == list(zip(plain, images, strict=True))
