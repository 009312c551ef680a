"""The benchmarks for a GPU, as far as a machine without one can run them."""

import os
import re
import subprocess
import sys

import forked
import psutil
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


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT_ROOT / "benchmarks")
    import gpu_check

    return gpu_check


def test_a_part_that_fails_or_hangs_is_on_the_page_and_the_next_begins(gpu_check, tmp_path, capsys):
    hangs = (
        "import os, signal, subprocess, sys; print('begun', flush=True);"
        # As a kernel and vLLM's engine: in a session of its own, and longer alive than its parent.
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], "
        "start_new_session=True);"
        "open(os.environ['GRPO_NB_RUNS'] + '/child', 'w').write(str(child.pid)); {end}"
    )
    fails = "print('a'); print('b'); print('c'); raise SystemExit('no such thing')"
    parts = [
        gpu_check.Part("it fails", 60, [sys.executable, "-c", fails], 2),
        gpu_check.Part("it hangs", 3, [sys.executable, "-c", hangs.format(end="signal.pause()")]),
        gpu_check.Part("it works", 60, [sys.executable, "-c", "print('all right')"]),
    ]
    assert gpu_check.check(parts, tmp_path / "gpu-check", "NVIDIA L4, 23034 MiB") == 1
    page = (tmp_path / "gpu-check/report.md").read_text()
    assert page.strip() in capsys.readouterr().out
    assert page.startswith("# NVIDIA L4, 23034 MiB: 1 of 3 parts passed\n")
    assert "trl 1.15.0" in page
    assert "| it fails | FAILED, exit code 1 | " in page
    assert "| it hangs | FAILED, not done after 3 s | 3 |" in page
    assert "| it works | passed | " in page
    assert "```text\nc\nno such thing\n```" in page and "```text\nbegun\n```" in page
    assert is_over(tmp_path / "gpu-check/child")
    assert gpu_check.check(parts[2:], tmp_path, "x") == 0
    died = gpu_check.Part("it dies", 60, [sys.executable, "-c", hangs.format(end="os._exit(1)")])
    assert gpu_check.check([died], tmp_path, "x") == 1
    assert is_over(tmp_path / "child"), "left with half of the GPU's memory"


def is_over(file):
    child = int(file.read_text())
    return not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_all_parts_together_take_45_minutes_at_most_and_the_quick_ones_10(gpu_check):
    assert sum(part.limit for part in gpu_check.PARTS) <= 45 * 60
    assert sum(part.limit for part in gpu_check.QUICK) <= 10 * 60


@pytest.mark.parametrize("script", ["gpu.py", "gpu_check.py"])
def test_without_a_gpu_one_sentence_says_so(script):
    if models.cuda_available():
        pytest.skip("asks what happens on a machine without a GPU")
    done = run(script)
    said = (done.stdout + done.stderr).splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search("no (CUDA|NVIDIA) GPU is visible: run .* on a machine with", said), said
