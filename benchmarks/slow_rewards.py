"""What slow rewards add to a step: TRL's way, one after another, and ours, together.

    python benchmarks/slow_rewards.py        # the task "code", and a judge that takes its time

64 completions of the task's tiny base are scored by its preset, alone and with an LLM judge:
a server on this machine that answers each request after LATENCY seconds. Both ways take turns.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import json
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TURNS, LATENCY = 7, 0.1


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(LATENCY)
        verdict = json.dumps({"reason": "so", "A": 5})
        body = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200 if asked else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Nothing on the screen."""


def compare(trainer, funcs, judge) -> dict[str, list[float]]:
    """Clock seconds of a batch's rewards, both ways in turn."""
    from trl import GRPOTrainer

    batch = next(iter(trainer.get_train_dataloader()))
    prompts = [row["prompt"] for row in batch]
    _, ids, _, completions, *_ = trainer._generate(prompts)
    ours, seconds = trainer.reward_funcs, {"in turn": [], "together": []}
    for _ in range(TURNS):
        for way in seconds:
            judge.replies.clear()
            trainer.reward_funcs = funcs if way == "in turn" else ours
            kind = GRPOTrainer if way == "in turn" else type(trainer)
            started = time.perf_counter()
            kind._calculate_rewards(trainer, batch, prompts, completions, ids)
            seconds[way].append(time.perf_counter() - started)
    names = [name for name in trainer._metrics["train"] if name.endswith("/seconds")]
    each = {n.split("/")[1]: statistics.median(trainer._metrics["train"][n]) for n in names}
    print(" ".join(f"{name} {value:.3f}" for name, value in each.items()))
    return seconds


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        from grpo_nb import data, models, rewards, stages
        from grpo_nb.runs import Run, Stage
        from grpo_nb.runs.config import resolve

        config, run = resolve("tiny-cpu", {"task": "code", "train.eval_steps": 0}), Run("benchmark")
        preset = rewards.load_preset("code")
        data.prepare_run(run, config.data, 0, lambda chats: [30] * len(chats), preset)
        judge = rewards.LLMJudge("m", base_url=f"http://127.0.0.1:{server.server_address[1]}/v1")
        for chosen in (preset, preset.adding(judge, 1.0)):
            policy, rows = models.load_policy(config), data.load(run, "train")
            stage = Stage(run, "03", config)
            trainer = stages.build_trainer(policy, chosen, rows, stage)
            trainer.model.train()
            seconds = compare(trainer, chosen.reward_funcs, judge)
            for way, values in seconds.items():
                spread = f"{min(values):.2f} to {max(values):.2f}"
                print(
                    f"{len(chosen.names)} rewards {way}: {statistics.median(values):.2f} ({spread})"
                )
    server.shutdown()
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
