"""Does a judge teach? A summary task that an honest judge alone pays for, against its placebo.

    python benchmarks/judge.py --seeds 3

The judge is a script behind HTTP: it grades each summary by the words that it shares with the
reference. The task's own rewards are measured, and weigh 0. Stages run in this process, as in
placebo.py. What is done already, in runs/judged-*, is not done again.
"""

import argparse
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pandas as pd
from placebo import run_both

from grpo_nb.pipeline import caused
from grpo_nb.runs import Run, runs_root

REWARDS = """import os

from grpo_nb.rewards import PRESETS, LLMJudge

form, preset = "summarization", PRESETS["summarization"]
judge = LLMJudge("scripted", os.environ["JUDGE_URL"], name="judge", cache=False)
reward_funcs = [*preset.reward_funcs, judge]
reward_weights = [*preset.reward_weights, 1.0]
"""
BLOCK = re.compile(r"<<<COMPLETION>>>\n(.*?)\n<<<END COMPLETION>>>", re.DOTALL)
REFERENCE = re.compile(r"<<<REFERENCE ANSWER>>>\n(.*?)\n<<<END", re.DOTALL)


def grade(summary: str, reference: str) -> int:
    """Grade from 0 to 10: the F1 of the words, as a judge that reads well would rank them."""
    words, right = (Counter(re.findall(r"\w+", text.lower())) for text in (summary, reference))
    shared = (words & right).total()
    return round(20 * shared / max(1, words.total() + right.total()))


class Handler(BaseHTTPRequestHandler):
    """Answers a request of `LLMJudge` as a chat model would."""

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][1]["content"]
        reference = REFERENCE.search(content)[1]
        verdict = {"reason": "words", "grade": grade(BLOCK.search(content)[1], reference)}
        message = {"role": "assistant", "content": json.dumps(verdict)}
        data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.server.requests += 1


@contextmanager
def serving() -> Iterator[ThreadingHTTPServer]:
    """Serve the judge until the block ends; the rewards read its address from JUDGE_URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = 0
        os.environ["JUDGE_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def greedy_score(run: Run, model: str) -> float:
    """Return the mean score of the first reward, word overlap, on held-out prompts [percent]."""
    lines = pd.read_parquet(run / "eval/samples.parquet").query("model == @model")
    return 100 * lines[lines["decoding"] == "greedy"]["overlap_reward"].mean()


def settings_of(seed: int, steps: int) -> dict[str, Any]:
    """Nothing but the judge is paid for."""
    settings = {"task": "summarization", "seed": seed, "grpo.max_steps": steps}
    settings |= {"evaluate.samples": 1, "rewards.preset": str(runs_root() / "judged.py")}
    return settings | {"rewards.reward_weights": "0, 0, 0, 1"}


def measure(seed: int, steps: int) -> dict[str, Any]:
    """Train a run and its placebo, and return their line of the table."""
    name, settings = f"judged-{seed}", settings_of(seed, steps)
    started = time.process_time()
    with serving() as server:
        run, placebo = run_both(name, settings, "shuffled")
    seconds = time.process_time() - started
    comparison = caused.compare(run, placebo)
    scores = [greedy_score(run, "base"), greedy_score(run, "adapter")]
    line = {"seed": seed, "scores": [*scores, greedy_score(placebo, "adapter")]}
    line |= {"verdict": comparison.verdict, "requests": server.requests, "seconds": seconds}
    print(json.dumps(line | {"said": comparison.sentence}), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    runs_root().mkdir(parents=True, exist_ok=True)
    (runs_root() / "judged.py").write_text(REWARDS, encoding="utf-8")
    lines = [measure(seed, options.steps) for seed in range(options.seeds)]
    print("| seed | base | run | placebo | verdict | requests | processor time [s] |")
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        scores = " | ".join(f"{score:.1f} %" for score in line["scores"])
        print(f"| {line['seed']} | {scores} | {line['verdict']}", end=" | ")
        print(f"{line['requests']:,} | {line['seconds']:.0f} |")


if __name__ == "__main__":
    main()
