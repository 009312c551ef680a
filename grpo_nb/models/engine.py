"""Define `Engine`, with which every caller samples completions, by transformers or by vLLM.

The fast engine for CPUs is in `dense`; `policy.open_engine` chooses the engine.
"""

import gc
import importlib.util
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.files import read_json
from grpo_nb.models.hub import find_model, image_tokens, quiet
from grpo_nb.models.template import encode, image_inputs, render
from grpo_nb.models.weights import ADAPTER_CONFIG, cuda_available, weights_dtype
from grpo_nb.rewards.prompts import Completion, Message, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BNB_PLUGIN = "the package vllm-bnb-plugin (pip install --no-deps vllm-bnb-plugin==0.0.3)"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # adapter ranks for which vLLM can reserve room
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


def use_vllm(choice: str, quantization: str) -> bool:
    """Return whether to generate completions with vLLM.

    Args:
        choice: "vllm"; "detect" for vLLM if it and a GPU are present; any other value for no vLLM.
        quantization: "4bit" or "16bit".

    Raises:
        RuntimeError: The choice is "vllm", but vLLM cannot run on this machine.
    """
    if choice not in ("vllm", "detect"):
        return False
    # vLLM itself is not imported here, because Unsloth must be imported before it.
    needs = {"a CUDA GPU": cuda_available(), "the package vllm": importlib.util.find_spec("vllm")}
    if quantization == "4bit":
        needs[f"{BNB_PLUGIN} for 4-bit weights"] = importlib.util.find_spec("vllm_bnb_plugin")
    missing = next((need for need, met in needs.items() if not met), "")
    if missing and choice == "vllm":
        setting = "model.fast_inference"
        raise RuntimeError(
            f"{setting} = 'vllm' needs {missing}; otherwise set {setting} = 'detect'"
        )
    if missing.startswith(BNB_PLUGIN):
        warnings.warn(f"transformers generates, since vLLM needs {missing}", stacklevel=2)
    return not missing


def without(tokens: Sequence[int]) -> dict[int, float] | None:
    """Return a logit bias that keeps vLLM from sampling these tokens; None for no tokens."""
    return dict.fromkeys(tokens, -100.0) or None


class VllmEngine(Engine):
    """Sample with a `vllm.LLM` that was started by `open_vllm` or by Unsloth.

    Args:
        llm: The `vllm.LLM`.
        tokenizer: The model's tokenizer.
        lora: A function that returns vLLM's LoRA request for the current adapter, or None.
    """

    name = "vllm"

    def __init__(
        self, llm: Any, tokenizer: "PreTrainedTokenizerBase", lora: Callable[[], Any]
    ) -> None:
        super().__init__(tokenizer)
        self._llm, self._lora = llm, lora

    def complete(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, chats: Chats = ()
    ) -> list[Sample]:
        from vllm import SamplingParams

        n, prompts = sampling.num_generations, [{"prompt_token_ids": list(one)} for one in ids]
        for prompt, chat in zip(prompts, chats, strict=False):
            if images := images_of(chat):  # vLLM itself expands an image's placeholder
                text = render(self.tokenizer, chat)
                tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                prompt |= {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        model_config = self._llm.llm_engine.vllm_config.model_config
        options = {"n": n, "temperature": sampling.temperature}
        options |= {"max_tokens": sampling.max_completion_length}
        options |= {"logit_bias": without(image_tokens(model_config.hf_config))}
        # vLLM increments the seed within a group, so no two completions share a seed.
        seeds = range(sampling.seed, sampling.seed + n * len(ids), n)
        params = [SamplingParams(seed=seed, **options) for seed in seeds]
        lora = self._lora() if sampling.adapter else None
        sleeps = model_config.enable_sleep_mode
        if sleeps:  # a sleeping vLLM would never answer
            self._llm.wake_up()
        answers = self._llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
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
        del self._llm.llm_engine  # so that other references keep no weights or cache
        free_memory()


def open_vllm(
    model_path: str,
    adapter: Path | None,
    quantization: str,
    share: float,
    tokenizer: "PreTrainedTokenizerBase",
) -> VllmEngine:
    """Start vLLM with this share of the GPU's memory and room for the adapter, if there is one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rank = read_json(adapter / ADAPTER_CONFIG)["r"] if adapter else 1
    with quiet():
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        llm = LLM(
            find_model(model_path),
            dtype=weights_dtype(),
            quantization="bitsandbytes" if quantization == "4bit" else None,
            gpu_memory_utilization=share,
            max_model_len=-1,  # the model's own maximum, or as much as fits into that memory
            enforce_eager=not cuda_available(),
            enable_lora=adapter is not None,
            max_lora_rank=min((room for room in RANKS if room >= rank), default=rank),
        )
    lora = LoRARequest("adapter", 1, str(adapter.resolve())) if adapter else None
    return VllmEngine(llm, tokenizer, lambda: lora)


def free_memory() -> None:
    """Collect garbage, and release the GPU memory that torch reserves but does not use."""
    import torch

    gc.collect()
    if cuda_available():
        torch.cuda.empty_cache()
