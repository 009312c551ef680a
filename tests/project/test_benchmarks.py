"""The benchmarks for a GPU, as far as a machine without one can run them."""

import os
import subprocess

import forked
import pytest

from grpo_nb import models
from grpo_nb.machine import PROJECT_ROOT

pytestmark = pytest.mark.usefixtures("forks")


def run(script, *arguments):
    command = [*forked.python(), str(PROJECT_ROOT / "benchmarks" / script), *arguments]
    environment = os.environ | {forked.CHILDREN: "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_tiny_model_is_measured_in_every_way_that_this_machine_can():
    done = run("gpu.py", "--size", "tiny", "--repeats", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    heading, *_ = done.stdout.splitlines()
    assert "transformers 5" in heading
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    ways, clocks, speeds = zip(*[line[:3] for line in lines[1:]], strict=True)
    assert len(ways) == (5 if models.cuda_available() else 3)
    assert all(float(clock.split()[0]) > 0 for clock in clocks)
    assert all(int(speed) > 0 for speed in speeds)
