"""Read what the tools need from any GRPOTrainer: TRL's from 0.22 to 1.16, Unsloth's, or ours.

Names and features that differ between versions are dealt with only in this module. It also divides
a step into micro-batches, and measures the time and memory of a step.
"""

import copy
import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import psutil

from grpo_nb import models
from grpo_nb.models import cuda_available
from grpo_nb.models.template import image_inputs
from grpo_nb.rewards.calls import kept
from grpo_nb.rewards.prompts import images_of, with_images

if TYPE_CHECKING:
    import torch

STREAMED_ROWS = 1000  # read of a dataset that has no length
# Arguments that change the distribution of the samples, but not the trainer's log-probabilities.
# With these values, with None, or with vLLM's -1, they change nothing.
NEUTRAL_SAMPLING = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
# fp16 scales the loss. At its first scale most gradients overflow; training settles at this one.
USUAL_SCALE = 2.0**10
TOKENS = ("input_ids", "attention_mask")
# What a batch holds for the images of its prompts, under any version.
OF_IMAGES = ("pixel_values", "pixel_attention_mask", "pixel_position_ids", "image_grid_thw")
OF_IMAGES += ("image_sizes", "image_position_ids", "spatial_shapes", "num_images", "num_tiles")
OF_IMAGES += ("token_type_ids", "mm_token_type_ids")
# Attributes of a trainer to which a step appends; the step replaces the values of all others.
FILLED = {"_metrics", "_logs", "_pending_extra_logs", "_pending_metrics"}
Row = Mapping[str, Any]


def add_callback(trainer: Any, callback: Any, first: bool = False) -> None:
    """Add a callback in place of an earlier one of its class, because a cell may run twice.

    The callback is called before all others if `first` is true, else after them.
    """
    callbacks = trainer.callback_handler.callbacks
    for other in [c for c in callbacks if isinstance(c, type(callback))]:
        trainer.remove_callback(other)
    callbacks.insert(0 if first else len(callbacks), callback)


def call_once(trainer: Any, callback: Any) -> None:
    """Remove duplicates of a callback, which a person may add by `trainer.add_callback`, too."""
    callbacks = trainer.callback_handler.callbacks
    places = [place for place, other in enumerate(callbacks) if other is callback]
    for place in reversed(places[1:]):  # the later ones: the handler goes through this list now
        del callbacks[place]


def tokenizer_of(trainer: Any) -> Any:
    """Return the trainer's tokenizer; its attribute `processor` is the processor, if any."""
    return models.tokenizer_of(trainer.processing_class)


def rows_of(trainer: Any, most: int | None = None) -> list[Row]:
    """Return the rows to train on; a row without a prompt gets an empty one.

    Args:
        trainer: The trainer.
        most: The maximum number of rows; None for all rows, or for the first 1000 of a stream.
    """
    dataset = trainer.train_dataset
    if most is None and not hasattr(dataset, "__len__"):
        most = STREAMED_ROWS
    rows = [dict(row) for row in islice(iter(dataset), most)]
    for row in rows:  # an environment may own the prompt
        row.setdefault("prompt", [{"role": "user", "content": ""}])
    return rows


def chat_of(row: Row) -> Any:
    """Return a row's prompt, which is a chat or a text, with the row's images in it."""
    images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
    return with_images(row["prompt"], images) if images else row["prompt"]


def lengths_of(trainer: Any, rows: Sequence[Row]) -> list[int]:
    """Return the lengths of the rows' prompts, as the trainer encodes them [tokens]."""
    tokenizer, lengths = tokenizer_of(trainer), []
    tools = list(getattr(trainer, "tools", None) or ())  # the prompts describe them
    options = {"tools": tools or None, **(getattr(trainer, "chat_template_kwargs", {}))}
    if template := getattr(trainer, "chat_template", None):
        options["chat_template"] = template
    for prompt in map(chat_of, rows):
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        elif images_of(prompt):
            ids = image_inputs(tokenizer, [prompt], tools)["input_ids"][0]
        else:
            text = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **options
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        lengths.append(len(ids))
    return lengths


def stops_of(trainer: Any) -> set[int]:
    """Return the ids of the tokens at which a generation ends."""
    stops = getattr(trainer, "eos_token_ids", None)
    if stops is None:  # TRL up to 1.0
        stops = [tokenizer_of(trainer).eos_token_id]
    return {*stops} - {None}


def engine_of_unsloth(trainer: Any) -> Any:
    """Return the vLLM that Unsloth has started with the model; None if there is none."""
    return getattr(trainer.model, "vllm_engine", None)


def folds_adapter(trainer: Any) -> bool:
    """Return whether Unsloth adds the adapter to vLLM's weights, instead of passing it as LoRA."""
    return hasattr(engine_of_unsloth(trainer), "_unsloth_merged_rollout_wrapped")


def distorted(args: Any) -> str:
    """Name the arguments that distort the samples, such as "top_p = 0.9"; "" if none do."""
    neutral = NEUTRAL_SAMPLING | {"temperature": args.temperature}
    values = {name: getattr(args, name, None) for name in neutral}
    values |= getattr(args, "generation_kwargs", None) or {}
    if sampling := getattr(args, "vllm_sampling_params", None):  # Unsloth's
        values |= {name: getattr(sampling, name, None) for name in NEUTRAL_SAMPLING}
    names = [name for name in neutral if values[name] not in (neutral[name], None, -1)]
    return " and ".join(f"{name} = {values[name]}" for name in names)


def dropout_of(model: Any) -> float:
    """Return the highest dropout probability of a model's layers; 0 without dropout."""
    layers = [each for each in model.modules() if "Dropout" in type(each).__name__]
    shares = [getattr(each, "p", 0) for each in layers]
    shares += [getattr(each, "attention_dropout", 0) for each in model.modules()]
    return max((share for share in shares if isinstance(share, float)), default=0.0)


def generation_is_used_up(args: Any, step: int) -> bool:
    """Return whether the next step samples anew; if so, a checkpoint needs no completions."""
    every = args.steps_per_generation * args.num_iterations  # micro-batches
    return step * args.gradient_accumulation_steps % every == 0


class Batch(NamedTuple):
    """Hold the two settings of `grpo` that divide a step's completions into micro-batches."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int


def solve_batch(
    prompts_per_step: int, num_generations: int, max_rows_in_memory: int, processes: int = 1
) -> Batch:
    """Return the largest micro-batch that fits and divides the step evenly.

    TRL needs whole groups in a step: per-device batch x accumulation x processes has to be
    prompts x group. A group may be spread over micro-batches, since advantages are computed
    beforehand.

    Args:
        prompts_per_step: Prompts of one optimizer step, on all processes.
        num_generations: Completions per prompt (the group).
        max_rows_in_memory: Completions that a micro-batch may hold, on one process.
        processes: Processes that share the step.

    Raises:
        ValueError: The processes cannot share the step evenly; the message suggests numbers of
            prompts that fit.

    >>> solve_batch(prompts_per_step=4, num_generations=8, max_rows_in_memory=12)
    Batch(per_device_train_batch_size=8, gradient_accumulation_steps=4)
    """
    completions = prompts_per_step * num_generations
    if completions % processes:
        multiple = processes // math.gcd(num_generations, processes)
        raise ValueError(
            f"{prompts_per_step} prompts x {num_generations} completions = {completions} do not "
            f"divide evenly among {processes} processes: use a multiple of {multiple} prompts"
        )
    share = completions // processes
    rows = next(n for n in range(min(max_rows_in_memory, share), 0, -1) if share % n == 0)
    return Batch(rows, share // rows)


def log_probabilities(trainer: Any, batch: Mapping[str, Any]) -> "torch.Tensor":
    """Return the log-probabilities that the loss uses, completion after completion, [tokens].

    Args:
        trainer: The trainer.
        batch: The batch of an update: prompts padded on the left, completions on the right.
    """
    import torch

    ids, mask = (
        torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], dim=1)
        for part in ("ids", "mask")
    )
    width, size = batch["completion_ids"].shape[1], trainer.args.per_device_train_batch_size
    compute = trainer._get_per_token_logps_and_entropies
    images = {name: batch[name] for name in OF_IMAGES if batch.get(name) is not None}
    log_p = compute(trainer.model, ids, mask, width, size, **images)[0].float()
    more = log_p.shape[1] - width  # Unsloth shifts each row left by the padding before it
    padding = (batch["prompt_mask"] == 0).sum(1).tolist()
    lengths = batch["completion_mask"].sum(1).tolist()
    starts = [max(0, more - count) for count in padding]
    rows = zip(log_p, starts, lengths, strict=True)
    return torch.cat([row[start : start + length] for row, start, length in rows])


def _zeros(trainer: Any, inputs: Sequence[Any], *args: Any) -> "torch.Tensor":
    """Return a score of 0 from each reward for the completions of all processes."""
    import torch

    shape = (len(inputs), len(trainer.reward_funcs))
    return trainer.accelerator.gather(torch.zeros(shape, device=trainer.accelerator.device))


@contextmanager
def stand_in(trainer: Any) -> Iterator[Any]:
    """Yield a copy of the trainer with which to run a step that leaves no trace.

    No reward is called. At the end, random states and the loss scale are restored, and gradients
    are cleared.
    """
    import torch

    double, scaler = copy.copy(trainer), getattr(trainer.accelerator, "scaler", None)
    for name in FILLED & set(vars(trainer)):
        setattr(double, name, copy.deepcopy(getattr(trainer, name)))
    for name in {"vllm_generation", "generation_config"} & set(vars(trainer)):
        setattr(double, name, copy.copy(getattr(trainer, name)))
    double.state = copy.copy(trainer.state)
    double.mask_truncated_completions = False
    double._calculate_rewards = partial(_zeros, trainer)  # whatever a person has put there
    # No environment is reset, so there are no first messages; tools are described, not called.
    double.environment_factories = double.environments = None
    double.max_tool_calling_iterations = 0
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


def image_tensors(trainer: Any, prompts: Sequence[Any], room: int) -> dict[str, Any]:
    """Return the arguments with which TRL passes the images of prompts to the model.

    Args:
        trainer: The trainer.
        prompts: One prompt for each row; {} is returned if none of them has an image.
        room: The width of the completions [tokens].
    """
    if not any(not isinstance(prompt, str) and images_of(prompt) for prompt in prompts):
        return {}
    inputs = image_inputs(tokenizer_of(trainer), prompts, room=room)
    device = trainer.accelerator.device
    others = {name: x.to(device) for name, x in inputs.items() if name not in TOKENS}
    return others | {"num_images": [len(images_of(prompt)) for prompt in prompts]}


def of_a_step(metrics: Mapping[str, list[float]], completions: int) -> dict[str, float]:
    """Return a step's metrics that TRL lacks: update time, tokens per second, and memory.

    Args:
        metrics: TRL's metrics since the last log.
        completions: The number of completions of the step.
    """
    totals = {key: sum(values) for key, values in metrics.items() if values}
    seconds = totals.get("step_time", math.nan)
    phases = totals.get("seconds/generation", 0.0) + totals.get("seconds/reward", 0.0)
    return {
        "seconds/update": seconds - phases,
        "tokens_per_second": totals.get("completions/mean_length", 0.0) * completions / seconds,
        "memory_gib": peak_memory() / 2**30,
    }


def peak_memory() -> int:
    """Return the peak memory [bytes] since `new_peak`, of the GPU or else of this process."""
    import torch

    if cuda_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def new_peak() -> None:
    """Reset the peak memory usage; if the system forbids that, the old peak remains."""
    import torch

    if cuda_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # a container may forbid it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_now() -> tuple[int, int]:
    """Return (used, usable) memory [bytes] of the GPU, or else of this process."""
    import torch

    if cuda_available():
        free = torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated(), free + torch.cuda.memory_reserved()
    resident = psutil.Process().memory_info().rss
    return resident, resident + psutil.virtual_memory().available


def distinct(completion_ids: Sequence[Sequence[int]], size: int) -> float:
    """Return the mean share of distinct completions per group: 0 if all are equal, 1 if all differ.

    If groups are spread over several processes, the result is NaN, which is not logged.

    >>> distinct([[1, 2], [1, 2], [1, 3], [4]], size=2)
    0.5
    """
    if len(completion_ids) % size:
        return math.nan
    groups = pd.Series(map(tuple, completion_ids)).groupby(np.arange(len(completion_ids)) // size)
    return float(groups.nunique().mean() - 1) / max(1, size - 1)
