"""Shared fixtures, and the rule that in CI no test may be skipped silently."""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import forked
import hypothesis
import pytest
from filelock import FileLock

from grpo_nb.machine import PROJECT_ROOT, gpu_name
from grpo_nb.runs import Run

sys.path[:0] = [str(PROJECT_ROOT / "data"), str(PROJECT_ROOT / "notebooks")]

SHARED_DATA = PROJECT_ROOT.parent / "shared" / "data"
TINY_SETTINGS = {
    "data.eval_rows": 32,
    "rewards.baseline_prompts": 4,
    "grpo.max_steps": 4,
    "grpo.per_device_train_batch_size": 16,
}
# Importing these patches torch and TRL for good.
collect_ignore = [
    "gpu_on_cpu/scenarios.py",
    "gpu_on_cpu/vllm_scenarios.py",
    "gpu/stock_notebook.py",
]
# Rewards that tests read as files; what runs in other environments: `make test-versions`.
collect_ignore_glob = ["versions/*"]
# The longest first, so that no process waits for another at the end; `make quick` does without:
# whole runs, most trainings, the shipped bases, browsers.
SLOW = [
    *("gpu_on_cpu/test_unsloth_with_vllm.py", "pipeline/test_pipeline.py"),
    *("models/test_real_model.py", "reward_lab/test_reward_files.py", "stages/test_resume.py"),
    *("stages/test_ranks.py", "gpu_on_cpu/test_unsloths_gpu_trainer.py", "models/test_families.py"),
    *("export/test_export.py", "project/test_notebooks.py", "pipeline", "training/test_guard.py"),
    *("browser", "answers/test_math_verify.py", "training/test_preflight.py"),
    *("models/test_models.py", "stages/test_vision_training.py", "sandbox"),
    *("environments/test_check_environment.py", "stages/test_training.py", "models/test_bases.py"),
    *("stages/test_judge_in_training.py", "environments/test_episodes.py", "export/test_gguf.py"),
    *("evaluation/test_evaluate.py", "training/test_fast_cpu.py", "project/test_handbook.py"),
    *("project/test_reading_a_run.py", "data/test_charts.py", "rewards/test_calls.py"),
    "rewards/test_tasks.py",
]
FIRST = [*SLOW[:4], "reward_lab/test_check_rewards.py", *SLOW[4:]]  # as long; `make quick` runs it
LEFT_OUT = ""
if os.environ.get("QUICK"):
    LEFT_OUT = f"{', '.join(SLOW)}: `make test` runs them, too"
    collect_ignore += SLOW
elif "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
    LEFT_OUT = "tests/gpu_on_cpu/test_unsloth_with_vllm.py: vLLM's build for CPUs needs AVX-512"
    collect_ignore.append("gpu_on_cpu/test_unsloth_with_vllm.py")
_skipped: list[str] = []
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# A script that starts the tests in its background leaves Ctrl-C ignored, in all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(f"{report.nodeid}: {report.longrepr[-1]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    if LEFT_OUT:
        terminalreporter.write_line(f"left out: {LEFT_OUT}")
    if os.environ.get("CI") and _skipped:
        terminalreporter.section("skipped, and in CI nothing may be")
        for line in _skipped:
            terminalreporter.line(line)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port() -> int:
    """One at which nothing listens on this machine."""
    return free_port()


@contextmanager
def held(run: str, lock: str = ".lock"):
    """Another process, which holds a run's lock for as long as the block lasts."""
    holder = f"from grpo_nb.runs import Run; import sys; Run({run!r}).lock({lock!r}); "
    holder += "print('held', flush=True); sys.stdin.read()"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holder], **streams) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for runs."""
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path))
    return tmp_path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.path.as_posix().partition("/tests/")[2]
        return next((n for n, slow in enumerate(FIRST) if file.startswith(slow)), len(FIRST))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported till now stays: no need to look for rubbish in it, 0.3 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def start(runs_dir: Path):
    """(rewards, **settings) -> a trainer over a fresh policy, always in the same short run."""
    from trainings import MATH, make_run, trainer_of

    def start(chosen=MATH, **settings):
        run = Run("here")
        if not run.path.exists():
            make_run("here")
        return trainer_of(run, chosen=chosen, **settings)

    return start


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def forks(shared: Path):
    """Kernels, and the commands of `forked.python()`, start in no time.

    Not where there is a GPU, which no fork can use once it is in use.
    """
    with nullcontext() if gpu_name() else forked.running(shared / "forks"):
        yield


@pytest.fixture(scope="session")
def demo_run(shared: Path, forks) -> Run:
    """The four notebooks, executed once with small parameters.

    The first process to come executes them. Do not write to it.
    """
    from grpo_nb.pipeline.notebooks import run_pipeline

    runs = {"GRPO_NB_RUNS": str(shared / "demo_run")}
    with patch.dict(os.environ, runs), FileLock(shared / "demo_run.lock"):
        run = Run("demo")
        if run.manifest().get("04", {}).get("status") != "done":
            run_pipeline("demo", "tiny-cpu", TINY_SETTINGS)
        return run


def moved(folder: Path, size: float, settings: dict[str, str]) -> Run:
    """A run of the tiny base and an adapter of noise: quick, and it answers otherwise."""
    import torch

    from grpo_nb import files, models
    from grpo_nb.runs import config
    from grpo_nb.runs.settings import PolicyConfig

    plain = PolicyConfig(backend="transformers")

    with patch.dict(os.environ, {"GRPO_NB_RUNS": str(folder)}):
        run, settled = Run("moved"), config.resolve("tiny-cpu", settings)
    run.write_config(settled)
    files.write_json(run / "manifest.json", {})
    columns = {"question": "question", "answer": "answer"}
    files.write_json(run / "data/report.json", {"columns": columns})
    # Without Unsloth, which does not import beside vLLM's CPU build on every processor.
    policy = models.load_policy(settled.model_copy(update={"policy": plain}))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=size)
    policy.model.save_pretrained(run / "train/adapter")
    return run


@pytest.fixture(scope="session")
def moved_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One that answers very differently. Do not write to it."""
    return moved(tmp_path_factory.mktemp("runs"), 0.3, {})


@pytest.fixture(scope="session")
def gsm8k_test_file() -> Path:
    path = SHARED_DATA / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip(f"put GSM8K's test.jsonl (MIT, github.com/openai/grade-school-math) at {path}")
    return path


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; for tests/browser, which skip where it is missing."""
    from browsing import CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        yield playwright.chromium.launch(executable_path=shutil.which(CHROMIUM[0]), args=flags)
