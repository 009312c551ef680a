"""math-verify in its worker: bombs, kills, threads, forks."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from grpo_nb.answers import compare_answers, math_worker
from grpo_nb.answers.math_worker import _WORKER, MathWorker, equal_latex


@pytest.fixture(scope="module", autouse=True)
def secret():
    """A secret is in the environment when the worker starts."""
    _WORKER.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        yield


@pytest.fixture(autouse=True)
def fresh_worker():
    """No verdict of another test is remembered, and no time-out held against this one."""
    _WORKER.verdicts.clear()
    _WORKER.timeouts = 0.0


def towers(count):
    """Each a number of millions of digits, in a form that the guards let pass."""
    return [rf"((({base}^{{999}})^{{999}})^{{999}})^{{99}}" for base in range(2, 2 + count)]


GUARDED = [
    *("9^9^9", "2^{99999999}", "((3!)!)!", "9^{9!}", r"\sum_{k=1}^{10^9} k", r"\int_0^1 x^x dx"),
    *("9" * 400, "(" * 200 + "1" + ")" * 200, r"\frac{" * 200_000, "$" * 1_000_000),
]


@pytest.mark.parametrize("bomb", GUARDED, ids=lambda bomb: bomb[:20])
def test_bombs_that_the_guards_know_never_reach_the_worker(bomb):
    equal_latex("18", "17")
    before = time.process_time(), time.perf_counter()
    assert compare_answers("18", bomb)[0] is False
    assert time.process_time() - before[0] < 0.1
    assert time.perf_counter() - before[1] < 1
    assert _WORKER.timeouts == 0


def test_sixty_four_bombs_get_less_than_ten_seconds(monkeypatch):
    """Of processor time, of which the kernel takes care; the machine may be busy."""
    others = ["(x+y+z+w)^{999}", r"\frac{7^{9999}}{3^{9998}}^{9999}", "x^{9999}-y^{9999}"]
    others += ["+".join(["x"] * 240), "(x+1)" * 90, "-" * 400 + "1"]
    others += [r"\frac{1}{" * 18 + "1" + "}" * 18, r"\sin(" * 18 + "1" + ")" * 18]
    bombs = (towers(28) + others + GUARDED * 3)[:64]
    given, real = [], MathWorker.ask
    monkeypatch.setattr(MathWorker, "ask", lambda *asked: given.append(asked[3]) or real(*asked))
    assert [compare_answers("x^2+y+z+w+7", bomb)[0] for bomb in bombs] == [False] * 64
    assert len(given) > 20 and sum(given) < 8


def test_a_time_out_is_not_remembered_and_a_verdict_is():
    equal_latex("18", towers(1)[0], timeout_seconds=0.05)
    equal_latex("18", "19")
    assert [answer for _, answer in _WORKER.verdicts] == ["19"]


def test_the_worker_has_a_limit_of_memory_and_no_secrets():
    equal_latex("18", "17")
    of_worker = Path(f"/proc/{_WORKER.process.pid}")
    limits, environment = of_worker / "limits", of_worker / "environ"
    assert re.search(rf"Max address space +{math_worker.MEMORY} ", limits.read_text())
    assert b"secret" not in environment.read_bytes()
    assert b"PYTHONHASHSEED" in environment.read_bytes()


def ended(pid):
    """Whether the process ends within 20 s."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(process):
        return bool(select.select([process], [], [], 20)[0])


def working_child(pid):
    """The child of the worker, after 0.05 s of processor time; None before."""
    with suppress(OSError, ValueError):  # it has none, or it ended meanwhile
        child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11]
        return child if int(ticks) >= 5 else None


def test_a_worker_killed_in_the_middle_of_an_answer_and_while_it_waits():
    for tower, victim in zip(towers(2), ("its child", "worker"), strict=True):
        assert equal_latex("18", "17") is False
        pid = _WORKER.process.pid
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(equal_latex, "18", tower, 0.7)
            while not (child := working_child(pid)):
                assert not running.done()
            os.kill(pid if victim == "worker" else child, signal.SIGKILL)
            assert running.result() is False  # out of time, at the latest when asked again
        assert ended(child)
    os.kill(_WORKER.process.pid, signal.SIGKILL)
    assert ended(_WORKER.process.pid)
    assert equal_latex("18", "36/2") is True


def test_a_worker_that_does_not_start_says_what_to_look_at(monkeypatch):
    worker = MathWorker()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"did not start.*/bin/false -c 'import math_verify'"):
        worker.ask("18", "18", 1.0)
    assert worker.process is None


def test_eight_threads_get_their_own_answers():
    def ask(thread, more):
        return [equal_latex(f"{thread}x+{n}", f"{n + more}+x\\cdot {thread}") for n in range(4)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(2, 10), [0, 1] * 4)) == [[True] * 4, [False] * 4] * 4


def test_a_forked_process_has_workers_of_its_own():
    assert equal_latex("18", "17") is False
    ours = _WORKER.process.pid
    child = os.fork()
    if not child:
        verdict = equal_latex("18", "36/2")
        is_own = _WORKER.process.pid != ours
        _WORKER.forget()
        os._exit(0 if verdict is True and is_own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert equal_latex("18", "72/4") is True
    assert ours == _WORKER.process.pid


PARENT = """import os, signal
from grpo_nb.answers.math_worker import _WORKER, equal_latex
equal_latex("18", "17")
print(_WORKER.process.pid, flush=True)
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def test_no_process_is_left_behind_by_one_that_is_killed_before_its_own_fork_ends():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        worker = int(parent.stdout.readline())
        try:
            assert ended(parent.pid) and ended(worker)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
