"""A GRPO step on a GPU: ours against Unsloth's defaults and TRL's, by seconds, tokens and memory.

    python benchmarks/gpu.py                # 1.5 B parameters, 4 x 8 completions of 512 tokens
    python benchmarks/gpu.py --size 0.5B
    python benchmarks/gpu.py --size tiny    # on a CPU: what a CPU can run

The model has the sizes of Qwen2.5 and random weights, so nothing is fetched, no completion ends
before its cap, and each way computes the same number of tokens. One way after the other, each in
a process of its own; the first two steps warm up.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from step import build, spread

WARM_UP = 2
# The slowest last: a limit of time then costs least. Where vLLM is, Unsloth's trainer takes it.
WAYS = {
    "ours, Unsloth 4 bit, vLLM with standby": "ours model.unsloth_vllm_standby=True "
    "model.fast_inference=vllm",
    "Unsloth + TRL, 4 bit, defaults": "unsloth",
    "TRL + peft, 16 bit, vLLM beside it": "transformers vllm",
    "ours, transformers 4 bit": "ours policy.backend=transformers",
    "TRL + peft, 16 bit, transformers generates": "transformers",
}
# Of Qwen2.5, as published; and one for a CPU, to see that all of it works.
SHAPES = {
    "1.5B": {
        **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936},
    },
    "0.5B": {
        **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
    },
    "tiny": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 999},
    },
}
CONTEXT, VLLM_SHARE = 1024, 0.4
PROMPT = "7" * 200  # a token a digit
BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
COMPLETION = {"1.5B": 512, "0.5B": 512, "tiny": 8}


def save_base(shape: dict[str, int], folder: Path, context: int = CONTEXT) -> None:
    """Random weights in bf16, and the tiny base's tokenizer with a word for each further id."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_nb.models import cuda_available
    from grpo_nb.models.hub import load_tokenizer

    tokenizer = load_tokenizer("data/tiny_base")
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    words = json.loads(path.read_text(encoding="utf-8"))
    more = {f"w{number}": number for number in range(len(tokenizer), shape["vocab_size"])}
    words["model"]["vocab"] |= more
    path.write_text(json.dumps(words), encoding="utf-8")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        **shape,
        **ids,
        bos_token_id=None,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if cuda_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def arguments_of(base: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of ours, and TRL's arguments that mean the same."""
    from grpo_nb.models import cuda_available

    batch = BATCH | {"max_completion_length": COMPLETION[Path(base).name]}
    settings = {f"grpo.{name}": value for name, value in batch.items()}
    settings |= {"model.model_name": base, "model.max_seq_length": CONTEXT}
    settings |= {"lora.r": 32, "lora.lora_alpha": 64}
    settings |= {"data.system_prompt": PROMPT, "data.max_prompt_tokens": CONTEXT // 2}
    settings |= {"model.gpu_memory_utilization": VLLM_SHARE}
    return settings, batch | {"use_cpu": not cuda_available(), "bf16": True}


def used_bytes() -> int:
    """The GPU's memory in use, or else this process' own."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info()
    return total - free


def work(way: str, base: str, repeats: int) -> dict[str, Any]:
    """Train; seconds of each step and of its generation, tokens of one, peak memory."""
    import torch
    from transformers import TrainerCallback

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    before = peak = used_bytes() if torch.cuda.is_available() else 0
    steps: list[float] = []
    generations: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, used_bytes())

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            steps.append(time.perf_counter() - self.started)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        settings, sizes = arguments_of(base)
        name, *options = way.split()
        if "vllm" in options:
            sizes |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": CONTEXT}
            sizes |= {"vllm_gpu_memory_utilization": VLLM_SHARE}
        trainer, *_ = build(name, options, folder, WARM_UP + repeats, settings, **sizes)
        generate = trainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            found = generate(*args, **kwargs)
            synchronize()
            generations.append(time.perf_counter() - started)
            return found

        trainer._generate = timed
        trainer.add_callback(Clock())
        threading.Thread(target=watch, daemon=True).start()
        trainer.train()
        ended.set()
    args, logs = trainer.args, [x for x in trainer.state.log_history if "reward" in x][WARM_UP:]
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    tokens = rows * statistics.mean(line["completions/mean_length"] for line in logs)
    measured = {"steps": steps[WARM_UP:], "generations": generations[WARM_UP:], "tokens": tokens}
    return measured | {"gib": (peak - before) / 2**30}


def measure(way: str, base: str, repeats: int) -> dict[str, Any]:
    """`work` in a process of its own; {"failed": the last line of its error}."""
    command = [sys.executable, __file__, "--way", way, "--base", base, "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, one: dict[str, Any], first: dict[str, Any]) -> str:
    """A line of the table; the ratio is of the seconds of a step to the first way's."""
    if "failed" in one:
        return f"| {name} | {one['failed']} | | | |"
    step, ratio = statistics.median(one["steps"]), "–"
    if "failed" not in first:
        ratio = f"{step / statistics.median(first['steps']):.2f} ×"
    speed = one["tokens"] / statistics.median(one["generations"])
    return f"| {name} | {spread(one['steps'])} | {speed:.0f} | {one['gib']:.2f} | {ratio} |"


def heading() -> str:
    """Machine, versions, date."""
    from grpo_nb.machine import gpu_name, installed_versions
    from grpo_nb.models import cuda_available

    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    machine = gpu_name() if cuda_available() else f"CPU, {os.cpu_count()} cores"
    return f"{machine}; {versions}; {datetime.date.today()}\n"


def main() -> int:
    from grpo_nb.models import cuda_available

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SHAPES), default="1.5B", help="tiny: for a CPU")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are measured")
    parser.add_argument("--way", default="", help="internal: what this process trains")
    parser.add_argument("--base", default="", help="internal: folder of its model")
    given = parser.parse_args()
    if given.way:
        answers, sys.stdout = sys.stdout, sys.stderr  # TRL prints its logs
        print(json.dumps(work(given.way, given.base, given.repeats)), file=answers)
        return 0
    if given.size != "tiny" and not cuda_available():
        parser.error("no CUDA GPU is visible: run it on a machine with one, or add --size tiny")
    ways = {k: v for k, v in WAYS.items() if cuda_available() or "vllm" not in v}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, given.size)
        save_base(SHAPES[given.size], base)
        print(heading())
        print("| a step | clock [s] | generation [tokens/s] | peak [GiB] | against the first |")
        print("|---|---|---|---|---|", flush=True)
        found: list[dict[str, Any]] = []
        for name, way in ways.items():
            found.append(measure(way, str(base), given.repeats))
            print(row(name, found[-1], found[0]), flush=True)
    return int(any("failed" in one for one in found))


if __name__ == "__main__":
    sys.exit(main())
