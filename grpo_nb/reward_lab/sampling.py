"""Sample completions from a loaded model, for `check_rewards` and for reading them."""

from typing import TYPE_CHECKING, Any

from grpo_nb.models import Progress, policy_of
from grpo_nb.reward_lab.scoring import chats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sample(
    model: "PreTrainedModel",
    processing_class: Any,
    dataset: Any,
    num_generations: int = 8,
    *,
    prompts: int = 16,
    max_completion_length: int = 256,
    temperature: float = 1.0,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[list[str]]:
    """Sample a group of completions for each prompt, as training would.

        completions = sample(model, tokenizer, dataset)
        check_rewards(reward_funcs, dataset, completions)

    Args:
        model: The model, loaded by Unsloth (with vLLM if it runs) or transformers. Its weights, its
            mode and the random states are unchanged afterwards.
        processing_class: Its tokenizer or processor.
        dataset: Rows with TRL's column `prompt`, as chats.
        num_generations: Completions for each prompt.
        prompts: Number of rows, beginning with the first.
        max_completion_length: Length at which completions are cut [tokens].
        temperature: 0 for greedy completions.
        batch_size: Completions that are sampled at a time.
        seed: Seed of the samples.
        progress: Called with the number of completions done, their total, and a note.

    Returns:
        The texts, one group for each row.

    Raises:
        ValueError: There are no rows, or a prompt is not a chat.
    """
    groups = policy_of(model, processing_class).generate(
        [row["prompt"] for row in chats(dataset, prompts)],
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        temperature=temperature,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    return [[each.text for each in group] for group in groups]
