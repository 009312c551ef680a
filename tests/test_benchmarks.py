"""benchmarks/gpu.py, as far as a machine without a GPU can run it."""

import subprocess
import sys

import pytest

from grpo_nb import models
from grpo_nb.runs import PROJECT_ROOT


def run(*arguments):
    command = [sys.executable, PROJECT_ROOT / "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_tiny_model_is_measured_in_every_way_that_this_machine_can():
    done = run("--size", "tiny", "--repeats", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    heading, *_ = done.stdout.splitlines()
    assert "transformers 5" in heading
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    ways, clocks, speeds = zip(*[line[:3] for line in lines[1:]], strict=True)
    assert len(ways) == (4 if models.cuda_available() else 2)
    assert all(float(clock.split()[0]) > 0 for clock in clocks)
    assert all(int(speed) > 0 for speed in speeds)


def test_without_a_gpu_the_real_sizes_are_refused():
    if models.cuda_available():
        pytest.skip("asks what happens on a machine without a GPU")
    done = run()
    assert done.returncode == 2
    assert "no CUDA GPU is visible: run it on a machine with one, or add --size" in done.stderr
