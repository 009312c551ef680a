"""How long a GRPO step takes: ours, Unsloth's and TRL's, on the same model, batch and seed.

    python benchmarks/step.py                         # on an idle machine; about three minutes
    python benchmarks/step.py --model .venv/smollm2   # a real model; about ten minutes
    python benchmarks/step.py --phases                # what ours spends its time on

Each way trains in a process of its own, for Unsloth patches TRL for good, and they take turns of
TURN steps, or REAL_TURN with a real model. The learning rate is near 0, so that completions stay as
long as at the start. TRL computes in bf16 by default; where the processor only emulates it, all
ways compute in fp32, but for the LoRA of a 4-bit policy, which TRL rounds to bf16 whatever it is
told.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, TextIO

TURN, REAL_TURN = 5, 2
SIZES = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 48,
    "learning_rate": 1e-7,
    "warmup_steps": 5,
    "seed": 0,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
REAL = {"per_device_train_batch_size": 16, "max_completion_length": 47}  # what else differs then
WAYS = {
    "Unsloth + TRL, defaults": "unsloth",
    "Unsloth + TRL, nothing recomputed": "unsloth kept",
    "TRL, 16-bit LoRA, defaults": "transformers",
    "TRL, 16-bit LoRA, nothing recomputed": "transformers kept",
    "ours, neither": "ours policy.rollouts=model policy.share_prompts=False",
    "ours, transformers generates": "ours policy.rollouts=model",
    "ours, without shared prompts": "ours policy.share_prompts=False",
    "ours": "ours",
}


def build(way: str, options: list[str], folder: str, steps: int, settings: Any = (), **changed):
    """A trainer, ours or TRL's own with its defaults.

    Args:
        settings: Of ours, beside `options`.
        changed: Arguments of TRL's own, instead of those in SIZES.

    Returns:
        The trainer, the policy in it, held-out rows and the rewards.
    """
    from grpo_nb import data, models, rewards, stages
    from grpo_nb.pipeline.notebooks import assigned
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import resolve

    sizes = SIZES | {"bf16": models.has_bf16()} | changed
    names = ("learning_rate", "warmup_steps", *REAL)
    fixed = {f"grpo.{name}": sizes[name] for name in names}
    fixed |= {"grpo.max_steps": steps, "seed": sizes["seed"], "train.eval_steps": 0}
    if way == "transformers":
        fixed |= {"policy.backend": "transformers", "model.load_in_4bit": False}
    overrides = assigned(options) if way == "ours" else {}
    config, run = resolve("tiny-cpu", fixed, dict(settings), overrides), Run("benchmark")
    data.prepare_run(run, config.data, config.seed, lambda chats: [30] * len(chats))
    rows, chosen = data.load(run, "train"), rewards.load_preset("math")
    held_out = data.load(run, "eval")
    policy = models.load_policy(config)
    if way == "ours":
        stage = Stage(run, "03", config)
        return stages.build_trainer(policy, chosen, rows, stage), policy, held_out, chosen
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sizes |= {"gradient_checkpointing": False} if "kept" in options else {}
    sizes |= {"reward_weights": chosen.reward_weights}
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=list(chosen.reward_funcs),
        args=GRPOConfig(output_dir=folder, max_steps=steps, **sizes),
        train_dataset=Dataset.from_list(rows),
    )
    return trainer, policy, held_out, chosen


def of_model(model: str) -> tuple[int, dict[str, Any]]:
    """Return the steps of a turn, and how the arguments of `build` differ for a real model."""
    return (REAL_TURN, {"settings": {"model.model_name": model}, **REAL}) if model else (TURN, {})


def work(way: str, turns: int, answers: TextIO, model: str) -> None:
    """Train the steps of a turn for each line that comes in; answer with the seconds of one."""
    name, *options = way.split()
    turn, changed = of_model(model)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        trainer, *_ = build(name, options, folder, (turns + 1) * turn, **changed)
        from transformers import TrainerCallback

        class Turns(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step % turn == 0:
                    sys.stdin.readline()
                    self.started = time.perf_counter(), time.process_time()

            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step % turn == 0:
                    now = time.perf_counter(), time.process_time()
                    spent = [(b - a) / turn for a, b in zip(self.started, now, strict=True)]
                    lengths = [x["completions/mean_length"] for x in state.log_history[-turn:]]
                    print(json.dumps([*spent, statistics.mean(lengths)]), file=answers, flush=True)

        trainer.add_callback(Turns())
        trainer.train()


def measure(turns: int, model: str) -> dict[str, list[list[float]]]:
    """Return seconds by the clock, of the processor, and mean tokens, [turns] for each way."""
    command = [sys.executable, __file__, "--turns", str(turns), "--model", model, "--way"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {
        name: subprocess.Popen([*command, way], stderr=subprocess.DEVNULL, **pipes)
        for name, way in WAYS.items()
        if not model or not way.startswith("ours ")  # of a real model eight would not fit
    }
    found: dict[str, list[list[float]]] = {name: [] for name in workers}
    for turn in range(turns + 1):
        for name, worker in workers.items():
            worker.stdin.write("\n")
            worker.stdin.flush()
            line = json.loads(worker.stdout.readline())
            if turn:  # the first warms up
                found[name].append(line)
    for worker in workers.values():
        worker.wait()
    return found


def phases(turns: int, model: str) -> None:
    """Print what our step spends its processor time on, and what the processor could do."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        turn, changed = of_model(model)
        trainer, *_ = build("ours", [], folder, turn * (turns + 1), **changed)
        spent: dict[str, list[float]] = {}
        sampled: list[Any] = []  # of the last step: prompts and completions, and what else TRL adds

        def timed(name, function):
            def run(*args, **kwargs):
                started = time.process_time()
                result = function(*args, **kwargs)
                spent.setdefault(name, []).append(time.process_time() - started)
                if name == "generation":
                    sampled[:] = result
                return result

            return run

        trainer.create_optimizer()
        for name, owner, method in (
            ("generation", trainer, "_generate"),
            ("rewards", trainer, "_calculate_rewards"),
            ("log-probabilities", trainer, "compute_loss"),
            ("backward", trainer.accelerator, "backward"),
            ("optimizer", trainer.optimizer, "step"),
            ("all but the optimizer", trainer, "training_step"),
        ):
            setattr(owner, method, timed(name, getattr(owner, method)))
        trainer.train()
    for name, seconds in spent.items():
        print(f"{name}: {statistics.median(seconds[turn:]) * 1e3:.0f} ms")
    print_floors(trainer.accelerator.unwrap_model(trainer.model), sampled[0], sampled[1])
    for shape in ((64, 128, 384), (2048, 128, 384), (16, 576, 1536), (900, 576, 1536)):
        a, b = torch.randn(shape[:2]), torch.randn(shape[1:])
        print(
            f"{shape}: {_rate(a, b):.0f} GFLOP/s in fp32, {_rate(a.bfloat16(), b.bfloat16()):.0f}"
        )


def print_floors(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> None:
    """Print the least operations of a step's passes, without attention, and the time they take."""
    import torch

    head = model.get_output_embeddings().weight
    weights = {
        module.weight: "lora_" in name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight is not head
    }
    lora = sum(weight.numel() for weight, added in weights.items() if added)
    layers = sum(weight.numel() for weight, added in weights.items() if not added)
    made = sum(map(len, completions))
    tokens = made + sum(map(len, set(map(tuple, prompts))))
    forward = 2 * (layers + lora) * tokens + 2 * head.numel() * made
    backward = (2 * layers + 4 * lora) * tokens + 2 * head.numel() * made
    wide = max((w for w, added in weights.items() if not added), key=torch.numel).t().detach()
    read = (layers + lora + head.numel()) * head.element_size() * max(map(len, completions))
    for name, count, rows in (
        ("generation", forward, len(completions)),
        ("log-probabilities", forward, tokens),
        ("backward", backward, tokens),
    ):
        rate = _rate(torch.randn(rows, len(wide)).to(wide.dtype), wide)
        print(
            f"floor of {name}: {count / 1e9:.1f} GFLOP at {rate:.0f}, {count / rate / 1e6:.0f} ms"
        )
    print(f"generation reads {read / 1e9:.1f} GB of weights")


def _rate(a, b) -> float:
    count = max(3, int(1e9 // (a.shape[0] * b.numel())))
    a @ b
    started = time.process_time()
    for _ in range(count):
        a @ b
    return 2e-9 * count * a.shape[0] * b.numel() / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--phases", action="store_true", help="only ours, and its parts")
    parser.add_argument("--model", default="", help="folder of a real model; else the tiny one")
    parser.add_argument("--way", default="", help="internal: what this process trains")
    arguments = parser.parse_args()
    if arguments.phases:
        return phases(arguments.turns, arguments.model)
    if arguments.way:
        answers, sys.stdout = sys.stdout, sys.stderr  # TRL prints its logs
        return work(arguments.way, arguments.turns, answers, arguments.model)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found = measure(arguments.turns, arguments.model)
    ours = [statistics.median(column) for column in zip(*found["ours"], strict=True)]
    print("| a step | clock [s] | processor [s] | tokens | against ours |")
    print("|---|---|---|---|---|")
    for name, lines in found.items():
        clock, cpu, tokens = zip(*lines, strict=True)
        ratio = statistics.median(cpu) / ours[1]
        print(
            f"| {name} | {spread(clock)} | {spread(cpu)} | {statistics.mean(tokens):.1f} "
            f"| {ratio:.2f} × |"
        )


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
