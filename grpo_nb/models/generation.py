"""Completions of a model in this process, by transformers."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.chat import render
from grpo_nb.prompts import Message

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLD_SECONDS = 0.05  # between two texts of a completion under way


class Sample(NamedTuple):
    """A completion: its text, how many tokens it took, and whether it ran into the cap."""

    text: str
    tokens: int
    truncated: bool


def generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    *,
    max_completion_length: int,
    temperature: float = 0.0,
    num_generations: int = 1,
    seed: int = 0,
    batch_size: int = 64,
    on_text: Callable[[str], None] | None = None,
) -> list[list[Sample]]:
    """Completions for each prompt, [prompts][num_generations].

    Args:
        model: As `load_checkpoint` gives it.
        tokenizer: Its tokenizer.
        prompts: Chats.
        max_completion_length: Cut after this [tokens].
        temperature: 0 is greedy.
        num_generations: Completions a prompt.
        seed: Of the sampling; the caller's random state is left as it was.
        batch_size: Prompts at a time.
        on_text: Told the text so far of a single completion as it is written, and at its end.
    """
    import torch

    completions: list[list[Sample]] = []
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    # Not inference_mode: what it leaves in a policy's buffers could not be trained with.
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            texts = [render(tokenizer, prompt) for prompt in prompts[start : start + batch_size]]
            inputs = tokenizer(
                texts, return_tensors="pt", padding=True, add_special_tokens=False
            ).to(model.device)
            ids = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_completion_length,
                num_return_sequences=num_generations,
                pad_token_id=tokenizer.pad_token_id,
                use_cache=True,  # a model in training has it off
                streamer=on_text and _Streamer(tokenizer, on_text),
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
            new = _samples(tokenizer, model, ids[:, inputs["input_ids"].shape[1] :])
            completions += [
                new[i : i + num_generations] for i in range(0, len(new), num_generations)
            ]
    return completions


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


def forward_seconds(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]
) -> float:
    """Seconds of one forward pass over the texts, without gradient."""
    import torch

    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = inputs.to(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits.logits[0, 0, 0].item()  # waits for the GPU
    return time.perf_counter() - started
