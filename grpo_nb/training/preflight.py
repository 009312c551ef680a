"""Before a training starts: a dry run of its largest step, and what would stop it hours later.

The largest step is the longest prompt with completions of full length, through the trainer's own
loss, backward pass and generation. What it needed is held against the machine. A training after
it gives the same numbers as one without (vLLM's own random state apart).
"""

import copy
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from grpo_nb.models import cuda_available, sharded
from grpo_nb.models.chat import count_tokens, render
from grpo_nb.runs import Check
from grpo_nb.training.batch import solve_batch
from grpo_nb.training.health import section

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_nb.training.trainer import Trainer

GIB = 2**30
LEAST_SCALE = 1.0  # of fp16's loss; a gradient that is infinite even so is no overflow of scaling
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
    checks = [_context(trainer, tokens[longest]), *_stops(trainer)]
    checks += _sampling(trainer.args, trainer.use_vllm)
    if sharded():
        fix = "watch memory_gib in the first steps"
        checks.append(Check("memory", "warning", "sharded weights: no dry run", fix))
    elif all(check.state != "stop" for check in checks):  # else the step would mean nothing
        probe = worst_step(trainer, prompts[longest])
        checks.append(_memory(trainer, probe))
        if not probe.failed:
            checks += [_gradient(probe), _time(trainer, probe)]
    checks.append(_disk(trainer))
    return [
        check
        if check.state == "ok"
        else check._replace(fix=f"{check.fix}; see {section(check.name)}")
        for check in checks
    ]


def _context(trainer: "Trainer", prompt: int) -> Check:
    need = prompt + trainer.args.max_completion_length
    model = trainer.model.config.max_position_embeddings
    limit = trainer.stage.config.model.max_seq_length
    seen = f"longest prompt {prompt} + completion {trainer.args.max_completion_length} = {need}"
    seen += f" tokens; max_seq_length {limit}, the model's {model}"
    if need > model:
        do = "lower train.max_completion_length or data.max_prompt_tokens: the model reads no more"
        return Check("context", "stop", seen, do)
    if need > limit:
        return Check("context", "stop", seen, f"set model.max_seq_length = {need}")
    return Check("context", "ok", seen)


def _stops(trainer: "Trainer") -> list[Check]:
    """Whether a completion can end, and its end is told from padding."""
    policy, tokenizer = trainer.policy, trainer.policy.tokenizer
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if eos is None:
        do = "give the tokenizer an eos_token: no completion would ever end"
        return [Check("end of turn", "stop", "the tokenizer has no EOS", do)]
    stops = {eos, *np.atleast_1d(policy.model.generation_config.eos_token_id or eos).tolist()}
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "ANSWER"}]
    closing = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2]
    ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
    enders = ", ".join(repr(tokenizer.decode(stop)) for stop in sorted(stops))
    shown = f"a turn ends in {closing!r}, generation at {enders}"
    checks = [Check("end of turn", "ok", shown)]
    if not stops & set(ids):
        do = "set the tokenizer's eos_token to the token that ends a turn in its chat template"
        checks = [Check("end of turn", "stop", shown, do)]
    known = policy.model.generation_config.eos_token_id
    if eos not in np.atleast_1d(known).tolist():
        seen = f"generation_config.eos_token_id = {known}, the tokenizer's is {eos}"
        do = f"set eos_token_id to {eos} in the model's generation_config.json"
        checks.append(Check("generation config", "warning", seen, do))
    if pad is None or pad == eos:
        do = "give the tokenizer a pad_token of its own, so that the end is not taken for padding"
        checks.append(Check("padding", "warning", f"pad {pad}, EOS {eos}", do))
    return checks


def _sampling(args: "GRPOConfig", vllm: bool) -> list[Check]:
    """TRL 1.15 compares vLLM's probabilities, cut by these, with whole ones (TRL issue 6789)."""
    whole = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
    known = {name: getattr(args, name) for name in whole}
    cut = [f"trl.{name} = {v}" for name, v in known.items() if v not in whole[name]]
    if not (vllm and cut):
        return []
    do = "leave it out: it biases the importance ratio, and so the update"
    return [Check("sampling", "warning", f"{', '.join(cut)} while vLLM generates", do)]


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


def _memory(trainer: "Trainer", probe: Probe) -> Check:
    rows = trainer.args.per_device_train_batch_size
    if probe.failed:
        seen = f"{probe.failed} ran out of it; {probe.budget / GIB:.1f} GiB were at hand"
        return Check("memory", "stop", seen, smaller(trainer, rows // 2))
    fixed = probe.before + _optimizer_bytes(trainer)
    need = fixed + probe.peak - probe.before
    seen = f"{need / GIB:.2f} GiB at most with the optimizer, of {probe.budget / GIB:.1f}"
    if need <= 0.9 * probe.budget:
        return Check("memory", "ok", seen)
    room = max(0.0, 0.9 * probe.budget - fixed) / max(1, probe.peak - probe.before)
    result = "stop" if need > probe.budget else "warning"
    return Check("memory", result, seen, smaller(trainer, int(room * rows)))


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


def _gradient(probe: Probe) -> Check:
    watched, reached, finite = probe.gradients
    seen = f"reaches {reached} of {watched} trained matrices"
    if not finite:
        do = "the base model overflows: set model.quantization = '16bit', or take another model"
        return Check("gradient", "stop", seen + ", and is not finite", do)
    if reached < watched or not watched:
        do = "load the policy again: what is to be trained is frozen (requires_grad) or cut off"
        return Check("gradient", "stop", seen, do)
    return Check("gradient", "ok", seen)


def _step_seconds(trainer: "Trainer", probe: Probe) -> float:
    passes, args = trainer.args.gradient_accumulation_steps, trainer.args
    generations = passes / (args.steps_per_generation * args.num_iterations)
    return passes * probe.update + generations * probe.generation


def _time(trainer: "Trainer", probe: Probe) -> Check:
    step, steps = _step_seconds(trainer, probe), trainer.args.max_steps
    seen = f"at most {step:.1f} s a step (generation {probe.generation:.1f}, a micro-batch "
    whole = f"{step * steps / 60:.0f} min" if step * steps > 120 else f"{step * steps:.0f} s"
    seen += f"{probe.update:.1f}), without rewards; {steps} steps in {whole}"
    return Check("time", "ok", seen)


@contextmanager
def _no_trace(trainer: "Trainer") -> Iterator[None]:
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
def _as_training(trainer: "Trainer") -> Iterator[None]:
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


def worst_step(trainer: "Trainer", prompt: list[dict]) -> Probe:
    """A micro-batch with its gradients, then a generation to the last token; nothing of it stays.

    Args:
        trainer: As built, not yet training.
        prompt: The longest chat to train on; every row of the micro-batch is this one.
    """
    with _no_trace(trainer):
        return _probe(trainer, prompt)


def _probe(trainer: "Trainer", prompt: list[dict]) -> Probe:
    policy = trainer.policy
    text = render(policy.tokenizer, prompt)
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    trainer.share_prompts = False  # other than these, a micro-batch's rows may all differ
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


def _lower_loss_scale(trainer: "Trainer") -> bool:
    """Whether fp16's loss scale could fall: the first is meant to be too high for most models."""
    if not scale_can_fall(trainer):
        return False
    scaler = trainer.accelerator.scaler
    lower = max(LEAST_SCALE, scaler.get_scale() / 16)  # a training halves it each time
    scaler.load_state_dict(scaler.state_dict() | {"scale": lower})
    return True


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


def scale_can_fall(trainer: Any) -> bool:
    """Whether the loss of an fp16 training is scaled up, so that a gradient may overflow by that.

    torch's GradScaler begins at 65,536 and halves its scale after each such step.
    """
    scaler = trainer.accelerator.scaler
    return scaler is not None and scaler.get_scale() > LEAST_SCALE


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)
