"""What answers prompts: one `Engine.generate` for every caller, and its form by transformers."""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.models.chat import render
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLD_SECONDS = 0.05  # between two texts of a completion under way


class Sample(NamedTuple):
    """A completion: its text, how many tokens it took, and whether it ran into the cap."""

    text: str
    tokens: int
    truncated: bool


class Sampling(NamedTuple):
    """The arguments of `Engine.generate`, as an engine gets them."""

    max_completion_length: int
    temperature: float
    num_generations: int
    seed: int
    batch_size: int
    adapter: bool
    on_text: Callable[[str], None] | None


class Engine(ABC):
    """Weights that answer: `engine.generate(prompts, max_completion_length=…)`.

    name: "transformers", "unsloth" or "vllm".
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
        self.tokenizer, self.name = tokenizer, name

    def generate(
        self,
        prompts: Sequence[list[Message]],
        *,
        max_completion_length: int,
        temperature: float = 0.0,
        num_generations: int = 1,
        seed: int = 0,
        batch_size: int = 64,
        adapter: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[list[Sample]]:
        """Completions for each prompt, [prompts][num_generations].

        Args:
            prompts: Chats.
            max_completion_length: Cut after this [tokens].
            temperature: 0 is greedy.
            num_generations: Completions a prompt.
            seed: Of the sampling; the caller's random state is left as it was. A batch has one
                of its own, so that it does not depend on how long the batches before it became.
            batch_size: Sequences at a time, samples included; vLLM makes up its own batches.
            adapter: False: the base below the adapter answers.
            on_text: Told the text so far of a single completion as it is written, and at its end.
        """
        texts = [render(self.tokenizer, prompt) for prompt in prompts]
        asked = Sampling(
            *(max_completion_length, temperature, num_generations),
            *(seed, batch_size, adapter, on_text),
        )
        flat = self._answer(texts, asked) if texts else []
        return [flat[i : i + num_generations] for i in range(0, len(flat), num_generations)]

    @abstractmethod
    def forward_seconds(self, texts: Sequence[str]) -> float:
        """Seconds of one forward pass over the texts, without gradient."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; it answers no more."""

    @abstractmethod
    def _answer(self, texts: Sequence[str], asked: Sampling) -> list[Sample]:
        """Completions of rendered prompts, the samples of each after one another."""


class TransformersEngine(Engine):
    """A loaded model, by transformers' `generate` in this process.

    Args:
        model: As `load_checkpoint` gives it, or a policy's.
        around: Entered while it answers; a policy leaves its training mode there.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        name: str = "transformers",
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        super().__init__(tokenizer, name)
        self._model, self._around = model, around

    @property
    def model(self) -> "PreTrainedModel":
        if self._model is None:
            raise RuntimeError("this engine was closed: open another one")
        return self._model

    def close(self) -> None:
        self._model = None
        free_memory()

    def forward_seconds(self, texts: Sequence[str]) -> float:
        import torch

        inputs = self._padded(texts)
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self.model(**inputs).logits
            logits[0, 0, 0].item()  # waits for the GPU
        return time.perf_counter() - started

    def _answer(self, texts: Sequence[str], asked: Sampling) -> list[Sample]:
        import torch

        texts = [text for text in texts for _ in range(asked.num_generations)]
        samples: list[Sample] = []
        # Not inference_mode: what it leaves in a policy's buffers could not be trained with.
        with self._ready(asked.adapter), torch.random.fork_rng(), torch.no_grad():
            for start in range(0, len(texts), asked.batch_size):
                torch.manual_seed(asked.seed + start)
                samples += self._batch(texts[start : start + asked.batch_size], asked)
        return samples

    @contextmanager
    def _ready(self, adapter: bool) -> Iterator[None]:
        below = not adapter and hasattr(self.model, "disable_adapter")
        with self._around(), self.model.disable_adapter() if below else nullcontext():
            yield

    def _batch(self, texts: Sequence[str], asked: Sampling) -> list[Sample]:
        inputs = self._padded(texts)
        sampling: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            sampling |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        ids = self.model.generate(
            **inputs,
            max_new_tokens=asked.max_completion_length,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,  # a model in training has it off
            streamer=asked.on_text and _Streamer(self.tokenizer, asked.on_text),
            **sampling,
        )
        return _samples(self.tokenizer, self.model, ids[:, inputs["input_ids"].shape[1] :])

    def _padded(self, texts: Sequence[str]) -> "dict[str, torch.Tensor]":
        """Ids and mask, padded on the left, where the completions of a batch then begin.

        The tokenizer's own side is not asked: Unsloth's trainer sets it to the right.
        """
        inputs = self.tokenizer(
            list(texts),
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        ).to(self.model.device)
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def free_memory() -> None:
    """Let go of what nothing holds any more, on the GPU too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Streamer:
    """Takes tokens from transformers' `generate` and tells the text so far.

    Called in the thread that generates, so that an interrupt ends both at once.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.ids: list[int] | None = None
        self.told = 0.0

    def put(self, ids: "torch.Tensor") -> None:
        if self.ids is None:  # the prompt comes first
            self.ids = []
            return
        self.ids += ids.tolist()
        if time.monotonic() - self.told > TOLD_SECONDS:
            self.end()

    def end(self) -> None:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        self.on_text(text.rstrip("\ufffd"))  # a character whose bytes are not all there yet
        self.told = time.monotonic()


def _samples(
    tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", ids: "torch.Tensor"
) -> list[Sample]:
    """Generated ids, [completions, tokens], as text with their lengths up to the first stop."""
    import torch

    known = model.generation_config.eos_token_id
    stops = known if isinstance(known, list) else [known or tokenizer.eos_token_id]
    stopped = torch.isin(ids, torch.tensor(stops, device=ids.device))
    ended = stopped.any(dim=1).tolist()
    first = stopped.int().argmax(dim=1).tolist()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [
        Sample(text, stop + 1 if end else ids.shape[1], not end)
        for text, end, stop in zip(texts, ended, first, strict=True)
    ]
