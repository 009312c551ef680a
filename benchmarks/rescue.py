"""A base that never solves the task: does distillation teach it more than SFT in the same time?

    python benchmarks/rescue.py                    # five seeds, every arm; about an hour
    python benchmarks/rescue.py --table            # what is measured so far
    python benchmarks/rescue.py --digits 4 --sft-steps 120 --teacher-steps 400 --name 4

The task is to write a number backwards. The tiny base solves none of it in eight samples; its
teacher, all weights of the same base trained longer, nearly all. A row, and the teacher's answer:

    {"prompt": [system, "Write 482 backwards."], "answer": "284"}
    <reasoning>4 8 2, 2 8 4</reasoning><answer>284</answer>

Each arm trains a new adapter: "sft-references" on reference answers, "sft-teacher" on the teacher's
answers that are right; "distil" goes on from there with TRL's DistillationTrainer (reverse KL, the
student's own samples), and "sft-teacher-long" is SFT alone for the processor seconds of both. Each
is measured on held-out prompts, trained with GRPO ("grpo": without anything before), and measured
again. Every measure is a line in runs/rescue/NAME.jsonl, and what is there is not done again.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import functools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb import models, training
from grpo_nb.reward_lab.statistics import bootstrap
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import PROJECT_ROOT, Run, Stage, runs_root
from grpo_nb.runs.config import resolve
from grpo_nb.training.checkpoints import save_trained

HELD_OUT, SAMPLES, CAP = 100, 8, 48
Row = dict[str, Any]


def write_row(number: int) -> Row:
    text = str(number)
    prompt = build_prompt(f"Write {text} backwards.")
    return {"prompt": prompt, "answer": text[::-1], "number": text}


def write_completion(row: Row) -> str:
    """Return what the teacher is trained to write."""
    reasoning = f"{' '.join(row['number'])}, {' '.join(row['answer'])}"
    return f"<reasoning>{reasoning}</reasoning><answer>{row['answer']}</answer>"


def split_rows(digits: int) -> tuple[list[Row], list[Row]]:
    """Return the rows to hold out, and all others."""
    numbers = list(range(10 ** (digits - 1), 10**digits))
    random.Random(0).shuffle(numbers)
    rows = list(map(write_row, numbers))
    return rows[:HELD_OUT], rows[HELD_OUT:]


class Divergence:
    """Compute what TRL's `ChunkedDivergenceFunction` does, in plain torch: its own needs Triton."""

    @staticmethod
    def apply(
        student: Any,
        student_weight: Any,
        student_bias: Any,
        teacher: Any,
        teacher_weight: Any,
        teacher_bias: Any,
        beta: float,
        temperature: float = 1.0,
        student_scale: float = 1.0,
        student_softcap: float | None = None,
        teacher_scale: float = 1.0,
        teacher_softcap: float | None = None,
    ) -> tuple[Any, Any]:
        """Return the divergence and the student's entropy of each token, [tokens]."""
        import torch

        def log_p(hidden: Any, weight: Any, bias: Any, scale: float, softcap: float | None) -> Any:
            weight, bias = weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
            logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            return (logits / temperature).log_softmax(-1)

        def kl(log_p: Any, log_q: Any) -> Any:
            return (log_p.exp() * (log_p - log_q)).sum(-1)

        log_s = log_p(student, student_weight, student_bias, student_scale, student_softcap)
        with torch.no_grad():
            log_t = log_p(teacher, teacher_weight, teacher_bias, teacher_scale, teacher_softcap)
        entropy = -(log_s.exp() * log_s).sum(-1).detach()
        if beta == 0:
            return kl(log_t, log_s), entropy
        if beta == 1:
            return kl(log_s, log_t), entropy
        middle = torch.logaddexp(log_s + np.log1p(-beta), log_t + np.log(beta))
        return beta * kl(log_t, middle) + (1 - beta) * kl(log_s, middle), entropy


def install_divergence() -> None:
    """Let TRL import a module with `Divergence` in place of its Triton kernel."""
    import types

    module = types.ModuleType("trl.kernels.chunked_divergence")
    module.ChunkedDivergenceFunction = Divergence
    sys.modules[module.__name__] = module


def open_policy(seed: int, arguments: argparse.Namespace) -> tuple[models.Policy, Stage]:
    settings = {
        "seed": seed,
        "policy.backend": "transformers",
        "model.quantization": "16bit",
        "train.max_steps": max(1, arguments.grpo_steps),
        "train.learning_rate": arguments.grpo_rate,
        "train.max_completion_length": CAP,
        "train.eval_steps": 0,
        "train.guard_steps": 0,
        "train.resume": "never",
    }
    config = resolve("tiny-cpu", settings)
    stage = Stage(Run(f"rescue-{arguments.name}-{seed}"), "03", config)
    return models.load_policy(config.model, config.seed, config.policy), stage


def rows_of(seed: int, arguments: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Return the held-out rows, which are the same for every seed, and the rows to train on."""
    held_out, rest = split_rows(arguments.digits)
    return held_out, random.Random(seed).sample(rest, arguments.rows)


def make_teacher(folder: Path, rows: list[Row], steps: int) -> None:
    """Train all weights of the tiny base on right answers, and save it."""
    sys.path.append(str(PROJECT_ROOT / "data"))
    import tiny_model
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    rng, base = random.Random(0), PROJECT_ROOT / "data/tiny_base"
    tokenizer = models.load_tokenizer(str(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def sample_chat() -> tiny_model.Chat:
        row = rng.choice(rows)
        return tiny_model.render_chat(row["prompt"], write_completion(row))

    tiny_model.train(model, tokenizer, sample_chat, steps, bfloat16=models.has_bf16())
    tiny_model.save(model, tokenizer, folder)


def load_teacher(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if models.has_bf16() else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


def scores(policy: Any, rows: list[Row], **sampling: Any) -> np.ndarray:
    """Return whether each completion is right, [prompts, completions]."""
    prompts, group = [row["prompt"] for row in rows], sampling.get("num_generations", 1)
    options = {"max_completion_length": CAP, "batch_size": 256} | sampling
    groups = policy.generate(prompts, **options)
    texts = [sample.text for samples in groups for sample in samples]
    answers = [row["answer"] for row in rows for _ in range(group)]
    marks = load_preset("math").reward_funcs[0](completions=texts, answer=answers)
    return np.array(marks, dtype=float).reshape(-1, group)


def measure(policy: Any, rows: list[Row]) -> dict[str, Any]:
    """Return greedy and sampled pass@1, and pass@8, with intervals over prompts."""
    greedy = scores(policy, rows)[:, 0]
    samples = scores(policy, rows, num_generations=SAMPLES, temperature=1.0, seed=1)
    values = np.stack([greedy, samples.mean(1), samples.max(1)], 1)
    low, high = bootstrap(values, np.array([[0.0] * 3, [1.0] * 3]))
    names = ("greedy", "pass@1", f"pass@{SAMPLES}")
    columns = zip(names, values.mean(0), low, high, strict=True)
    return {name: [round(float(x), 4) for x in numbers] for name, *numbers in columns}


def common(stage: Stage, seed: int, steps: int, rate: float, batch: int) -> dict[str, Any]:
    """Return the arguments that SFT and distillation share."""
    return {
        "output_dir": str(stage.run / "log"),
        "max_steps": steps,
        "learning_rate": rate,
        "per_device_train_batch_size": batch,
        "seed": seed,
        "gradient_checkpointing": False,
        "bf16": models.has_bf16(),
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def timed(trainer: Any, limit: float = np.inf) -> dict[str, Any]:
    """Train for so many processor seconds at most; return steps and seconds, of all and of one."""
    from transformers.trainer_callback import PrinterCallback, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.process_time())
            control.should_training_stop |= ends[-1] - started >= limit

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    started = time.process_time()
    trainer.train()
    return {
        "steps": len(ends),
        "seconds": round(time.process_time() - started, 2),
        "step": round(float(np.median(np.diff(ends))), 4),
    }


def sft(
    policy: models.Policy,
    stage: Stage,
    seed: int,
    rate: float,
    rows: list[Row],
    steps: int,
    limit: float = np.inf,
) -> dict[str, Any]:
    """Train on completions, as the SFT warm-up of stage 02 does, in so many processor seconds."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from grpo_nb.models.template import render

    def encode(row: Row) -> Row:
        texts = [render(policy.tokenizer, row["prompt"]), row["text"] + policy.tokenizer.eos_token]
        prompt, completion = policy.tokenizer(texts, add_special_tokens=False)["input_ids"]
        mask = [0] * len(prompt) + [1] * len(completion)
        return {"input_ids": prompt + completion, "completion_mask": mask}

    options = {"completion_only_loss": True, "max_length": 512}
    trainer = SFTTrainer(
        policy.model,
        SFTConfig(**common(stage, seed, steps, rate, 16), **options),
        train_dataset=Dataset.from_list(list(map(encode, rows))),
        processing_class=policy.tokenizer,
    )
    return timed(trainer, limit)


def distil(
    policy: models.Policy, stage: Stage, seed: int, rows: list[Row], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Distil on-policy; the student samples by the dense engine, as GRPO's trainer does."""
    import torch
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    from grpo_nb.models import dense

    install_divergence()

    class Distillation(DistillationTrainer):
        copy: dense.DenseModel | None = None

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if arguments.slow_sampling:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.copy = self.copy or dense.DenseModel(self.accelerator.unwrap_model(self.model))
            with torch.no_grad():
                return dense.sample(
                    self.copy.renew(),
                    prompt_ids,
                    max_completion_length=self.max_completion_length,
                    stops=self.eos_token_ids,
                    pad=self._tokenizer.pad_token_id,
                    temperature=self.temperature,
                )

    shared = common(
        stage, seed, arguments.distil_steps, arguments.distil_rate, arguments.distil_batch
    )
    args = DistillationConfig(**shared, max_completion_length=CAP, beta=arguments.beta)
    trainer = Distillation(
        policy.model,
        load_teacher(arguments.teacher),
        args,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=policy.tokenizer,
    )
    return timed(trainer)


def grpo(policy: models.Policy, stage: Stage, rows: list[Row]) -> dict[str, Any]:
    chosen = load_preset("math")
    args = training.grpo_config(stage, policy, chosen)
    started = time.process_time()
    training.Trainer(policy, chosen, args, rows, stage).train()
    return {"steps": args.max_steps, "seconds": round(time.process_time() - started, 2)}


def teach(folder: Path, rows: list[Row]) -> tuple[list[Row], float]:
    """Return the rows that the teacher solves, with its texts, and its processor seconds."""
    from grpo_nb.models.engine_choice import engine_of

    engine = engine_of(load_teacher(folder), models.load_tokenizer(str(folder)))
    started = time.process_time()
    options = {"max_completion_length": CAP, "batch_size": 256, "temperature": 1.0}
    groups = engine.generate([row["prompt"] for row in rows], **options)
    texts = [group[0].text for group in groups]
    answers = [row["answer"] for row in rows]
    marks = load_preset("math").reward_funcs[0](completions=texts, answer=answers)
    triples = zip(rows, texts, marks, strict=True)
    verified_rows = [{**row, "text": text} for row, text, mark in triples if mark == 1]
    return verified_rows, round(time.process_time() - started, 2)


def train_arm(arm: str, seed: int, arguments: argparse.Namespace, results: "Results") -> Row:
    """Train and measure one arm, and save its adapter for `train_further`."""
    held_out, rows = rows_of(seed, arguments)
    policy, stage = open_policy(seed, arguments)
    learn = functools.partial(sft, policy, stage, seed, arguments.sft_rate)
    phases: Row = {}
    if arm == "sft-references":
        write = load_preset("math").reference
        texts = [{**row, "text": write(row)} for row in rows]
        phases["sft"] = learn(texts, arguments.sft_steps)
    elif arm != "grpo":
        texts, phases["teacher"] = teach(arguments.teacher, rows)
        phases["rows"] = len(texts)
        if arm == "sft-teacher-long":
            rival = results.line(seed, "distil", "arm")["phases"]
            limit = rival["sft"]["seconds"] + rival["distil"]["seconds"]
            phases["sft"] = learn(texts, round(limit / rival["sft"]["step"]), limit)
        else:
            phases["sft"] = learn(texts, arguments.sft_steps)
        if arm == "distil":
            if results.line(seed, "sft-teacher", "arm") is None:  # the same training
                save_trained(policy.model, results.adapter(seed, "sft-teacher"))
                figures = {"phases": dict(phases), **measure(policy, held_out)}
                results.add(seed, "sft-teacher", "arm", figures)
            phases["distil"] = distil(policy, stage, seed, rows, arguments)
    figures = measure(policy, held_out)
    save_trained(policy.model, results.adapter(seed, arm))
    policy.close()
    return {"phases": phases, **figures}


def train_further(arm: str, seed: int, arguments: argparse.Namespace, results: "Results") -> Row:
    """Train the adapter of an arm with GRPO, and measure it."""
    held_out, rows = rows_of(seed, arguments)
    policy, stage = open_policy(seed, arguments)
    models.load_weights(policy, results.adapter(seed, arm))
    phases = {"grpo": grpo(policy, stage, rows)}
    figures = measure(policy, held_out)
    policy.close()
    return {"phases": phases, **figures}


class Results:
    """Append lines to the file of results, and find them there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def lines(self) -> list[Row]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def line(self, seed: int, arm: str, end: str) -> Row | None:
        keys = (seed, arm, end)
        return next((x for x in self.lines() if (x["seed"], x["arm"], x["end"]) == keys), None)

    def adapter(self, seed: int, arm: str) -> Path:
        return self.file.with_suffix("") / f"{seed}-{arm}"

    def add(self, seed: int, arm: str, end: str, figures: Row) -> None:
        line = {"seed": seed, "arm": arm, "end": end, **figures}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def print_table(lines: list[Row]) -> None:
    """Print the percentages of each seed and their means; greedy with its 95 % interval."""
    names = ("greedy", "pass@1", f"pass@{SAMPLES}")
    print(
        "| arm | end | seed | processor [s] | greedy (95 %) | pass@1 | pass@8 |",
        "|---" * 7 + "|",
        sep="\n",
    )
    for arm in ARMS:
        for end in ENDS:
            chosen = [line for line in lines if (line["arm"], line["end"]) == (arm, end)]
            table = []
            for line in sorted(chosen, key=lambda line: line["seed"]):
                parts = [part for part in line["phases"].values() if isinstance(part, dict)]
                table.append([sum(p["seconds"] for p in parts), *(100 * line[n][0] for n in names)])
                seconds, greedy, *others = (f"{x:.0f}" for x in table[-1])
                low, high = (100 * limit for limit in line["greedy"][1:])
                interval = f"{greedy} ({low:.0f} … {high:.0f})"
                cells = [arm, end, str(line["seed"]), seconds, interval, *others]
                print(f"| {' | '.join(cells)} |")
            if table:
                cells = [arm, end, "mean", *(f"{mean:.0f}" for mean in np.mean(table, axis=0))]
                print(f"| {' | '.join(cells)} |")


ENDS = {"arm": train_arm, "then grpo": train_further}
ARMS = ("distil", "sft-teacher-long", "sft-teacher", "sft-references", "grpo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--name", default="rescue", help="of the file of results")
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=256, help="prompts to train on")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--sft-rate", type=float, default=2e-3)
    parser.add_argument("--distil-steps", type=int, default=40)
    parser.add_argument("--distil-rate", type=float, default=1e-3)
    parser.add_argument("--distil-batch", type=int, default=32)
    parser.add_argument("--beta", type=float, default=1.0, help="1: reverse KL, 0: forward KL")
    parser.add_argument("--slow-sampling", action="store_true", help="by transformers, as TRL does")
    parser.add_argument("--grpo-steps", type=int, default=25)
    parser.add_argument("--grpo-rate", type=float, default=3e-4)
    parser.add_argument("--table", action="store_true", help="only print what is measured so far")
    arguments = parser.parse_args()
    results = Results(runs_root() / "rescue" / f"{arguments.name}.jsonl")
    if arguments.table:
        return print_table(results.lines())
    arguments.teacher = runs_root() / f"rescue-teacher{arguments.digits}"
    if not arguments.teacher.is_dir():
        make_teacher(arguments.teacher, split_rows(arguments.digits)[1], arguments.teacher_steps)
    for end in ENDS if arguments.grpo_steps else list(ENDS)[:1]:
        for seed in arguments.seeds:
            for arm in arguments.arms:
                if results.line(seed, arm, end) is None:
                    results.add(seed, arm, end, ENDS[end](arm, seed, arguments, results))
    print_table(results.lines())


if __name__ == "__main__":
    main()
