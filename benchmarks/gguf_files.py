"""What do GGUF files of a merged model cost, and what do they lose?

    python benchmarks/gguf_files.py --run json    # the run of docs/rescue.md; 30 minutes on 2 cores

Each file is written, loaded by llama.cpp, and answers held-out prompts greedily: those of the run,
and word problems that the model was not trained on. The KL divergence per token is from llama.cpp's
probabilities to the model's; times are of a CPU; accuracy has Wilson's 95 % interval.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import tempfile
import time
from pathlib import Path

from grpo_nb import data, models, rewards
from grpo_nb.export import gate, gguf
from grpo_nb.models import template
from grpo_nb.reward_lab import bench_of
from grpo_nb.runs import Run
from grpo_nb.runs.config import RunConfig, resolve
from grpo_nb.stats import wilson


class Task:
    """Held-out rows of a run, and what of the answers to them was right."""

    def __init__(self, name: str, run: Run, config: RunConfig, prompts: int) -> None:
        self.name, self.rows, self.right = name, data.load(run, "eval")[:prompts], []
        self.bench = bench_of(config, rewards.load_rewards(config.rewards))
        chats = [row["prompt"] for row in self.rows]
        self.questions = gate.Questions(chats, config.grpo.max_completion_length, self.score)

    def score(self, texts: list[str]) -> float:
        self.right.append(self.bench.score(self.rows, texts)[:, 0] >= 1)
        return float(self.right[-1].mean())

    def accuracy(self, n: int) -> str:
        right, count = int(self.right[n].sum()), len(self.rows)
        low, high = wilson(right, count)
        return f"{right / count:.0%} ({low:.0%} to {high:.0%})"


def word_problems(model: Path, prompts: int) -> Task:
    """Prepare word problems for the model, in a run of their own."""
    settings = {"task": "math", "model.model_name": str(model), "data.eval_rows": prompts}
    config, run = resolve("smollm2-cpu", settings), Run("gguf-word-problems")
    tokenizer, chosen = models.load_tokenizer(str(model)), rewards.load_rewards(config.rewards)
    data.prepare_run(
        run, config.data, 0, lambda chats: template.count_tokens(tokenizer, chats), chosen
    )
    return Task("word problems", run, config, prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="json")
    parser.add_argument("--kinds", default="f16, q8_0, q4_k_m")
    parser.add_argument("--prompts", type=int, default=80)
    options = parser.parse_args()
    run = Run(options.run)
    folder = run / "model/merged"
    tasks = [Task(options.run, run, run.config(), options.prompts)]
    tasks.append(word_problems(folder, options.prompts))
    own = [gate.model_of(folder, task.questions) for task in tasks]
    print("| file | MB | written in | task | KL | equal | accuracy |", flush=True)
    print("|---|---|---|---|---|---|---|")
    for kind in gguf.kinds_of(options.kinds):
        with tempfile.TemporaryDirectory() as parent:
            file, before = Path(parent) / "model.gguf", time.process_time()
            gguf.convert(folder, file, kind)
            seconds = time.process_time() - before
            size = f"{file.stat().st_size / 1e6:.0f} | {seconds:.0f} s"
            for task, model in zip(tasks, own, strict=True):
                figures = gguf.compare(file, kind, model)
                line = f"{task.name} | {figures['kl']:.2g}"
                line += f" | {figures['equal']} of {len(task.rows)}"
                print(f"| {kind} | {size} | {line} | {task.accuracy(-1)} |", flush=True)
    for task in tasks:
        print(f"| the model | {task.name} | {task.accuracy(0)} |")


if __name__ == "__main__":
    main()
