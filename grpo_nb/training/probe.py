"""The worst step of a training, done once and watched: time, memory, gradients."""

import copy
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from grpo_nb.chat import render
from grpo_nb.models import Policy, cuda_available
from grpo_nb.training.halving import is_out_of_memory

if TYPE_CHECKING:
    from trl import GRPOTrainer

# What a step leaves in a trainer, beside gradients and random states.
STATE = (
    *("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics", "_step"),
    *("_buffered_inputs", "_current_train_step_time", "_last_loaded_step", "entropy_coef"),
    *("_entropy_window_stats", "_last_world_entropy", "current_gradient_accumulation_steps"),
    *("share_prompts", "eos_token_ids"),
)


class Probe(NamedTuple):
    """What the worst step needed.

    failed: The part that ran out of memory, or "".
    update: Of one pass, forward and backward [s].
    generation: Of the completions that are sampled together [s].
    before, peak, budget: Memory before it, at its highest, and at hand [bytes].
    gradients: (parameters that a gradient has to reach, those it reached, all finite).
    """

    failed: str
    update: float
    generation: float
    before: int
    peak: int
    budget: int
    gradients: tuple[int, int, bool]


@contextmanager
def _no_trace(trainer: "GRPOTrainer") -> Iterator[None]:
    """Put back what a step changes: random states, metrics, counters, gradients, modes."""
    import torch

    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in STATE if name in vars(trainer)}
    tokens_seen, training = trainer.state.num_input_tokens_seen, trainer.model.training
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in STATE:
            vars(trainer).pop(name, None)
        vars(trainer).update(kept)
        trainer.state.num_input_tokens_seen = tokens_seen
        trainer.model.train(training)
        trainer.model.zero_grad(set_to_none=True)
        if cuda_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def worst_step(trainer: "GRPOTrainer", policy: Policy, prompt: list[dict]) -> Probe:
    """A pass with its gradients, then a generation to the last token; nothing of it stays.

    Args:
        trainer: As built, not yet training.
        policy: Its model and tokenizer.
        prompt: The longest chat to train on; every row of the pass is this one.
    """
    with _no_trace(trainer):
        return _probe(trainer, policy, prompt)


def _probe(trainer: "GRPOTrainer", policy: Policy, prompt: list[dict]) -> Probe:
    text = render(policy.tokenizer, prompt)
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    trainer.model.train()
    trainer.share_prompts = False  # other than these, a pass' rows may all differ
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    update = generation = 0.0
    gradients, failed = (0, 0, True), ""
    with _watched_memory() as memory:
        try:
            failed = "the update"
            for _ in range(2 if cuda_available() else 1):  # a GPU compiles in the first
                update = _timed(_update, trainer, ids, len(policy.tokenizer))
            gradients = _reached(trainer)
            trainer.model.zero_grad(set_to_none=True)
            failed = "generation"
            generation = _timed(_generate, trainer, prompt)
            failed = ""
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    return Probe(failed, update, generation, **memory, gradients=gradients)


def _timed(work: Any, *arguments: Any) -> float:
    import torch

    started = time.perf_counter()
    work(*arguments)
    if cuda_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _update(trainer: "GRPOTrainer", prompt: list[int], vocabulary: int) -> None:
    """Forward and backward of a full pass, as TRL's training_step does it."""
    import torch

    args, device = trainer.args, trainer.accelerator.device
    rows, length = args.per_device_train_batch_size, args.max_completion_length
    ids = torch.tensor([prompt] * rows, device=device)
    ones = torch.ones(rows, length, device=device)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": torch.randint(vocabulary, (rows, length), device=device),
        "completion_mask": ones.long(),
        "advantages": torch.ones(rows, device=device) - 2 * (torch.arange(rows, device=device) % 2),
        "num_items_in_batch": torch.tensor(rows * length * args.steps_per_generation),
        "importance_sampling_ratio": ones,
        "ref_per_token_logps": -log(vocabulary) * ones,  # TRL reads it where beta > 0
    }
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs)
    if loss.requires_grad:  # not where the adapter is frozen
        loss.backward()


def _reached(trainer: "GRPOTrainer") -> tuple[int, int, bool]:
    """LoRA's B, whose gradient is not 0 at the start as A's is; without LoRA what is trained."""
    named = list(trainer.model.named_parameters())
    watched = [p for name, p in named if "lora_B" in name and ".ref." not in name]
    watched = watched or [parameter for _, parameter in named if parameter.requires_grad]
    gradients = [parameter.grad for parameter in watched if parameter.grad is not None]
    reached = sum(bool(gradient.count_nonzero()) for gradient in gradients)
    return len(watched), reached, all(bool(gradient.isfinite().all()) for gradient in gradients)


def _generate(trainer: "GRPOTrainer", prompt: list[dict]) -> None:
    """A step's completions by the trainer's own path, with no end before the cap."""
    count = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if trainer.from_copy:
        trainer.eos_token_ids = []
    if trainer.use_vllm:
        sampling, forced = trainer.vllm_generation.generation_kwargs, {"ignore_eos": True}
    else:
        sampling = vars(trainer.generation_config)
        forced = {"min_new_tokens": trainer.args.max_completion_length}
        if trainer.use_transformers_continuous_batching:  # it has no such limit
            forced = {"eos_token_id": -1}
    before = dict(sampling)
    sampling.update(forced)
    try:
        trainer._generate([prompt] * count)
    finally:
        sampling.clear()
        sampling.update(before)


@contextmanager
def _watched_memory() -> Iterator[dict[str, int]]:
    """Fill in `before`, `peak` and `budget` [bytes]: the GPU's, or else the process' own."""
    import torch

    if cuda_available():
        torch.cuda.reset_peak_memory_stats()
        budget = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        found = {"before": torch.cuda.memory_allocated(), "peak": 0, "budget": budget}
        yield found
        found["peak"] = torch.cuda.max_memory_allocated()
        return
    process, stopped = psutil.Process(), threading.Event()
    resident = process.memory_info().rss
    budget = resident + psutil.virtual_memory().available
    found = {"before": resident, "peak": resident, "budget": budget}

    def watch() -> None:
        while not stopped.wait(0.01):
            found["peak"] = max(found["peak"], process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stopped.set()
        thread.join()
