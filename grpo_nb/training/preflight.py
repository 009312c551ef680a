"""Check training before it starts: run its largest step, and find any fault that would stop it.

    trainer = GRPOTrainer(…)
    preflight(trainer).refuse()
    trainer.train()

The largest step uses the longest prompt, completions of full length, and the trainer's own loss,
backward pass and generation. Its memory use is compared with the memory that is available.
The dry run does not change the results of training, except through vLLM's random state.
"""

import copy
import math
import time
from collections.abc import Callable
from typing import Any

from grpo_nb import ranks
from grpo_nb.checks import Check, Checks
from grpo_nb.models import cuda_available, sharded, use_torch_head
from grpo_nb.models.template import turn_end
from grpo_nb.training import guard, stock
from grpo_nb.training.health import section
from grpo_nb.training.stock import memory_now, new_peak, peak_memory

GIB = 2**30
LONGEST = 64  # prompts of the most characters, whose tokens are counted
# On a CPU, the process grows by this much in the first steps. oneDNN adds kernels for shapes that
# the dry run did not have, and the C library keeps memory for later: see docs/performance.md.
GROWTH = GIB // 8
OVERFLOW = "the base model overflows: load it in 16 bits (load_in_4bit=False), or take another"
SMALLER = (
    "lower per_device_train_batch_size and raise gradient_accumulation_steps as much (the same "
    "step); or lower max_completion_length, or vLLM's share (gpu_memory_utilization)"
)


def preflight(trainer: Any) -> Checks:
    """Return all checks, in the order in which their faults should be fixed; print their result.

    Args:
        trainer: A trainer that has not begun to train.
    """
    use_torch_head()
    begun, is_main = time.monotonic(), ranks.is_main()
    row, tokens = _longest(trainer)
    checks = [_context(trainer, tokens), *_end_of_turn(trainer, row), _sampling(trainer)]
    if sharded():
        fix = "watch memory_gib in the first steps"
        checks.append(Check("memory", "warning", "sharded weights: no dry run", fix))
    elif all(check.state != "stop" for check in checks):  # otherwise the step would show nothing
        if is_main:
            print("preflight: the largest step is tried …", flush=True)
        checks += dry_run(trainer, row)
    checks += _hand_over(trainer)
    if is_main:
        print("preflight:", _result(checks, time.monotonic() - begun))
    fixes = [f"{check.fix}; see {section(check.name)}" if check.fix else "" for check in checks]
    return Checks(check._replace(fix=fix) for check, fix in zip(checks, fixes, strict=True))


def _result(checks: list[Check], seconds: float) -> str:
    """Say how many checks passed, and which did not.

    >>> _result([Check("time", "ok", ""), Check("memory", "stop", "")], 3.2)
    '1 of 2 checks passed in 3 s; stop: memory'
    """
    faults = "".join(f"; {check.state}: {check.name}" for check in checks if check.state != "ok")
    passed = sum(check.state == "ok" for check in checks)
    count = f"{passed} of {len(checks)}" if faults else f"{passed}"
    return f"{count} checks passed in {seconds:.0f} s{faults}"


def _longest(trainer: Any) -> tuple[stock.Row, int]:
    """Return the row with the longest prompt, and its length [tokens]."""
    rows = stock.rows_of(trainer)
    if not {"image", "images"} & {*rows[0]}:  # an image's tokens depend on its size
        rows = sorted(rows, key=lambda row: len(str(row["prompt"])))[-LONGEST:]
    lengths = stock.lengths_of(trainer, rows)
    place = max(range(len(rows)), key=lengths.__getitem__)
    return rows[place], lengths[place]


def _context(trainer: Any, prompt: int) -> Check:
    need = prompt + trainer.args.max_completion_length
    model = trainer.model.config.get_text_config().max_position_embeddings
    limit = getattr(trainer.model, "max_seq_length", None) or model  # Unsloth's, and ours
    sizes = f"longest prompt {prompt} + completion {trainer.args.max_completion_length} = {need}"
    sizes += f" tokens; max_seq_length {limit}, the model's {model}"
    fix = f"set max_seq_length = {need}"
    if need > model:
        fix = "lower max_completion_length, or leave long prompts out: the model reads no more"
    return Check("context", "ok", sizes) if need <= limit else Check("context", "stop", sizes, fix)


def _end_of_turn(trainer: Any, row: stock.Row) -> list[Check]:
    """Check that a completion can end, if prompts are chats."""
    if isinstance(row["prompt"], str):
        return []
    tokenizer, stops = stock.tokenizer_of(trainer), stock.stops_of(trainer)
    closing = turn_end(tokenizer)
    enders = ", ".join(repr(tokenizer.decode(stop)) for stop in sorted(stops)) or "no token"
    ends = f"a turn ends in {closing!r}, generation at {enders}"
    if stops & set(tokenizer(closing, add_special_tokens=False)["input_ids"]):
        return [Check("end of turn", "ok", ends)]
    fix = "set the tokenizer's eos_token to the token that ends a turn in its chat template"
    return [Check("end of turn", "stop", ends, fix)]


def _sampling(trainer: Any) -> Check:
    """Check that completions are sampled with the probabilities that the loss uses."""
    if not (cuts := stock.distorted(trainer.args)):
        if dropout := stock.dropout_of(trainer.model):
            fix = "set disable_dropout=True, or lora_dropout=0"
            return Check("sampling", "warning", f"dropout = {dropout:g}: {guard.DROPOUT}", fix)
        return Check("sampling", "ok", "from the policy's own distribution")
    return Check("sampling", "warning", f"{cuts}, and so {guard.CUT}", guard.CUT_FIX)


def _hand_over(trainer: Any) -> list[Check]:
    """Check that Unsloth passes the adapter to vLLM unchanged."""
    if not stock.folds_adapter(trainer):
        return []
    evidence = "Unsloth adds the adapter to vLLM's 16-bit weights, which rounds small updates away"
    fix = "restart the kernel with UNSLOTH_VLLM_MERGED_ROLLOUT=0"
    return [Check("hand-over", "warning", evidence, fix)]


def _optimizer_bytes(trainer: Any) -> int:
    """Return the size of Adam's states for all trained weights [bytes].

    Each weight has two states, of one byte each with an 8-bit optimizer, else of four.
    """
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return trainer.model.num_parameters(only_trainable=True) * (2 if "8bit" in optim else 8)


def _memory(trainer: Any, peak: int, budget: int) -> Check:
    """Check the step's peak memory against the budget [bytes]."""
    more = _optimizer_bytes(trainer) + (0 if cuda_available() else GROWTH)
    need = peak + more
    sizes = f"{need / GIB:.2f} GiB at most with the optimizer, of {budget / GIB:.1f}"
    if need <= 0.9 * budget:
        return Check("memory", "ok", sizes)
    return Check("memory", "stop" if need > budget else "warning", sizes, SMALLER)


def _gradient(trainer: Any) -> Check:
    """Check that gradients reach every LoRA B matrix or, without LoRA, every trained weight.

    At first, the gradients of LoRA's A matrices are 0, because B is 0.
    """
    parameters = list(trainer.model.named_parameters())
    matrices = [p for name, p in parameters if "lora_B" in name and ".ref." not in name]
    matrices = matrices or [p for _, p in parameters if p.requires_grad]
    gradients = [p.grad for p in matrices if p.grad is not None]
    count = sum(bool(gradient.count_nonzero()) for gradient in gradients)
    evidence, fix = f"reaches {count} of {len(matrices)} trained matrices", ""
    if not all(gradient.isfinite().all() for gradient in gradients):
        evidence += ", and is not finite"
        fix = OVERFLOW
    elif count < len(matrices) or not matrices:
        fix = "load the policy again: weights to train are frozen (requires_grad) or unused"
    return Check("gradient", "stop" if fix else "ok", evidence, fix)


def _time(trainer: Any, update: float, generation: float) -> Check:
    """Estimate the time of a step from the times of a micro-batch and of a generation [s]."""
    args = trainer.args
    micro_batches = args.gradient_accumulation_steps
    generations = micro_batches / (args.steps_per_generation * args.num_iterations)
    step = micro_batches * update + generations * generation
    total = f"a step takes at most {step:.1f} s (generation {generation:.1f}, a micro-batch "
    total += f"{update:.1f}), without rewards and validation"
    if steps := _steps(trainer):
        total += f"; {steps} steps {step * steps / 60:.1f} min"
    return Check("time", "ok", total)


def _steps(trainer: Any) -> int:
    """Return the number of steps of the whole training; 0 for epochs of a stream."""
    args, rows = trainer.args, trainer.train_dataset
    if args.max_steps > 0 or not hasattr(rows, "__len__"):
        return max(0, args.max_steps)
    generations = len(rows) * args.num_generations // args.generation_batch_size  # per epoch
    micro_batches = generations * args.steps_per_generation * args.num_iterations
    return math.ceil(args.num_train_epochs * -(-micro_batches // args.gradient_accumulation_steps))


def _set_modes(trainer: Any) -> None:
    """Set the model's modes as `trainer.train()` does.

    After `__init__` of Unsloth's trainer, the model is in inference mode. transformers turns
    gradient checkpointing on only in `train`.
    """
    model, args = trainer.model, trainer.args
    if hasattr(model, "for_training"):
        recompute = getattr(model, "_unsloth_gradient_checkpointing", args.gradient_checkpointing)
        model.for_training(use_gradient_checkpointing=recompute)
    model.train()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)


def dry_run(trainer: Any, row: stock.Row) -> list[Check]:
    """Run a generation up to the cap, then a micro-batch with its gradients, and keep no result.

    Args:
        trainer: A trainer that has not begun to train.
        row: The row with the longest prompt; every row of the step is this one.

    Returns:
        The checks "memory", "gradient" and "time"; only "memory" if the memory ran out, and only
        "gradient" if the model's probabilities are NaN or infinite.
    """
    part = "generation"
    with stock.stand_in(trainer) as double:
        _set_modes(trainer)
        before, budget = memory_now()
        new_peak()
        try:
            generation, inputs = _timed(_generate, double, row)
            part = "the update"
            for _ in range(2 if cuda_available() else 1):  # on a GPU the first run compiles
                update, _ = _timed(_update, double, inputs)
            gradient = _gradient(trainer)
        except (RuntimeError, MemoryError) as error:
            if "probability tensor contains" in str(error):  # torch's words, at sampling
                evidence = "the model's probabilities are NaN or infinite"
                return [Check("gradient", "stop", evidence, OVERFLOW)]
            if not is_out_of_memory(error):
                raise
            evidence = f"{part} ran out of memory; {budget / GIB:.1f} GiB were available"
            return [Check("memory", "stop", evidence, SMALLER)]
        memory = _memory(trainer, max(before, peak_memory()), budget)
    return [memory, gradient, _time(trainer, update, generation)]


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds that some work takes, and its result."""
    import torch

    started = time.perf_counter()
    result = work(*arguments)
    if cuda_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def _update(trainer: Any, inputs: dict[str, Any]) -> None:
    """Run the forward and backward pass of a micro-batch, as TRL's training_step does."""
    import torch

    args, ids = trainer.args, inputs["prompt_ids"].clone()
    places = torch.arange(len(ids), device=ids.device)
    if getattr(trainer, "share_prompts", False):  # TRL mixes the rows of a generation's prompts
        prompts = len(ids) * args.steps_per_generation / args.num_generations
        ids[:, 0] = places % (math.ceil(prompts) + (prompts % 1 > 0))
    advantages = 1.0 - 2 * (places % 2)  # the rewards were not asked
    inputs = inputs | {"prompt_ids": ids, "advantages": advantages}
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs)
    if loss.requires_grad:  # False if the adapter is frozen
        scaler = trainer.accelerator.scaler  # for fp16: without it, small gradients would be 0
        (scaler.scale(loss) if scaler else loss).backward()


def _generate(trainer: Any, row: stock.Row) -> dict[str, Any]:
    """Sample completions as the trainer does, but let none end before the cap.

    Args:
        trainer: The copy of the trainer; its sampling settings are changed.
        row: The row with the longest prompt.

    Returns:
        The first micro-batch, as TRL makes it.
    """
    import torch

    args = trainer.args
    if getattr(trainer, "samples_densely", False):
        trainer.eos_token_ids = []
    elif hasattr(trainer, "vllm_generation"):
        vllm = trainer.vllm_generation
        vllm.generation_kwargs = vllm.generation_kwargs | {"ignore_eos": True}
    elif trainer.use_vllm:  # TRL up to 0.24
        trainer.args = copy.copy(args)
        trainer.args.generation_kwargs = (args.generation_kwargs or {}) | {"ignore_eos": True}
    else:
        trainer.generation_config.min_new_tokens = args.max_completion_length
    trainer._step, trainer._buffered_inputs = 0, None
    count = args.per_device_train_batch_size * args.steps_per_generation
    with torch.no_grad():
        return trainer._prepare_inputs([row] * count)


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)
