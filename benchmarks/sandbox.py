"""How fast is the sandbox, against a plain isolated subprocess that protects from nothing?

    python benchmarks/sandbox.py             # about 1 minute on 2 cores
    python benchmarks/sandbox.py --programs 400 --rounds 5

Prints programs a second of `subprocess.run([python, "-I", "-c", program])`, of the same with
-S (which leaves out site-packages, as the sandbox does), of bubblewrap and of monty, with the
same workers, taken in turns so that other load falls on all; and the ratio to the plain
subprocess in the median round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpo_nb.sandbox import run_tests

PROGRAM = """
import math

def f(n):
    return [k for k in range(2, n) if all(k % d for d in range(2, math.isqrt(k) + 1))]
"""
TESTS = {"function": "f", "cases": [[[12], [2, 3, 5, 7, 11]], [[3], [2]], [[2], []]]}
PLAIN = PROGRAM + "".join(f"assert f(*{args}) == {want}\n" for args, want in TESTS["cases"])


def plain(*options: str) -> Callable[[int, int], None]:
    command = [sys.executable, "-I", *options, "-c", PLAIN]

    def run(programs: int, workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            runs = [pool.submit(subprocess.run, command, check=True) for _ in range(programs)]
            for done in runs:
                done.result()

    return run


def sandboxed(backend: str) -> Callable[[int, int], None]:
    def run(programs: int, workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(run_tests, PROGRAM, TESTS, backend=backend) for _ in range(programs)
            ]
            verdicts = [job.result() for job in jobs]
        wrong = [verdict for verdict in verdicts if verdict.share < 1]
        if wrong:
            raise RuntimeError(f"{backend}: {len(wrong)} programs failed, first {wrong[0]}")

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    ways = {"plain subprocess": plain(), "plain subprocess -S": plain("-S")}
    ways |= {backend: sandboxed(backend) for backend in ("bubblewrap", "monty")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, run in ways.items():
            started = time.monotonic()
            run(options.programs, options.workers)
            seconds[name].append(time.monotonic() - started)
    print(f"{options.rounds} rounds of {options.programs} programs, {options.workers} workers")
    print("| | programs/s | ratio to plain | lowest | highest |")
    print("|---|---|---|---|---|")
    for name, taken in seconds.items():
        rate = options.programs / statistics.median(taken)
        pairs = zip(seconds["plain subprocess"], taken, strict=True)
        ratios = sorted(before / after for before, after in pairs)
        middle = statistics.median(ratios)
        print(f"| {name} | {rate:.0f} | {middle:.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")


if __name__ == "__main__":
    main()
