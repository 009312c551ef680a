"""Before a training starts: its worst step once, and what would stop it hours later.

The worst step is the longest prompt with completions of full length, through the trainer's own
loss, backward pass and generation. What it needed is held against the machine. A training after
it gives the same numbers as one without (vLLM's own random state apart).
"""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.models import Policy, sharded
from grpo_nb.models.chat import count_tokens
from grpo_nb.runs import Stage
from grpo_nb.runs.batch import solve_batch
from grpo_nb.training.health import section
from grpo_nb.training.probe import Probe, worst_step

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

GIB = 2**30


class Check(NamedTuple):
    """One line: what was looked at, how it came out, what was seen, what to change."""

    check: str
    result: Literal["ok", "warning", "stop"]
    seen: str
    do: str = ""


def preflight(
    trainer: "GRPOTrainer", policy: Policy, rows: Sequence[dict], stage: Stage
) -> pd.DataFrame:
    """Every check, in the order a person would mend them.

    Args:
        trainer: As built, not yet training.
        policy: Its model and tokenizer.
        rows: The prompts to train on.
        stage: Its settings and its run.

    Returns:
        check, result ("ok", "warning", "stop"), seen, do. With `step_seconds`, an upper bound
        for `seconds per step`, and `peak_gib` in `attrs` where the worst step went through.
    """
    tokens = count_tokens(policy.tokenizer, [row["prompt"] for row in rows])
    longest = max(range(len(rows)), key=tokens.__getitem__)
    checks = [_context(trainer, tokens[longest], stage), *_stops(policy)]
    checks += _sampling(trainer.args, trainer.use_vllm)
    measured = {}
    if sharded():
        do = "watch memory_gib in the first steps"
        checks.append(Check("memory", "warning", "sharded weights: no worst step was tried", do))
    elif all(check.result != "stop" for check in checks):  # else the step would mean nothing
        probe = worst_step(trainer, policy, rows[longest]["prompt"])
        checks.append(_memory(trainer, probe))
        if not probe.failed:
            checks += [_gradient(probe), _time(trainer, probe)]
            measured = {"step_seconds": _step_seconds(trainer, probe)}
            measured["peak_gib"] = (probe.peak + _optimizer_bytes(trainer)) / GIB
    table = pd.DataFrame([*checks, _disk(trainer, stage)])
    table.loc[table["result"] != "ok", "do"] += "; see " + table["check"].map(section)
    table.attrs.update(measured)
    return table


def refuse(checks: pd.DataFrame, force: bool = False) -> None:
    """Raise RuntimeError that names each failed check and the setting to change, unless forced."""
    failed = checks[checks["result"] == "stop"]
    if force or failed.empty:
        return
    lines = [f"- {line.check}: {line.seen}; {line.do}" for line in failed.itertuples()]
    raise RuntimeError(
        "the training would fail:\n" + "\n".join(lines) + "\n(force = True starts it all the same)"
    )


def _context(trainer: "GRPOTrainer", prompt: int, stage: Stage) -> Check:
    need = prompt + trainer.args.max_completion_length
    model, limit = trainer.model.config.max_position_embeddings, stage.config.model.max_seq_length
    seen = f"longest prompt {prompt} + completion {trainer.args.max_completion_length} = {need}"
    seen += f" tokens; max_seq_length {limit}, the model's {model}"
    if need > model:
        do = "lower train.max_completion_length or data.max_prompt_tokens: the model reads no more"
        return Check("context", "stop", seen, do)
    if need > limit:
        return Check("context", "stop", seen, f"set model.max_seq_length = {need}")
    return Check("context", "ok", seen)


def _stops(policy: Policy) -> list[Check]:
    """Whether a completion can end, and its end is told from padding."""
    tokenizer = policy.tokenizer
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
        do = "give the tokenizer a pad_token of its own, lest the end be taken for padding"
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


def _disk(trainer: "GRPOTrainer", stage: Stage) -> Check:
    kept = stage.config.train.keep_checkpoints + 1  # a new one is written before an old one goes
    checkpoint = 4 * _trained(trainer) + _optimizer_bytes(trainer)
    merged = 2 * trainer.model.num_parameters()
    need, free = kept * checkpoint + merged, shutil.disk_usage(stage.run.path).free
    seen = f"{kept} checkpoints and the merged model {need / GIB:.2f} GiB, {free / GIB:.1f} free"
    do = "free some space, lower train.keep_checkpoints, or point GRPO_NB_RUNS at a larger disk"
    return Check("disk", "stop", seen, do) if need > free else Check("disk", "ok", seen)


def _trained(trainer: "GRPOTrainer") -> int:
    return sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)


def _optimizer_bytes(trainer: "GRPOTrainer") -> int:
    """Adam's two states a weight: of a byte, or of four."""
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return _trained(trainer) * (2 if "8bit" in optim else 8)


def _memory(trainer: "GRPOTrainer", probe: Probe) -> Check:
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


def smaller(trainer: "GRPOTrainer", rows: int) -> str:
    """The settings by which a pass has at most so many rows, and the step stays as it is."""
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
        do = "load the policy anew: what is to be trained is frozen (requires_grad) or cut off"
        return Check("gradient", "stop", seen, do)
    return Check("gradient", "ok", seen)


def _step_seconds(trainer: "GRPOTrainer", probe: Probe) -> float:
    passes, args = trainer.args.gradient_accumulation_steps, trainer.args
    generations = passes / (args.steps_per_generation * args.num_iterations)
    return passes * probe.update + generations * probe.generation


def _time(trainer: "GRPOTrainer", probe: Probe) -> Check:
    step, steps = _step_seconds(trainer, probe), trainer.args.max_steps
    seen = f"at most {step:.1f} s a step (generation {probe.generation:.1f}, a pass "
    whole = f"{step * steps / 60:.0f} min" if step * steps > 120 else f"{step * steps:.0f} s"
    seen += f"{probe.update:.1f}), without rewards; {steps} steps in {whole}"
    return Check("time", "ok", seen)
