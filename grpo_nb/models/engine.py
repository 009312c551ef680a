"""Define `Engine`, with which every caller samples completions, and transformers' engine.

vLLM's engine is in `vllm`, and the fast CPU engine is in `dense`; `policy.open_engine` chooses.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.models.template import encode, image_inputs
from grpo_nb.models.weights import cuda_available
from grpo_nb.rewards.prompts import Completion, Message, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Chats = Sequence[list[Message]]
# Arguments: the number of completions done, their total, and a note such as the speed.
Progress = Callable[[int, int, str], None]


class Sample(NamedTuple):
    """Hold a completion, or an episode with an environment.

    text: The text that the model wrote, without special tokens.
    tokens: The length of the completion [tokens].
    truncated: Whether the completion reached the maximum length before a stop token.
    ids: The token ids of the completion, up to the first stop token.
    messages: The turns, with tool calls and their results; episodes only.
    ended: Why the episode ended; episodes only.
    """

    text: str
    tokens: int
    truncated: bool
    ids: Sequence[int] = ()
    messages: Sequence[Message] = ()
    ended: str = ""

    @property
    def completion(self) -> Completion:
        """Return the messages of an episode, or else the text, for rewards to score."""
        return self.messages or self.text


class Sampling(NamedTuple):
    """Hold the arguments of `Engine.generate`.

    max_completion_length: The maximum length of a completion [tokens].
    temperature: The sampling temperature; 0 is greedy.
    num_generations: Completions per prompt.
    seed: The seed of the sampling; the caller's random state is restored. Each batch has its own
        seed, so that its completions do not depend on the lengths in earlier batches.
    batch_size: Completions that are sampled together; vLLM chooses its batches itself.
    adapter: Whether to sample with the adapter; if not, the base alone is used.
    progress: A function to report progress to after each batch, if any.
    """

    max_completion_length: int
    temperature: float = 0.0
    num_generations: int = 1
    seed: int = 0
    batch_size: int = 64
    adapter: bool = True
    progress: Progress | None = None


def part_of(report: Progress | None, before: int, total: int, name: str = "") -> Progress | None:
    """Return a function that reports progress on one part of a larger job.

    Args:
        report: The function that reports progress on the whole job; if None, so is the result.
        before: The number of completions that are sampled before this part.
        total: The number of completions of the job.
        name: The part's name, which is put before each note.
    """
    prefix = f"{name}, " if name else ""
    return report and (lambda done, _, note: report(before + done, total, prefix + note))


class Engine(ABC):
    """Sample completions: `engine.generate(prompts, max_completion_length=…)`."""

    name: str  # "transformers", "dense" or "vllm"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def generate(self, prompts: Sequence[list[Message]], **sampling: Any) -> list[list[Sample]]:
        """Return completions for each prompt, [prompts][num_generations].

        Args:
            prompts: Chats, with their images.
            sampling: The fields of `Sampling`.
        """
        options = Sampling(**sampling)
        samples = self.complete(encode(self.tokenizer, prompts), options, prompts)
        group = options.num_generations
        return [samples[start : start + group] for start in range(0, len(samples), group)]

    @abstractmethod
    def close(self) -> None:
        """Free the memory; a closed engine cannot sample."""

    @abstractmethod
    def complete(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, chats: Chats = ()
    ) -> list[Sample]:
        """Return completions of tokenized prompts; the completions of a prompt are adjacent.

        Args:
            ids: Token ids, [prompts][tokens].
            sampling: The arguments of `generate`.
            chats: The same prompts as chats; needed only if they contain images.
        """


class TransformersEngine(Engine):
    """Sample with transformers' `generate` in this process.

    Args:
        model: A model from `load_checkpoint`, or the model of a policy.
        tokenizer: The model's tokenizer.
        around: A function that returns the context manager to sample in. A policy's context manager
            sets the policy to evaluation mode.
    """

    name = "transformers"

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        super().__init__(tokenizer)
        self.model, self._around = model, around

    def close(self) -> None:
        self.model = None
        free_memory()

    @property
    def stops(self) -> list[int]:
        """Return the ids of the tokens that end a completion."""
        ids = self.model.generation_config.eos_token_id
        return ids if isinstance(ids, list) else [ids or self.tokenizer.eos_token_id]

    def complete(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, chats: Chats = ()
    ) -> list[Sample]:
        import torch

        prompts = [prompt for prompt in ids for _ in range(sampling.num_generations)]
        chats = [chat for chat in chats for _ in range(sampling.num_generations)]
        base_answers = hasattr(self.model, "disable_adapter") and not sampling.adapter
        samples: list[Sample] = []
        start_time = time.monotonic()
        # Tensors that `inference_mode` leaves in a policy's buffers would break later training.
        with (
            self._around(),
            self.model.disable_adapter() if base_answers else nullcontext(),
            torch.random.fork_rng(),
            torch.no_grad(),
        ):
            for start in range(0, len(prompts), sampling.batch_size):
                torch.manual_seed(sampling.seed + start)
                part = slice(start, start + sampling.batch_size)
                samples += self._samples(self._batch(prompts[part], sampling, chats[part]))
                if sampling.progress:
                    speed = sum(each.tokens for each in samples) / (time.monotonic() - start_time)
                    sampling.progress(len(samples), len(prompts), f"{speed:.0f} tokens/s")
        return samples

    def _batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, chats: Chats
    ) -> list[list[int]]:
        """Return a completion's token ids for each prompt, possibly followed by padding."""
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        if any(map(images_of, chats)):
            padded = image_inputs(self.tokenizer, chats)
        else:
            rows = {"input_ids": [list(prompt) for prompt in prompts]}
            padded = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt")
        return self.model.generate(
            **{name: tensor.to(self.model.device) for name, tensor in padded.items()},
            max_new_tokens=sampling.max_completion_length,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,  # a model that is being trained has it turned off
            **options,
        )[:, padded["input_ids"].shape[1] :].tolist()

    def _samples(self, ids: Sequence[Sequence[int]]) -> list[Sample]:
        """Return each completion as a `Sample` that ends at its first stop token."""
        texts, stops = self.tokenizer.batch_decode(ids, skip_special_tokens=True), self.stops
        samples = []
        for text, tokens in zip(texts, ids, strict=True):
            end = next((place for place, token in enumerate(tokens, 1) if token in stops), 0)
            samples.append(Sample(text, end or len(tokens), not end, tokens[: end or None]))
        return samples


def free_memory() -> None:
    """Collect garbage, and release the GPU memory that torch reserves but does not use."""
    import torch

    gc.collect()
    if cuda_available():
        torch.cuda.empty_cache()
