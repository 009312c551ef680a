"""Before a training starts: a dry run of its largest step, and what would stop it hours later.

The largest step is the longest prompt with completions of full length, through the trainer's own
loss, backward pass and generation. What it needed is held against the machine. A training after
it gives the same numbers as one without (vLLM's own random state apart).
"""

import copy
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from grpo_nb.models import cuda_available, sharded
from grpo_nb.models.chat import count_tokens, render
from grpo_nb.models.policy import trainable_weights
from grpo_nb.runs import Check
from grpo_nb.training import fast_cpu
from grpo_nb.training.arguments import solve_batch
from grpo_nb.training.health import section
from grpo_nb.training.metrics import peak_memory

if TYPE_CHECKING:
    from grpo_nb.training.trainer import Trainer

GIB = 2**30
# fp16 scales the loss, at first so far that most gradients overflow; a training comes down to this.
USUAL_SCALE = 2.0**10
# What a step leaves in a trainer, beside gradients and random states.
STATE = (
    *("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics", "_step"),
    *("_buffered_inputs", "_current_train_step_time", "_last_loaded_step", "entropy_coef"),
    *("_entropy_window_stats", "_last_world_entropy", "current_gradient_accumulation_steps"),
    *("share_prompts", "eos_token_ids"),
)


class DryRun(NamedTuple):
    """What the largest step needed.

    failed: The part that ran out of memory, or "".
    update: Of one micro-batch, forward and backward [s].
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


def preflight(trainer: "Trainer") -> list[Check]:
    """Every check, in the order a person would fix them.

    Args:
        trainer: As built, not yet training.
    """
    prompts = list(trainer.train_dataset["prompt"])
    tokens = count_tokens(trainer.policy.tokenizer, prompts)
    longest = max(range(len(prompts)), key=tokens.__getitem__)
    checks = [_context(trainer, tokens[longest]), _end_of_turn(trainer)]
    if sharded():
        fix = "watch memory_gib in the first steps"
        checks.append(Check("memory", "warning", "sharded weights: no dry run", fix))
    elif all(check.state == "ok" for check in checks):  # else the step would mean nothing
        found = dry_run(trainer, prompts[longest])
        checks.append(_memory(trainer, found))
        if not found.failed:
            checks += [_gradient(*found.gradients), _time(trainer, found)]
    checks += [*_adapters(trainer), _paths(trainer), _disk(trainer)]
    fixes = [f"{check.fix}; see {section(check.name)}" if check.fix else "" for check in checks]
    return [check._replace(fix=fix) for check, fix in zip(checks, fixes, strict=True)]


def _context(trainer: "Trainer", prompt: int) -> Check:
    need = prompt + trainer.args.max_completion_length
    model = trainer.model.config.get_text_config().max_position_embeddings
    limit = trainer.stage.config.model.max_seq_length
    seen = f"longest prompt {prompt} + completion {trainer.args.max_completion_length} = {need}"
    seen += f" tokens; max_seq_length {limit}, the model's {model}"
    if need > model:
        do = "lower train.max_completion_length or data.max_prompt_tokens: the model reads no more"
        return Check("context", "stop", seen, do)
    if need > limit:
        return Check("context", "stop", seen, f"set model.max_seq_length = {need}")
    return Check("context", "ok", seen)


def _end_of_turn(trainer: "Trainer") -> Check:
    """Whether a completion can end."""
    policy, tokenizer = trainer.policy, trainer.policy.tokenizer
    if tokenizer.eos_token_id is None:
        do = "give the tokenizer an eos_token: no completion would ever end"
        return Check("end of turn", "stop", "the tokenizer has no EOS", do)
    ends = policy.model.generation_config.eos_token_id or tokenizer.eos_token_id
    stops = {tokenizer.eos_token_id, *np.atleast_1d(ends).tolist()}
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "ANSWER"}]
    closing = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2]
    enders = ", ".join(repr(tokenizer.decode(stop)) for stop in sorted(stops))
    seen = f"a turn ends in {closing!r}, generation at {enders}"
    if stops & set(tokenizer(closing, add_special_tokens=False)["input_ids"]):
        return Check("end of turn", "ok", seen)
    do = "set the tokenizer's eos_token to the token that ends a turn in its chat template"
    return Check("end of turn", "stop", seen, do)


def _adapters(trainer: "Trainer") -> list[Check]:
    """Which linear layers and experts have an adapter, and which have not."""
    from peft.tuners.lora import LoraLayer

    if not hasattr(trainer.model, "get_base_model"):
        return []
    base = trainer.model.get_base_model()
    weights = trainable_weights(base)
    found = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    have = {  # a stack of experts has one for each weight, named within the other
        f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        if hasattr(module, "parameter_name")
        else name
        for name, module in found.items()
    }
    wanted = {*weights.layers, *weights.experts}
    without = Counter(
        ".".join(part for part in name.split(".")[-2:] if not part.isdigit())
        for name in (wanted | {*weights.others}) - have
    )
    seen = f"on {len(have)} of {len(wanted) + len(weights.others)} linear layers and experts"
    seen += f"; without: {', '.join(f'{n} x {name}' for name, n in sorted(without.items()))}"
    chosen = trainer.stage.config.model.lora_targets != "all-linear"
    if chosen or wanted <= have:
        return [Check("adapters", "ok", seen if without else seen.partition(";")[0])]
    fix = "peft or Unsloth passes over them: try the other policy.backend, or leave it so"
    return [Check("adapters", "warning", seen, fix)]


def _paths(trainer: "Trainer") -> Check:
    """Which way completions and log-probabilities are computed, and why not the quicker one."""
    copy, shared = fast_cpu.copy_lacks(trainer), fast_cpu.sharing_lacks(trainer.policy)
    seen = "completions by vLLM" if trainer.use_vllm else "completions by the policy itself"
    if trainer.samples_from_copy:
        seen = "completions from a dense copy"
    elif not cuda_available():
        seen += f" (a dense copy needs {copy or 'policy.rollouts = auto'})"
    seen += "; the update runs a prompt "
    seen += "once for its group" if trainer.share_prompts else "for each completion"
    if not trainer.share_prompts:
        seen += f" (sharing needs {shared or 'policy.share_prompts = true'})"
    return Check("paths", "ok", seen)


def _disk(trainer: "Trainer") -> Check:
    stage = trainer.stage
    kept = stage.config.train.keep_checkpoints + 1  # a new one is written before an old one goes
    checkpoint = 4 * _trained(trainer) + _optimizer_bytes(trainer)
    merged = 2 * trainer.model.num_parameters()
    need, free = kept * checkpoint + merged, shutil.disk_usage(stage.run.path).free
    seen = f"{kept} checkpoints and the merged model {need / GIB:.2f} GiB, {free / GIB:.1f} free"
    do = "free some space, lower train.keep_checkpoints, or point GRPO_NB_RUNS at a larger disk"
    return Check("disk", "stop", seen, do) if need > free else Check("disk", "ok", seen)


def _trained(trainer: "Trainer") -> int:
    return sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)


def _optimizer_bytes(trainer: "Trainer") -> int:
    """Adam's two states a weight: of a byte, or of four."""
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return _trained(trainer) * (2 if "8bit" in optim else 8)


def _memory(trainer: "Trainer", found: DryRun) -> Check:
    rows = trainer.args.per_device_train_batch_size
    if found.failed:
        seen = f"{found.failed} ran out of it; {found.budget / GIB:.1f} GiB were at hand"
        return Check("memory", "stop", seen, smaller(trainer, rows // 2))
    step, optimizer = found.peak - found.before, _optimizer_bytes(trainer)
    need = found.peak + optimizer
    seen = f"{need / GIB:.2f} GiB at most with the optimizer, of {found.budget / GIB:.1f}"
    if need <= 0.9 * found.budget:
        return Check("memory", "ok", seen)
    room = max(0.0, 0.9 * found.budget - found.before - optimizer) / max(1, step)
    state = "stop" if need > found.budget else "warning"
    return Check("memory", state, seen, smaller(trainer, int(room * rows)))


def smaller(trainer: "Trainer", rows: int) -> str:
    """The settings by which a micro-batch has at most so many rows, and the step stays as it is."""
    args = trainer.args
    other = "a smaller train.max_completion_length"
    other += " or policy.gpu_memory_utilization" if trainer.use_vllm else ""
    if args.per_device_train_batch_size == 1:
        return f"set {other}, or take a smaller model"
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    group = args.num_generations
    batch = solve_batch(step // group, group, max(1, rows), args.world_size)
    settings = " and ".join(f"train.{name} = {value}" for name, value in batch._asdict().items())
    return f"set {settings} (the same step), or {other}"


def _gradient(watched: int, reached: int, finite: bool) -> Check:
    seen = f"reaches {reached} of {watched} trained matrices"
    if not finite:
        do = "the base model overflows: set model.quantization = '16bit', or take another model"
        return Check("gradient", "stop", seen + ", and is not finite", do)
    if reached < watched or not watched:
        do = "load the policy again: what is to be trained is frozen (requires_grad) or cut off"
        return Check("gradient", "stop", seen, do)
    return Check("gradient", "ok", seen)


def _time(trainer: "Trainer", found: DryRun) -> Check:
    args = trainer.args
    micro_batches = args.gradient_accumulation_steps
    generations = micro_batches / (args.steps_per_generation * args.num_iterations)
    step = micro_batches * found.update + generations * found.generation
    seen = f"at most {step:.1f} s a step (generation {found.generation:.1f}, a micro-batch "
    seen += f"{found.update:.1f}), without rewards; {args.max_steps} steps in "
    return Check("time", "ok", f"{seen}{step * args.max_steps / 60:.1f} min")


@contextmanager
def _no_trace(trainer: "Trainer") -> Iterator[None]:
    """Put back what a step changes: random states, metrics, counters, gradients, loss scale."""
    import torch

    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in STATE if name in vars(trainer)}
    tokens_seen, scaler = trainer.state.num_input_tokens_seen, trainer.accelerator.scaler
    scale = scaler and scaler.state_dict()
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
        if scaler:
            scaler.load_state_dict(scale)
        trainer.model.zero_grad(set_to_none=True)
        if cuda_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _set_modes(trainer: "Trainer") -> None:
    """The model as `trainer.train()` sets it inside, and leaves it.

    Unsloth's trainer ends `__init__` in for_inference, and transformers switches gradient
    checkpointing on in `train` alone.
    """
    model, args = trainer.model, trainer.args
    if hasattr(model, "for_training"):
        asked = getattr(model, "_unsloth_gradient_checkpointing", args.gradient_checkpointing)
        model.for_training(use_gradient_checkpointing=asked)
    model.train()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)


def dry_run(trainer: "Trainer", prompt: list[dict]) -> DryRun:
    """A micro-batch with its gradients, then a generation to the last token; no number of it stays.

    Args:
        trainer: As built, not yet training.
        prompt: The longest chat to train on; every row of the micro-batch is this one.
    """
    policy, scaler = trainer.policy, trainer.accelerator.scaler
    text = render(policy.tokenizer, prompt)
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    update = generation = 0.0
    gradients, failed = (0, 0, True), ""
    with _no_trace(trainer):
        _set_modes(trainer)
        trainer.share_prompts = False  # other than these, a micro-batch's rows may all differ
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        if scaler:
            scale = min(scaler.get_scale(), USUAL_SCALE)
            scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
        before, budget = _memory_now()
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
        peak = max(before, peak_memory())
    return DryRun(failed, update, generation, before, peak, budget, gradients)


def _timed(work: Any, *arguments: Any) -> float:
    import torch

    started = time.perf_counter()
    work(*arguments)
    if cuda_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _update(trainer: "Trainer", prompt: list[int], vocabulary: int) -> None:
    """Forward and backward of a full micro-batch, as TRL's training_step does it."""
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


def _reached(trainer: "Trainer") -> tuple[int, int, bool]:
    """LoRA's B, whose gradient is not 0 at the start as A's is; without LoRA what is trained."""
    named = list(trainer.model.named_parameters())
    watched = [p for name, p in named if "lora_B" in name and ".ref." not in name]
    watched = watched or [parameter for _, parameter in named if parameter.requires_grad]
    gradients = [parameter.grad for parameter in watched if parameter.grad is not None]
    reached = sum(bool(gradient.count_nonzero()) for gradient in gradients)
    return len(watched), reached, all(bool(gradient.isfinite().all()) for gradient in gradients)


def _generate(trainer: "Trainer", prompt: list[dict]) -> None:
    """A step's completions by the trainer's own path, with no end before the cap."""
    count = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if trainer.samples_from_copy:
        trainer.eos_token_ids = []
    if trainer.use_vllm:
        sampling, forced = trainer.vllm_generation.generation_kwargs, {"ignore_eos": True}
    else:
        sampling = vars(trainer.generation_config)
        forced = {"min_new_tokens": trainer.args.max_completion_length}
    before, tools = dict(sampling), trainer.tools
    sampling.update(forced)
    if trainer.environment:  # which is not begun: no call is run
        trainer._batch_environments, trainer.tools = [None] * count, []
    try:
        trainer._generate([prompt] * count)
    finally:
        trainer.tools = tools
        sampling.clear()
        sampling.update(before)


def _memory_now() -> tuple[int, int]:
    """(in use, at hand) [bytes], of the GPU or else of this process; a new peak begins."""
    import torch

    if cuda_available():
        torch.cuda.reset_peak_memory_stats()
        at_hand = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        return torch.cuda.memory_allocated(), at_hand
    resident = psutil.Process().memory_info().rss
    return resident, resident + psutil.virtual_memory().available


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)
