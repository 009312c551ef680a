"""What waiting threads cost where two processes share the processors.

    python benchmarks/threads.py     # on an idle machine; two minutes

libgomp, which torch links, lets a thread spin while it waits for work, unless the environment says
otherwise before torch is imported. Each process repeats the passes of a training step of the tiny
model, 48 tokens for 64 completions and an update, for as long as the others do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "data/tiny_base"
WAYS = {
    "two threads, as torch comes": {},
    "two threads, GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "two threads, GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "two threads, OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SWITCHES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def work(seconds: float) -> None:
    """Print how long each step took, until the time is over."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    token, batch = torch.full((64, 1), 5), torch.full((64, 80), 5)
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while (started := time.monotonic()) < end:
        with torch.no_grad():
            for _ in range(48):
                model(token)
        model(batch).logits.mean().backward()
        print(time.monotonic() - started, flush=True)


def measure(environment: dict[str, str], processes: int, seconds: float) -> list[float]:
    """Return the seconds of every step of these processes, which begin at the same time."""
    clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    command = [sys.executable, __file__, "--work", "--seconds", str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen(command, env=clean | environment, stderr=subprocess.DEVNULL, **pipes)
        for _ in range(processes)
    ]
    for worker in workers:
        worker.stdout.readline()
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    return [float(line) for worker in workers for line in worker.communicate()[0].split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--work", action="store_true", help="internal: be one of the processes")
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.seconds)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| threads of a process | alone [s] | beside another [s] |")
    print("|---|---|---|")
    for name, environment in WAYS.items():
        columns = [measure(environment, count, arguments.seconds) for count in (1, 2)]
        shown = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in columns]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
