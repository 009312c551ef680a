"""What answers prompts: one `Engine.generate` for every caller.

vLLM answers where a GPU has it, `dense.DenseEngine` on a CPU, and transformers' `generate` where
neither can.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from grpo_nb.models.chat import NONE, encode, hub_errors, load_tokenizer, quiet
from grpo_nb.models.vllm import load_vllm, use_vllm
from grpo_nb.models.weights import load_checkpoint
from grpo_nb.rewards.prompts import Completion, Message
from grpo_nb.runs import refuse_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Progress = Callable[[int, int, str], None]


class Sample(NamedTuple):
    """A completion: its text, how many tokens it took, and whether it ran into the cap.

    ids: Its tokens, up to the first stop token.
    mask: Of an episode: 1 for the model's tokens, 0 for the environment's.
    messages: Of an episode: its turns, with calls and their results.
    ended: Of an episode: why.
    """

    text: str
    tokens: int
    truncated: bool
    ids: Sequence[int] = ()
    mask: Sequence[int] = ()
    messages: Sequence[Message] = ()
    ended: str = ""

    @property
    def completion(self) -> Completion:
        """What rewards are given."""
        return self.messages or self.text


class Sampling(NamedTuple):
    """The arguments of `Engine.generate`.

    max_completion_length: Cut after this [tokens].
    temperature: 0 is greedy.
    num_generations: Completions a prompt.
    seed: Of the sampling; the caller's random state is left as it was. A batch has one of its
        own, so that it does not depend on how long the batches before it became.
    batch_size: Sequences at a time, samples included; vLLM makes up its own batches.
    adapter: False: the base below the adapter answers.
    progress: Called with completions done, all of them, and the tokens per second as a text.
    """

    max_completion_length: int
    temperature: float = 0.0
    num_generations: int = 1
    seed: int = 0
    batch_size: int = 64
    adapter: bool = True
    progress: Progress | None = None


def part_of(report: Progress | None, before: int, total: int, name: str = "") -> Progress | None:
    """Return the function that reports a part, before which so many completions were sampled."""
    named = f"{name}, " if name else ""
    return report and (lambda done, _, note: report(before + done, total, named + note))


class Engine(ABC):
    """Weights that answer: `engine.generate(prompts, max_completion_length=…)`."""

    name: str  # "transformers", "dense" or "vllm"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def generate(self, prompts: Sequence[list[Message]], **sampling: Any) -> list[list[Sample]]:
        """Completions for each prompt, [prompts][num_generations].

        Args:
            prompts: Chats.
            sampling: The fields of `Sampling`.
        """
        asked = Sampling(**sampling)
        flat = self.complete(encode(self.tokenizer, prompts), asked)
        group = asked.num_generations
        return [flat[i : i + group] for i in range(0, len(flat), group)]

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; it answers no more."""

    @abstractmethod
    def complete(self, ids: Sequence[Sequence[int]], asked: Sampling) -> list[Sample]:
        """Completions of token ids, the samples of each after one another."""


class TransformersEngine(Engine):
    """A loaded model, by transformers' `generate` in this process.

    Args:
        model: As `load_checkpoint` gives it, or a policy's.
        around: Entered while it answers; a policy leaves its training mode there.
    """

    name = "transformers"

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        super().__init__(tokenizer)
        self._model, self._around = model, around

    @property
    def model(self) -> "PreTrainedModel":
        if self._model is None:
            raise RuntimeError("this engine was closed: open another one")
        return self._model

    def close(self) -> None:
        self._model = None
        free_memory()

    @property
    def stops(self) -> list[int]:
        """The ids that end a completion."""
        ends = self.model.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends or self.tokenizer.eos_token_id]

    def complete(self, ids: Sequence[Sequence[int]], asked: Sampling) -> list[Sample]:
        import torch

        prompts = [prompt for prompt in ids for _ in range(asked.num_generations)]
        below = hasattr(self.model, "disable_adapter") and not asked.adapter
        samples: list[Sample] = []
        meter = Meter(len(prompts), asked.progress)
        # Not inference_mode: what it leaves in a policy's buffers could not be trained with.
        with (
            self._around(),
            self.model.disable_adapter() if below else nullcontext(),
            torch.random.fork_rng(),
            torch.no_grad(),
        ):
            for start in range(0, len(prompts), asked.batch_size):
                torch.manual_seed(asked.seed + start)
                batch = prompts[start : start + asked.batch_size]
                samples += self._samples(self._batch(batch, asked, meter))
                meter.end(len(samples))
        return samples

    def _batch(
        self, prompts: Sequence[Sequence[int]], asked: Sampling, meter: "Meter"
    ) -> list[list[int]]:
        """Return the ids of a completion for each prompt, perhaps with padding after them."""
        sampling: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            sampling |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        ids = [list(prompt) for prompt in prompts]
        padded = self.tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
        completed = self.model.generate(
            **padded.to(self.model.device),
            max_new_tokens=asked.max_completion_length,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,  # a model in training has it off
            **sampling,
        )[:, padded["input_ids"].shape[1] :]
        meter.add(completed.numel(), len(completed))
        return completed.tolist()

    def _samples(self, ids: Sequence[Sequence[int]]) -> list[Sample]:
        """Return generated ids as text, with their lengths up to the first stop."""
        texts, stops = self.tokenizer.batch_decode(ids, skip_special_tokens=True), self.stops
        samples = []
        for text, tokens in zip(texts, ids, strict=True):
            end = next((place for place, token in enumerate(tokens, 1) if token in stops), 0)
            samples.append(Sample(text, end or len(tokens), not end, tokens[: end or None]))
        return samples


class Meter:
    """Reports how far a call of `Engine.generate` has come, at most once a second.

    Args:
        total: Completions to sample.
        report: Called with completions done, total, and tokens per second as a text.
    """

    def __init__(self, total: int, report: Progress | None) -> None:
        self.total, self.report, self.done, self.tokens = total, report, 0, 0
        self.begun = self.reported = time.monotonic()

    def add(self, tokens: int, ended: int) -> None:
        """Count tokens, of a batch of which so many completions have ended."""
        self.tokens += tokens
        now = time.monotonic()
        if self.report and (now - self.reported >= 1 or self.done == self.total):
            self.reported = now
            speed = self.tokens / max(now - self.begun, 1e-9)
            self.report(self.done + ended, self.total, f"{speed:.0f} tokens/s")

    def end(self, done: int) -> None:
        """Note that a batch has ended, and how many completions there are now."""
        self.done = done
        self.add(0, 0)


class VllmEngine(Engine):
    """A `vllm.LLM`, of its own or Unsloth's.

    Args:
        llm: The engine.
        lora: Gives the request for the adapter as it is now; None: there is none.
    """

    name = "vllm"

    def __init__(
        self, llm: Any, tokenizer: "PreTrainedTokenizerBase", lora: Callable[[], Any]
    ) -> None:
        super().__init__(tokenizer)
        self._llm, self._lora = llm, lora

    def complete(self, ids: Sequence[Sequence[int]], asked: Sampling) -> list[Sample]:
        from vllm import SamplingParams

        n, prompts = asked.num_generations, [{"prompt_token_ids": list(one)} for one in ids]
        sampling = {"temperature": asked.temperature, "max_tokens": asked.max_completion_length}
        # vLLM counts on from a prompt's seed within its group; two prompts must not share one.
        seeds = range(asked.seed, asked.seed + n * len(ids), n)
        how = [SamplingParams(n=n, seed=seed, **sampling) for seed in seeds]
        lora = self._lora() if asked.adapter else None
        sleeps = self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        if sleeps:  # asked to answer in its sleep, vLLM waits for ever
            self._llm.wake_up()
        answers = self._llm.generate(prompts, how, use_tqdm=False, lora_request=lora)
        if sleeps:
            self._llm.sleep(1)
        return [
            Sample(
                self.tokenizer.decode(one.token_ids, skip_special_tokens=True),
                len(one.token_ids),
                one.finish_reason == "length",
                list(one.token_ids),
            )
            for answer in answers
            for one in answer.outputs
        ]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm.llm_engine  # whoever still holds the LLM then holds no weights and no cache
        free_memory()


def engine_of(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> TransformersEngine:
    """Return the quickest engine for a loaded model; the arguments are `TransformersEngine`'s."""
    from grpo_nb.models.dense import DenseEngine, dense_lacks

    kind = TransformersEngine if dense_lacks(model) else DenseEngine
    return kind(model, tokenizer, around)


def free_memory() -> None:
    """Free what nothing refers to, on the GPU too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def open_engine(
    model_path: str,
    *,
    adapter: Path | None,
    quantization: str,
    engine: Literal["transformers", "vllm", "detect"] = "detect",
    gpu_memory_utilization: float = 0.5,
    chat_template_kwargs: Mapping[str, Any] = NONE,
) -> Engine:
    """A base, or a base with its adapter, ready to answer.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter that is added to it; None for the model as it is.
        quantization: "4bit" or "16bit".
        engine: detect: vLLM where a GPU and vLLM are found and it can load these weights, else
            transformers.
        gpu_memory_utilization: What vLLM takes, until it is closed [share].
        chat_template_kwargs: As `load_tokenizer` takes them.

    Raises:
        RuntimeError: vLLM asked for, and not possible here.
        ValueError: Another engine.
    """
    refuse_unknown("engine", engine, ["detect", "transformers", "vllm"])
    vllm = use_vllm(engine, quantization)
    tokenizer = load_tokenizer(model_path, chat_template_kwargs)
    if not vllm:
        model = load_checkpoint(model_path, adapter=adapter, quantization=quantization)
        return engine_of(model, tokenizer)
    with quiet(), hub_errors(model_path):
        llm = load_vllm(model_path, adapter, quantization, gpu_memory_utilization)
        from vllm.lora.request import LoRARequest

    lora = adapter and LoRARequest("adapter", 1, str(adapter.resolve()))
    return VllmEngine(llm, tokenizer, lambda: lora)
