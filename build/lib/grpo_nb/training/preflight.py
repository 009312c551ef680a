"""Check training before it starts: run its largest step, and find any fault that would stop it.

The largest step uses the longest prompt, completions of full length, and the trainer's own loss,
backward pass and generation. Its memory use is compared with the memory that is available.
The dry run does not change the results of training, except through vLLM's random state.
"""

import copy
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from typing import TYPE_CHECKING, Any

from grpo_nb.models import cuda_available, sharded
from grpo_nb.models.adapter import trainable_weights
from grpo_nb.models.template import count_tokens, encode, image_inputs, turn_end
from grpo_nb.models.vision import image_tokens
from grpo_nb.rewards.prompts import images_of
from grpo_nb.rewards.surroundings import kept
from grpo_nb.runs import Check, Checks
from grpo_nb.training import fast_cpu
from grpo_nb.training.arguments import distorted, solve_batch
from grpo_nb.training.health import section
from grpo_nb.training.metrics import asleep, memory_now, new_peak, peak_memory

if TYPE_CHECKING:
    from grpo_nb.training.trainer import Trainer

GIB = 2**30
GO_ON = "set train.guard_steps = 0 to train anyway"
# fp16 scales the loss. At its first scale most gradients overflow; training settles at this one.
USUAL_SCALE = 2.0**10
# On a CPU, the process grows by this much in the first steps. oneDNN adds kernels for shapes that
# the dry run did not have, and the C library keeps memory for later: see docs/performance.md.
GROWTH = GIB // 8
TOKENS = ("input_ids", "attention_mask")
# Attributes of a trainer to which a step appends; the step replaces the values of all others.
FILLED = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")


def preflight(trainer: "Trainer") -> Checks:
    """Return all checks, in the order in which their faults should be fixed.

    Args:
        trainer: A trainer that has not begun to train.
    """
    prompts = trainer.prompts
    tokens = count_tokens(trainer.policy.tokenizer, prompts, tools_of(trainer))
    longest = max(range(len(prompts)), key=tokens.__getitem__)
    checks = [_context(trainer, tokens[longest]), _end_of_turn(trainer), _sampling(trainer)]
    if sharded():
        fix = "watch memory_gib in the first steps"
        checks.append(Check("memory", "warning", "sharded weights: no dry run", fix))
    elif all(check.state == "ok" for check in checks[:2]):  # otherwise the step would show nothing
        checks += dry_run(trainer, prompts[longest])
    checks += [*_adapters(trainer), *_hand_over(trainer), _paths(trainer), _disk(trainer)]
    fixes = [f"{check.fix}; see {section(check.name)}" if check.fix else "" for check in checks]
    return Checks(check._replace(fix=fix) for check, fix in zip(checks, fixes, strict=True))


def _context(trainer: "Trainer", prompt: int) -> Check:
    need = prompt + trainer.args.max_completion_length
    model = trainer.model.config.get_text_config().max_position_embeddings
    limit = trainer.stage.config.model.max_seq_length
    sizes = f"longest prompt {prompt} + completion {trainer.args.max_completion_length} = {need}"
    sizes += f" tokens; max_seq_length {limit}, the model's {model}"
    fix = f"set model.max_seq_length = {need}"
    if need > model:
        fix = "lower train.max_completion_length or data.max_prompt_tokens: the model reads no more"
    return Check("context", "ok", sizes) if need <= limit else Check("context", "stop", sizes, fix)


def _end_of_turn(trainer: "Trainer") -> Check:
    """Check that a completion can end."""
    tokenizer, stops = trainer.policy.tokenizer, {*trainer.eos_token_ids} - {None}
    closing = turn_end(tokenizer)
    enders = ", ".join(repr(tokenizer.decode(stop)) for stop in sorted(stops)) or "no token"
    ends = f"a turn ends in {closing!r}, generation at {enders}"
    if stops & set(tokenizer(closing, add_special_tokens=False)["input_ids"]):
        return Check("end of turn", "ok", ends)
    fix = "set the tokenizer's eos_token to the token that ends a turn in its chat template"
    return Check("end of turn", "stop", ends, fix)


def _sampling(trainer: "Trainer") -> Check:
    """Check that completions are sampled with the probabilities that the loss uses."""
    if not (cuts := distorted(trainer.args)):
        return Check("sampling", "ok", "from the policy's own distribution")
    cause = f"{cuts}, which the trainer's log-probabilities ignore"
    state = "stop" if trainer.stage.config.train.guard_steps else "warning"
    return Check("sampling", state, cause, f"leave it unset, or {GO_ON}")


def _adapters(trainer: "Trainer") -> list[Check]:
    """Check which linear layers and experts have an adapter."""
    if not hasattr(trainer.model, "get_base_model"):
        return []
    weights, tuner = trainable_weights(trainer.model.get_base_model()), trainer.model.base_model
    adapters = {*tuner.targeted_module_names, *tuner.targeted_parameter_names}
    targets = {*weights.layers, *weights.experts}
    if trainer.stage.config.model.vision_tower:
        targets |= {*weights.vision}
    weights = targets | {*weights.vision, *weights.others}
    without = Counter(
        ".".join(part for part in name.split(".")[-2:] if not part.isdigit())
        for name in weights - adapters
    )
    count = f"on {len(adapters)} of {len(weights)} linear layers and experts"
    if without:
        count += f"; without: {', '.join(f'{n} x {name}' for name, n in sorted(without.items()))}"
    if trainer.stage.config.model.lora_targets != "all-linear" or targets <= adapters:
        return [Check("adapters", "ok", count)]
    fix = "peft or Unsloth skips them: try the other policy.backend, or leave it as it is"
    return [Check("adapters", "warning", count, fix)]


def _hand_over(trainer: "Trainer") -> list[Check]:
    """Check that Unsloth passes the adapter to vLLM unchanged."""
    if not trainer.policy.vllm:
        return []
    if not trainer.policy.folds_adapter:
        return [Check("hand-over", "ok", "vLLM gets the adapter as LoRA before each generation")]
    evidence = "Unsloth adds the adapter to vLLM's 16-bit weights, which rounds small updates away"
    fix = "restart the kernel with UNSLOTH_VLLM_MERGED_ROLLOUT=0"
    return [Check("hand-over", "warning", evidence, fix)]


def _paths(trainer: "Trainer") -> Check:
    """Report how completions and log-probabilities are computed, and what the faster paths need."""
    sampling = fast_cpu.sampling_lacks(trainer)
    sharing = fast_cpu.sharing_lacks(trainer.policy, trainer.stage.config.policy.share_prompts)
    paths = "completions by the dense engine"
    if sampling:
        paths = f"completions by {'vLLM' if trainer.use_vllm else 'the policy itself'}"
        paths += "" if cuda_available() else f" (the dense engine needs {sampling})"
    paths += "; the update runs a prompt "
    paths += f"for each completion (sharing needs {sharing})" if sharing else "once for its group"
    return Check("paths", "ok", paths)


def _disk(trainer: "Trainer") -> Check:
    stage = trainer.stage
    count = stage.config.train.keep_checkpoints + 1  # a new one is written before an old one goes
    weights = 4 * trainer.model.num_parameters(only_trainable=True)
    checkpoint = weights + _optimizer_bytes(trainer)
    model = 2 * trainer.model.num_parameters()
    need, free = count * checkpoint + model, shutil.disk_usage(stage.run.path).free
    sizes = f"{count} checkpoints and the merged model {need / GIB:.2f} GiB, {free / GIB:.1f} free"
    fix = "free some space, lower train.keep_checkpoints, or point GRPO_NB_RUNS at a larger disk"
    return Check("disk", "stop", sizes, fix) if need > free else Check("disk", "ok", sizes)


def _optimizer_bytes(trainer: "Trainer") -> int:
    """Return the bytes of Adam's states: two per trained weight, of one or four bytes each."""
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return trainer.model.num_parameters(only_trainable=True) * (2 if "8bit" in optim else 8)


def _memory(trainer: "Trainer", before: int, peak: int, budget: int) -> Check:
    """Check the step's peak memory against the budget, given the use `before` the step [bytes]."""
    more = _optimizer_bytes(trainer) + (0 if cuda_available() else GROWTH)
    need = peak + more
    sizes = f"{need / GIB:.2f} GiB at most with the optimizer, of {budget / GIB:.1f}"
    if need <= 0.9 * budget:
        return Check("memory", "ok", sizes)
    room = max(0.0, 0.9 * budget - before - more) / max(1, peak - before)
    rows = int(room * trainer.args.per_device_train_batch_size)
    return Check("memory", "stop" if need > budget else "warning", sizes, smaller(trainer, rows))


def smaller(trainer: "Trainer", rows: int) -> str:
    """Suggest settings for the same effective batch with at most `rows` rows per micro-batch."""
    args = trainer.args
    other = "a smaller train.max_completion_length"
    # Under standby Unsloth sets the engine's share of the memory itself.
    shared = trainer.use_vllm and not args.vllm_enable_sleep_mode
    other += " or policy.gpu_memory_utilization" if shared else ""
    if args.per_device_train_batch_size == 1:
        return f"set {other}, or take a smaller model"
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    group = args.num_generations
    batch = solve_batch(step // group, group, max(1, rows))  # settings count all processes
    settings = " and ".join(f"train.{name} = {value}" for name, value in batch._asdict().items())
    return f"set {settings} (the same step), or {other}"


def _gradient(trainer: "Trainer") -> Check:
    """Check that gradients reach every LoRA B matrix or, without LoRA, every trained weight.

    At first, the gradients of LoRA's A matrices are 0.
    """
    parameters = list(trainer.model.named_parameters())
    matrices = [p for name, p in parameters if "lora_B" in name and ".ref." not in name]
    matrices = matrices or [p for _, p in parameters if p.requires_grad]
    gradients = [p.grad for p in matrices if p.grad is not None]
    count = sum(bool(gradient.count_nonzero()) for gradient in gradients)
    evidence, fix = f"reaches {count} of {len(matrices)} trained matrices", ""
    if not all(gradient.isfinite().all() for gradient in gradients):
        evidence += ", and is not finite"
        fix = "the base model overflows: set model.quantization = '16bit', or take another model"
    elif count < len(matrices) or not matrices:
        fix = "load the policy again: weights to train are frozen (requires_grad) or unused"
    return Check("gradient", "stop" if fix else "ok", evidence, fix)


def _time(args: Any, update: float, generation: float) -> Check:
    """Estimate the time of all steps from the times of a micro-batch and a generation [s]."""
    micro_batches = args.gradient_accumulation_steps
    generations = micro_batches / (args.steps_per_generation * args.num_iterations)
    step = micro_batches * update + generations * generation
    total = f"{args.max_steps} steps take at most {step * args.max_steps / 60:.1f} min"
    parts = f"{step:.1f} s each (generation {generation:.1f}, a micro-batch {update:.1f})"
    return Check("time", "ok", f"{total}: {parts}, without rewards and validation")


@contextmanager
def stand_in(trainer: "Trainer") -> Iterator["Trainer"]:
    """Yield a copy of the trainer with which to run a step.

    At the end, random states and the loss scale are restored, and gradients are cleared.
    """
    import torch

    double, scaler = copy.copy(trainer), trainer.accelerator.scaler
    for name in FILLED:
        setattr(double, name, copy.deepcopy(getattr(trainer, name)))
    for name in {"vllm_generation", "generation_config"} & set(vars(trainer)):
        setattr(double, name, copy.copy(getattr(trainer, name)))
    double.state = copy.copy(trainer.state)
    double.share_prompts = False  # the rows of a real micro-batch may all differ
    double.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    scale = scaler and scaler.state_dict()
    if scaler:
        scaler.load_state_dict(scale | {"scale": min(scaler.get_scale(), USUAL_SCALE)})
    try:
        with kept(f"trial {trainer.state.global_step}"):
            yield double
    finally:
        if scaler:
            scaler.load_state_dict(scale)
        trainer.model.zero_grad(set_to_none=True)
        if cuda_available():
            torch.cuda.empty_cache()
            new_peak()


def _set_modes(trainer: "Trainer") -> None:
    """Set the model's modes as `trainer.train()` does.

    After `__init__` of Unsloth's trainer the model is in inference mode, and transformers turns
    gradient checkpointing on only in `train`.
    """
    model, args = trainer.model, trainer.args
    if hasattr(model, "for_training"):
        recompute = getattr(model, "_unsloth_gradient_checkpointing", args.gradient_checkpointing)
        model.for_training(use_gradient_checkpointing=recompute)
    model.train()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)


def dry_run(trainer: "Trainer", prompt: list[dict]) -> list[Check]:
    """Run a micro-batch with its gradients, then a generation up to the cap, and keep no result.

    Args:
        trainer: A trainer that has not begun to train.
        prompt: The longest chat to train on; every row of the micro-batch is this chat.

    Returns:
        The checks "memory", "gradient" and "time"; only "memory" if the memory ran out.
    """
    part = "the update"
    with stand_in(trainer) as double:
        _set_modes(trainer)
        sleeping = asleep(trainer)
        before, budget = (size - sleeping for size in memory_now())
        new_peak()
        try:
            for _ in range(2 if cuda_available() else 1):  # on a GPU the first run compiles
                update = _timed(_update, double, prompt)
            gradient = _gradient(trainer)
            trainer.model.zero_grad(set_to_none=True)
            part = "generation"
            generation = _timed(_generate, double, prompt)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            evidence = f"{part} ran out of memory; {budget / GIB:.1f} GiB were available"
            less = smaller(trainer, trainer.args.per_device_train_batch_size // 2)
            return [Check("memory", "stop", evidence, less)]
        memory = _memory(trainer, before, max(before, peak_memory() - sleeping), budget)
    return [memory, gradient, _time(trainer.args, update, generation)]


def tools_of(trainer: "Trainer") -> Sequence[Mapping[str, Any]]:
    """Return the schemas of the tools that the prompts describe."""
    return trainer.environment.tools if trainer.environment else ()


def _timed(work: Any, *arguments: Any) -> float:
    import torch

    started = time.perf_counter()
    work(*arguments)
    if cuda_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def images_for(trainer: "Trainer", prompts: Sequence[list[dict]], room: int) -> dict[str, Any]:
    """Return the arguments with which TRL passes the images of prompts to the model.

    Args:
        trainer: The trainer.
        prompts: One chat for each row; {} is returned if none of them has an image.
        room: The width of the completions [tokens].
    """
    if not any(map(images_of, prompts)):
        return {}
    inputs = image_inputs(trainer.policy.tokenizer, prompts, room=room)
    device = trainer.accelerator.device
    others = {name: x.to(device) for name, x in inputs.items() if name not in TOKENS}
    return others | {"num_images": [len(images_of(prompt)) for prompt in prompts]}


def _update(trainer: "Trainer", prompt: list[dict]) -> None:
    """Run the forward and backward pass of a full micro-batch, as TRL's training_step does."""
    import torch

    args, device, tokenizer = trainer.args, trainer.accelerator.device, trainer.policy.tokenizer
    rows, length = args.per_device_train_batch_size, args.max_completion_length
    vocabulary = len(tokenizer)
    [prompt_ids] = encode(tokenizer, [prompt], tools_of(trainer))
    ids = torch.tensor([prompt_ids] * rows, device=device)
    ones = torch.ones(rows, length, device=device)
    random_ids = torch.randint(vocabulary, (rows, length), device=device)
    for token in image_tokens(trainer.model.config):  # such a token would need an image
        random_ids[random_ids == token] = tokenizer.eos_token_id
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": random_ids,
        "completion_mask": ones.long(),
        "advantages": torch.ones(rows, device=device) - 2 * (torch.arange(rows, device=device) % 2),
        "num_items_in_batch": torch.tensor(rows * length * args.steps_per_generation),
        "importance_sampling_ratio": ones,
        "ref_per_token_logps": -log(vocabulary) * ones,  # TRL reads it where beta > 0
        **images_for(trainer, [prompt] * rows, length),
    }
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs)
    if loss.requires_grad:  # False if the adapter is frozen
        scaler = trainer.accelerator.scaler  # for fp16: without it, small gradients would be 0
        (scaler.scale(loss) if scaler else loss).backward()


def _generate(trainer: "Trainer", prompt: list[dict]) -> None:
    """Sample a step's completions as the trainer does, but let none end before the cap.

    Args:
        trainer: The copy of the trainer; its sampling settings are changed.
        prompt: The longest chat.
    """
    args = trainer.args
    if trainer.samples_densely:
        trainer.eos_token_ids = []
    elif trainer.use_vllm:
        vllm = trainer.vllm_generation
        vllm.generation_kwargs = vllm.generation_kwargs | {"ignore_eos": True}
    else:
        trainer.generation_config.min_new_tokens = args.max_completion_length
    count = args.per_device_train_batch_size * args.steps_per_generation
    if trainer.environment:  # no episode has begun, so no call is run
        trainer._batch_environments, trainer.tools = [None] * count, []
    trainer._generate([prompt] * count)


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)
