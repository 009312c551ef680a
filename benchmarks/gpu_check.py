"""Try everything that needs an NVIDIA GPU, in 45 minutes, and write one page of what came of it.

    make gpu-check                              # QUICK=1: the demo and two steps, in 10 minutes

Weights are downloaded first, which takes as long as it takes. Then each part is a process of its
own with a limit of time; after one that fails the next begins. The page is written after each part,
as runs/gpu-check/report.md, with all that each part said beside it. The exit code is 0 if all
passed, 1 if a part did not, 2 without a GPU that can be used.
"""

import argparse
import csv
import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from gpu import SHAPES, save_base

from grpo_nb import machine
from grpo_nb.machine import PROJECT_ROOT, git_commit, installed_versions
from grpo_nb.runs import Run, runs_root
from grpo_nb.runs.config import resolve
from grpo_nb.training import read_lines

STEPS = 2


class Part(NamedTuple):
    """A command, the most seconds it may take, and how many of its last lines go on the page."""

    name: str
    limit: float
    command: Sequence[str]
    lines: int = 3


class Result(NamedTuple):
    part: Part
    verdict: str
    seconds: float
    said: str


PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-vv", "-rs", "--disable-warnings", "--tb=line")
DEMO = (PYTHON, "-m", "grpo_nb", "run", "--name=demo", "--profile=tiny-cpu")
BENCHMARK = (PYTHON, "benchmarks/gpu.py", "--size=0.5B", "--repeats=3")
PROFILES = ("t4-16gb", "l4-24gb")
# An engine takes a minute or more to start on a slow GPU; the tests on the GPU start seven.
PARTS = [
    Part("make demo", 240, DEMO, 5),
    Part("tests on the GPU", 1080, [*PYTEST, "-m", "gpu", "tests/gpu"], 20),
    Part("tests of vLLM", 300, [*PYTEST, "-m", "vllm", "tests/models/test_vllm.py"], 8),
    *(Part(f"profile {one}", 300, [PYTHON, __file__, f"--profile={one}"], 12) for one in PROFILES),
    Part("benchmark", 480, BENCHMARK, 9),
]
TWO_STEPS = [*PYTEST, "-m", "gpu", "tests/gpu", "-k", "two_steps and vLLM"]
QUICK = [PARTS[0], Part("two steps with vLLM", 360, TWO_STEPS, 8)]
MARK = "GRPO_NB_GPU_CHECK"  # in the environment of each process that a part started


def run_part(part: Part, folder: Path) -> Result:
    """Run a part to its end or its limit; what it says goes to a file in `folder`."""
    print(f"{part.name}, {part.limit:.0f} s at most …", flush=True)
    log, started = folder / f"{part.name.replace(' ', '-')}.log", time.monotonic()
    mark = uuid.uuid4().hex
    with log.open("wb") as out:
        process = subprocess.Popen(
            part.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=PROJECT_ROOT,
            env=os.environ | {"GRPO_NB_RUNS": str(folder), MARK: mark},
        )
        try:
            code = process.wait(part.limit)
            verdict = "passed" if code == 0 else f"FAILED, exit code {code}"
        except subprocess.TimeoutExpired:
            verdict = f"FAILED, not done after {part.limit:g} s"
        finally:
            end(mark)
            process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return Result(part, verdict, time.monotonic() - started, "\n".join(lines[-part.lines :]))


def end(mark: str) -> None:
    """Kill what is left of a part: itself, and what it started.

    A kernel has a session of its own, and vLLM's engine outlives its parent: neither the process
    group nor the tree of processes holds them all.
    """
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except psutil.Error:
            continue  # it has ended, or is another user's


def fetch(profile: str) -> None:
    """Download the weights of a profile's model, as far as the hub gives them."""
    from huggingface_hub import snapshot_download

    model = resolve(profile).model.model_name
    print(f"downloading {model} …", flush=True)
    try:
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt"])
    except Exception as error:  # the hub has many ways to say no
        reason = (str(error).splitlines() or [""])[0]
        print(f"{model} cannot be had, so random weights take its place: {reason}")


def page(results: Sequence[Result], machine: str) -> str:
    """The report, in Markdown."""
    passed = sum(result.verdict == "passed" for result in results)
    versions = installed_versions(), {"python": platform.python_version()}
    lines = [
        f"# {machine}: {passed} of {len(results)} parts passed\n",
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, commit {git_commit()}; "
        + ", ".join(f"{name} {version}" for one in versions for name, version in one.items()),
        "\n| part | result | time [s] |\n|---|---|---|",
        *(f"| {one.part.name} | {one.verdict} | {one.seconds:.0f} |" for one in results),
    ]
    for one in results:
        lines.append(f"\n## {one.part.name}: {one.verdict}\n\n```text\n{one.said}\n```")
    return "\n".join(lines) + "\n"


def check(parts: Sequence[Part], folder: Path, machine: str) -> int:
    """Run the parts, print and keep the page after each; 1 if one did not pass."""
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for part in parts:
        results.append(run_part(part, folder))
        print(f"{part.name}: {results[-1].verdict}", flush=True)
        (folder / "report.md").write_text(page(results, machine), encoding="utf-8")
    print(f"\n{page(results, machine)}\nkept as {folder / 'report.md'}")
    return int(any(result.verdict != "passed" for result in results))


def try_profile(profile: str) -> int:
    """Notebooks 1 to 3 with a profile's model and sizes, for STEPS steps; 0 if they were made.

    The preflight has to pass, too. Where the hub does not give the model, random weights of its
    sizes take its place. Whether it learns does not matter here, so `--force`, and no look at how
    the notebooks' own checks came out.
    """
    from huggingface_hub import snapshot_download

    config = resolve(profile)
    name, model = f"profile-{profile}", config.model.model_name
    with tempfile.TemporaryDirectory() as folder:
        settings = {"data.source": str(Path(folder, "sums.csv")), "data.subset": ""}
        settings |= {"data.eval_rows": 8, "rewards.baseline_prompts": 4, "grpo.max_steps": STEPS}
        write_sums(Path(folder, "sums.csv"), config.data.max_prompt_tokens)
        try:
            snapshot_download(model, allow_patterns=["*.json"], local_files_only=True)
            weights = model
        except Exception as error:  # the hub has many ways to say no
            said = (str(error).splitlines() or [""])[0]
            weights = f"random weights, for {model} cannot be had from the hub: {said}"
            size = next(size for size in SHAPES if size in model)
            save_base(SHAPES[size], Path(folder, size), config.model.max_seq_length)
            settings["model.model_name"] = str(Path(folder, size))
        arguments = [f"--set={key}={value}" for key, value in settings.items()]
        command = [PYTHON, "-m", "grpo_nb", "run", "--name", name, "--profile", profile]
        subprocess.run([*command, "--to=03", "--force", *arguments], check=False)
    print(f"{profile}: {weights}")
    checks = Run(name).manifest().get("03", {}).get("checks", [])
    for check in checks:
        print(f"{check['state']:<8}{check['name']:<15}{check['evidence']} {check['fix']}")
    made = [line for line in read_lines(Run(name) / "train/metrics.jsonl") if "reward" in line]
    for line in made:
        print(f"step {line['step']}: {line['step_time']:.1f} s, {line['memory_gib']:.1f} GiB")
    return int(len(made) < STEPS or any(check["state"] == "stop" for check in checks))


def write_sums(path: Path, tokens: int) -> None:
    """64 questions, of which one is nearly as long as a prompt may be."""
    questions = [(f"What is {a} + {a + 7}?", 2 * a + 7) for a in range(63)]
    questions.append(("Add these numbers: " + "1 " * (tokens // 3) + "?", tokens // 3))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "answer"), *questions])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="", help="internal: try this profile")
    parser.add_argument("--quick", action="store_true", help="the demo and two steps, 10 minutes")
    options = parser.parse_args()
    if options.profile:
        return try_profile(options.profile)
    gpu = machine.gpu_name()
    if fault := machine.gpu_fault() or ("" if gpu else "no NVIDIA GPU is visible"):
        print(f"{fault}: run `make gpu-check` on a machine with one that CUDA 13 supports")
        return 2
    folder = runs_root() / "gpu-check"
    shutil.rmtree(folder, ignore_errors=True)  # of the check before
    for profile in () if options.quick else PROFILES:
        fetch(profile)
    return check(QUICK if options.quick else PARTS, folder, gpu)


if __name__ == "__main__":
    sys.exit(main())
