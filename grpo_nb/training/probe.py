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

from grpo_nb.models import Policy, cuda_available
from grpo_nb.models.chat import render
from grpo_nb.training.measured import LEAST_SCALE, is_out_of_memory, scale_can_fall

if TYPE_CHECKING:
    from trl import GRPOTrainer

# What a step leaves in a trainer, beside gradients and random states.
STATE = (
    *("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics", "_step"),
    *("_buffered_inputs", "_current_train_step_time", "_last_loaded_step", "entropy_coef"),
    *("_entropy_window_stats", "_last_world_entropy", "current_gradient_accumulation_steps"),
    *("share_prompts", "eos_token_ids"),
)

# What of a module says how it trains.
MODE = (
    *("training", "gradient_checkpointing", "_gradient_checkpointing_func"),
    *("_flag_for_generation", "_require_grads_hook", "_require_grads_hooks"),
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
    tokens_seen, scaler = trainer.state.num_input_tokens_seen, trainer.accelerator.scaler
    scale = scaler and scaler.state_dict()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), _as_training(trainer):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in STATE:
            vars(trainer).pop(name, None)
        vars(trainer).update(kept)
        trainer.state.num_input_tokens_seen = tokens_seen
        if scaler:
            scaler.load_state_dict(scale)
        trainer.model.zero_grad(set_to_none=True)
        if cuda_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@contextmanager
def _as_training(trainer: "GRPOTrainer") -> Iterator[None]:
    """The model as `trainer.train()` sets it, and then as it was.

    What that does inside alone: Unsloth's for_training (its trainer ends `__init__` in
    for_inference), and transformers switching gradient checkpointing on.
    """
    model, args = trainer.model, trainer.args
    was_training, use_cache = model.training, model.config.use_cache
    kept = [
        (module, {name: vars(module)[name] for name in MODE if name in vars(module)})
        for module in model.modules()
    ]
    hooks = [(module, set(module._forward_hooks)) for module, _ in kept]
    if hasattr(model, "for_training"):
        asked = getattr(model, "_unsloth_gradient_checkpointing", args.gradient_checkpointing)
        model.for_training(use_gradient_checkpointing=asked)
    model.train()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    try:
        yield
    finally:
        if hasattr(model, "for_inference") and not was_training:
            model.for_inference()
        for module, before in kept:
            for name in MODE:
                vars(module).pop(name, None)
            vars(module).update(before)
        for module, before in hooks:  # those that let gradients into a frozen embedding
            for number in set(module._forward_hooks) - before:
                del module._forward_hooks[number]
        model.config.use_cache = use_cache


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
            while not gradients[2] and _lower_loss_scale(trainer):
                trainer.model.zero_grad(set_to_none=True)
                _update(trainer, ids, len(policy.tokenizer))
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
        scaler = trainer.accelerator.scaler  # of fp16; without it small gradients would be 0
        (scaler.scale(loss) if scaler else loss).backward()


def _lower_loss_scale(trainer: "GRPOTrainer") -> bool:
    """Whether fp16's loss scale could fall: the first is meant to be too high for most models."""
    if not scale_can_fall(trainer):
        return False
    scaler = trainer.accelerator.scaler
    lower = max(LEAST_SCALE, scaler.get_scale() / 16)  # a training halves it each time
    scaler.load_state_dict(scaler.state_dict() | {"scale": lower})
    return True


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
