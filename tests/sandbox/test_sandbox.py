"""Every attack as an ordinary user and, where these tests run as root, as root too."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_nb import sandbox
from grpo_nb.sandbox import Limits, choose_backend, parse_tests, reason_of, run_tests

QUICK = Limits(seconds=1.0, memory_mib=128, output_bytes=4096, processes=16)
SQUARE = "def f(x): return x * x"
CALLS = {"function": "f", "cases": [[[2], 4], [[3], 9]]}
ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
MARKER = f"sandbox-test-{os.getpid()}"
FORKS = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
WRITE_JUNK = """
import os
for fd in range(3, 4096):
    try: os.write(fd, b'["value", 4]\\n' * 3)
    except OSError: pass
"""
SEARCH = """
import gc, sys
def f(x):
    sought, frame, seen = int("546372819"[::-1]), sys._getframe(1), ""
    while frame:
        seen += repr((frame.f_globals, frame.f_locals, frame.f_code.co_consts))
        frame = frame.f_back
    held = [t for t in gc.get_objects() if isinstance(t, (list, tuple)) and sought in t]
    return str(sought) in seen or bool(held)
"""
DAEMON = f"""
import os, sys
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 4096)
            os.execv(sys.executable, [sys.executable, "-c", "while True: pass", "{MARKER}"])
        os._exit(0)
    os.wait()
    return x * x
"""

HARNESS = "import sys\nh = sys._getframe(2).f_globals\n"  # what runs the program inside

# name: (program, what the reason says); none may pass a test of CALLS
ATTACKS = {
    "infinite loop": ("while True: pass", "timed out after 1 s"),
    "sleeps": ("import time\ntime.sleep(60)", "timed out"),
    "ignores signals": (
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, 1)\n"
        " except (OSError, ValueError): pass\nwhile True: pass", "timed out"),
    "fork bomb": (FORKS, ""),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**8))", "out of memory"),
    "output flood": ("while True: print('x' * 999)", "timed out"),
    "error flood": ("import sys\nwhile True: sys.stderr.write('x' * 999)", "raised OSError"),
    "result flood": ("def f(x): return 'x' * 10**7", "returned more than 4096 bytes"),
    "result channel flood": (
        "import os\nwhile True:\n for fd in range(3, 4096):\n  try: os.write(fd, b'x' * 9999)\n"
        "  except OSError: pass", "returned more than 4096 bytes"),
    "equal to all": ("class E:\n def __eq__(s, o): return True\ndef f(x): return E()",
                     "wrong value: got <E object>, expected 4"),
    "subclass of int": ("class E(int):\n def __eq__(s, o): return True\ndef f(x): return E(5)",
                        "wrong value: got <E object>"),
    "patched builtins": ("import builtins\nbuiltins.all = builtins.any = builtins.isinstance = "
                         "lambda *a: True\nbuiltins.type = lambda *a: int\ndef f(x): return 5", ""),
    "patched harness": (
        HARNESS + "h['send'] = h['encode'] = lambda *a: 'null'\ndef f(x): return 5", ""),
    "exit 0": ("import os\nos._exit(0)", "exited with status 0 before it gave a result"),
    "sys.exit": ("import sys\nsys.exit(0)", "raised SystemExit: 0"),
    "prints PASS": ("print('PASS\\n2 passed\\nOK')\ndef f(x): return None", "got None"),
    "junk as result": (WRITE_JUNK + "def f(x): return 5", "wrong value: got 5"),
    "closes the channel": ("import os\nos.closerange(0, 4096)\ndef f(x): return 4", ""),
    "forged results": (
        HARNESS + "for v in ('true', '{\"other\": 4}', '[[', '{\"set\": [[]]}', '[' * 9999):\n"
        " h['send']('value', v)\ndef f(x): return 4", ""),
    "forged empty reason": (
        HARNESS + "for kind in ('failed', 'value', ''): h['send'](kind, '\"\"')", "failed"),
    "forged reason without end": (
        HARNESS + "h['send']('failed', '[' * 900 + ']' * 900)", "a result that cannot be read"),
    "forged number too large": (
        HARNESS + "for _ in range(2): h['send']('value', '9' * 5000)", "a result that cannot be"),
    "forged terminal codes": ("raise ValueError('\\x1b[2J \\ud800')", "?[2J ?"),
    "looks for the answer": (SEARCH, "got False"),
    "recursion without limit": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [*map(f, [x])]", ""),
    "contains itself": ("def f(x):\n r = []\n r.append(r)\n return r", "RecursionError"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "crashed with signal 11"),
    "syntax error": ("def f(", "raised SyntaxError"),
    "lone surrogate": ("def f(x): return '\\ud800'", "wrong value"),
    "huge expression": ("x = " + "-" * 100_000 + "1", ""),
    "cannot be described": ("class E(Exception):\n def __str__(s): 1 / 0\ndef f(x): raise E",
                            "cannot be shown"),
    "a generator": ("def f(x): yield 4", "wrong value: got <generator object>"),
}  # fmt: skip
ATTACKED = {name: CALLS for name in ATTACKS}
ATTACKED["looks for the answer"] = ["assert f(1)", "assert f(2) == 918273645"]

# name: (program, what f(argument) must return): what a well-meaning program sees inside
PROBE = """
def f(x):
    try: %s
    except (OSError, MemoryError) as error: return type(error).__name__
    return "done"
"""
PROBES = {
    **{
        f"read {path}": (PROBE % f"return open({path!r}).read()", None)
        for path in ("/etc/passwd", __file__, "/proc/1/environ", "/proc/self/environ", "/dev/mem")
    },
    **{
        f"write {path}": (PROBE % f"open({path!r}, 'w')", None)
        for path in ("/x", "/usr/lib/x", f"{sys.base_prefix}/x", "/dev/x", "/mnt/x", "/dev/shm/x")
    },
    "see the environment": ("import os\ndef f(x): return 'hunter2' in repr(os.environ)", False),
    "gain privileges": (PROBE % "import os; os.setuid(0)", None),
    "write a large file": (PROBE % "open('/tmp/x', 'wb').write(bytes(10**8))", None),
    "fill /tmp": (
        "def f(x):\n try:\n  for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(10**6))\n"
        " except OSError as e: return e.errno", errno.ENOSPC),
    "use a scratch file": (
        "def f(x):\n open('x', 'w').write('4')\n return open('/tmp/x').read()", "4"),
    "see other processes": ("import os\ndef f(x):\n try: os.kill(1, 0); os.kill(2, 0)\n"
                            " except OSError as e: return type(e).__name__", "ProcessLookupError"),
    "make namespaces": (
        "import ctypes\ndef f(x): return ctypes.CDLL(None).unshare(0x10000000)", -1),
    "count processes": ("import os, time\ndef f(x):\n n = 0\n try:\n  while n < 99:\n"
                        "   if os.fork() == 0: time.sleep(9)\n   n += 1\n"
                        " except BlockingIOError: return n < 16", True),
}  # fmt: skip
TOLERATED = {"FileNotFoundError", "PermissionError", "OSError", "NotADirectoryError"}


@pytest.fixture(scope="module")
def server():
    """A port on the loopback interface that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def run_many(programs, **options):
    """The verdicts of (code, tests) pairs, run side by side."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda program: run_tests(*program, **options), programs))


def all_programs(port: int) -> dict[str, tuple[str, object]]:
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    programs = {name: (code, ATTACKED[name]) for name, (code, _) in ATTACKS.items()}
    programs |= {
        name: (code, {"function": "f", "cases": [[[1], wanted]]})
        for name, (code, wanted) in PROBES.items()
    }
    programs["connect"] = (PROBE % connect, ["assert f(1) == ''"])
    # Last, since its 16 processes slow down what runs beside it.
    return programs | {"fork bomb": programs.pop("fork bomb")}


def as_ordinary_user(programs: list) -> list[sandbox.Verdict]:
    """The verdicts that a process gets which never was root."""
    call = (
        "import json, os\nfrom multiprocessing.pool import ThreadPool\n"
        "from grpo_nb.sandbox import Limits, run_tests\n"
        "programs, limits = json.load(sys.stdin)\n"
        "assert os.getuid() == os.geteuid() == 65534\n"
        "run = lambda p: run_tests(*p, limits=Limits(*limits), backend='bubblewrap')\n"
        "print(json.dumps(ThreadPool().map(run, programs)))"
    )
    # The interpreter may lie below /root: lend it a place that everyone can reach.
    setpriv = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    script = f'mount --bind "$0" /mnt && exec {setpriv} /mnt/bin/{PYTHON} -I -c "$1"'
    with tempfile.TemporaryDirectory() as place:  # and so may the checkout
        Path(place).chmod(0o755)
        shutil.copytree(Path(sandbox.__file__).parent, f"{place}/grpo_nb/sandbox")
        source = f"import sys; sys.path.insert(0, {place!r})\n" + call
        prefix, job = os.path.realpath(sys.base_prefix), json.dumps([programs, QUICK])
        command = ["unshare", "--mount", "sh", "-c", script, prefix, source]
        done = subprocess.run(command, input=job, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return [sandbox.Verdict(*verdict) for verdict in json.loads(done.stdout)]


@pytest.fixture(scope="module", params=["as root", "as an ordinary user"])
def verdicts(request, server):
    """{name: verdict}; both ways are the same where the tests themselves are not run as root."""
    if problem := sandbox.bubblewrap.bubblewrap_problem():
        pytest.skip(f"bubblewrap does not work here: {problem}")
    programs = all_programs(server)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_TEST_TOKEN", "hunter2")
        if request.param == "as an ordinary user" and os.geteuid() == 0:
            found = as_ordinary_user(list(programs.values()))
        else:
            found = run_many(programs.values(), limits=QUICK, backend="bubblewrap")
    return dict(zip(programs, found, strict=True))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gains_nothing_and_gets_its_reason(verdicts, name):
    verdict = verdicts[name]
    assert verdict.passed == 0 and verdict.failure == ""
    assert len(verdict.reasons) == verdict.total
    assert ATTACKS[name][1] in verdict.reasons[0] and all(verdict.reasons)


@pytest.mark.parametrize("name", PROBES)
def test_nothing_outside_is_read_or_written(verdicts, name):
    verdict = verdicts[name]
    refused = any(f"got '{error}'" in verdict.reasons[0] for error in TOLERATED)
    assert refused if PROBES[name][1] is None else verdict.share == 1, verdict


def test_the_network_is_out_of_reach(verdicts, server):
    with socket.create_connection(("127.0.0.1", server), 1):
        assert "got 'ConnectionRefusedError'" in verdicts["connect"].reasons[0]


def marked_processes() -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if MARKER in str(process.info["cmdline"])]


def test_nothing_is_left_behind():
    files = len(list(Path("/proc/self/fd").iterdir()))
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    scratch = f"open('/tmp/{MARKER}', 'w')\n" + SQUARE
    for code in (scratch, DAEMON):
        assert run_tests(code, CALLS, limits=QUICK, backend="bubblewrap").share == 1
    for code in ("while True: pass", FORKS):
        run_tests(code, CALLS, limits=QUICK, backend="bubblewrap")
    assert marked_processes() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert children.read_text() == before
    assert not Path(f"/tmp/{MARKER}").exists()


CORRECT = {
    "calls as JSON": (SQUARE, json.dumps(CALLS)),
    "a dataset's row, other shapes None": (SQUARE, CALLS | {"inputs": None}),
    "reads an empty stdin": (f"{SQUARE}\ntry: input()\nexcept Exception: pass", CALLS),
    "asserts": (SQUARE, ASSERTS),
    "a method": ("class Solution:\n    def f(self, a, b): return a + b",
                 {"function": "Solution().f", "cases": [[[1, 2], 3]]}),
    "a helper named like ours": ("def send(x): return 4\ndef f(x): return send(x)", ASSERTS[:1]),
    "prints too": ("def f(x):\n    print('seen', x)\n    return x * x", CALLS),
    "100 kB of code": ("#" * 100_000 + "\n" + SQUARE, CALLS),
    "a dict": (
        "def f(x): return {1: (2, {3}), 'a': [None, True], (1, 2): 'x', 2.5: float('nan')}",
        {"function": "f", "cases": [[[0], {(1, 2): "x", 2.5: float("nan"), 1: (2, {3}),
                                           "a": [None, True]}]]}),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["bubblewrap", "monty"])
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_passes(backend, name):
    code, tests = CORRECT[name]
    verdict = run_tests(code, tests, backend=backend)
    assert verdict.share == 1 and not verdict.failure and not any(verdict.reasons), verdict


def test_each_test_is_judged_by_itself():
    code = "def f(x):\n if x == 3: raise ValueError('no  threes')\n"
    code += " while x > 9: pass\n return 5 - x // 9"
    tests = {"function": "f", "cases": [[[x], 5] for x in (1, 3, 9, 4, 10)]}
    verdict = run_tests(code, tests, limits=QUICK, backend="bubblewrap")
    reasons = "", "raised ValueError: no threes", "wrong value: got 4, expected 5", ""
    assert verdict == (2, 5, (*reasons, "timed out after 1 s"), "")
    assert verdict.share == 0.4


KINDS = ("tuple", "set", "frozenset", "dict", "other", "none")
NUMBERS = st.sampled_from([0, 10**400, 1.5, float("nan"), True, 2**70])
SCALARS = st.none() | NUMBERS | st.sampled_from(["", "6f", "9" * 5000, "\ud800"])
FORGED = st.recursive(
    SCALARS | st.dictionaries(st.sampled_from(KINDS), st.tuples(NUMBERS, SCALARS), max_size=1),
    lambda inner: st.dictionaries(st.sampled_from(KINDS), inner | st.lists(inner), max_size=1),
    max_leaves=5,
)
LINES = FORGED.map(lambda value: json.dumps(["value", value]).encode())


JUDGES = parse_tests(["assert f(2) == {(1, 2.0): {3}}", "assert not f(2)", "assert f(2)"])


@settings(max_examples=500)
@given(LINES | st.binary())
@example(b'["failed", ["' + b"[" * 10**5)
def test_whatever_a_sandbox_sends_back_ends_in_a_verdict(line):
    kind, payload = sandbox.bubblewrap._read(line, 10**6)
    assert kind == "value" or (kind == "failed" and isinstance(payload, str))
    assert all(isinstance(reason_of(test, (kind, payload)), str) for test in JUDGES)


# (assert, what f returns, passes)
JUDGED = [
    ("assert f(2) == 4", "4", True),
    ("assert f(2) == 4", "4.0", False),  # an expected int wants an int
    ("assert f(2) == 4.0", "4", True),
    ("assert f(2) == 1", "True", False),
    ("assert f(2) == {1}", "{True}", False),
    ("assert f(2) == [1, 2]", "(1, 2)", False),
    ("assert f(2)[0] == 4", "[4]", True),
    ("assert sorted(f(2)) == [1, 2]", "{2, 1}", True),
    ("assert f(lambda x: x > 2) == 4", "4", True),
    ("assert f(2)", "True", True),
    ("assert f(2)", "object()", False),  # whose truth only the program knows
    ("assert not f(2)", "0", True),
    ("assert f(2) == True", "1", False),
    ("assert f(2) == None", "None", True),
    ("assert f(2) == 10000000000000000000000001", "10**25 + 1", True),
    ("assert f(2) == 1", "10**5000", False),
]


def test_asserts_are_judged_outside_by_type_and_value():
    programs = [(f"def f(x): return {value}", [text]) for text, value, _ in JUDGED]
    for row, verdict in zip(JUDGED, run_many(programs, backend="bubblewrap"), strict=True):
        assert (verdict.share == 1) is row[2], (row, verdict)


UNJUDGED = [
    "assert all(f(i) == i for i in range(9))",  # builtins.all may be patched
    "assert abs(f(2) - 4) < 0.1",  # the answer would enter, and f may return a number-like
    *("assert isinstance(f(2), int)", "assert math.isclose(f(2), 4)", "assert isclose(f(2), 4)"),
    *("assert f(2) == 4 and f(3) == 9", "assert f(2).startswith('a')", "assert 4 == f(2)"),
    *("assert f(2) != 4", "assert 'abc'.startswith(f(2))", "assert f(2) == f(3)"),
    *("assert f(2) is 4", "assert 2 == 2", "assert f(2) ==", "print(f(2))"),
]


@pytest.mark.parametrize("text", UNJUDGED)
def test_an_assert_that_the_program_would_judge_is_refused(text):
    with pytest.raises(ValueError, match="cannot be judged from outside the program") as caught:
        run_tests(SQUARE, [text])
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "tests",
    [
        None, 4, "", "assert f(2) == 4", "{", [], {}, [4], {"cases": []}, {"function": "f"},
        {"function": "f", "cases": []}, {"function": "f(", "cases": [[[1], 1]]},
        {"function": "f", "cases": [[1, 1]]}, {"function": "f", "cases": [[[1]]]},
        {"function": "f", "cases": [[[1], object()]]}, {"function": "f", "cases": [[[1], b"x"]]},
    ],
)  # fmt: skip
def test_tests_of_another_shape_are_refused_with_the_shapes_that_are_not(tests):
    with pytest.raises(ValueError) as caught:
        run_tests(SQUARE, tests)
    message = str(caught.value)
    assert '"cases"' in message or "cannot be judged" in message
    assert repr(tests)[:40] in message or "assert 4" in message


@pytest.fixture
def no_bubblewrap(monkeypatch):
    sandbox.bubblewrap.bubblewrap_problem.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    yield
    sandbox.bubblewrap.bubblewrap_problem.cache_clear()


def test_auto_takes_monty_only_where_bubblewrap_does_not_work(request):
    assert choose_backend() == "bubblewrap"
    request.getfixturevalue("no_bubblewrap")
    assert choose_backend() == "monty"
    assert run_tests(SQUARE, CALLS).share == 1


def test_with_neither_nothing_runs_and_the_error_says_what_to_install(no_bubblewrap, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    for backend in ("auto", "monty"):
        with pytest.raises(RuntimeError) as caught:
            run_tests(SQUARE, CALLS, backend=backend)
        assert "apt-get install bubblewrap" in str(caught.value)
        assert "pip install pydantic-monty" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"bubblewrap does not work here .*apt-get install"):
        run_tests(SQUARE, CALLS, backend="bubblewrap")
    with pytest.raises(ValueError, match="'docker': use 'auto', 'bubblewrap' or 'monty'"):
        run_tests(SQUARE, CALLS, backend="docker")


def test_a_sandbox_that_fails_is_no_fault_of_the_program(monkeypatch):
    assert choose_backend() == "bubblewrap"
    broken = ["/bin/sh", "-c", "echo no room >&2; exit 1"]
    monkeypatch.setattr(sandbox.bubblewrap, "command", lambda *_: broken)
    verdict = run_tests(SQUARE, CALLS, backend="bubblewrap")
    assert verdict.passed == 0 and "no room" in verdict.failure
    monkeypatch.setattr(sandbox.bubblewrap, "command", lambda *_: ["/nonexistent/bwrap"])
    assert "could not start" in run_tests(SQUARE, CALLS, backend="bubblewrap").failure


MONTYS = {  # program: the reason
    "while True: pass": "timed out after 1 s",
    "x = 'a' * 10**10": "out of memory",
    "def f(x): return 'x' * 9999": "returned more than 4096 bytes",
    "def f(x): return True": "wrong value: got True, expected 4",
    "def f(x): raise ValueError('no')": "raised ValueError: no",
    "open('/etc/passwd')": "raised PermissionError",
    ATTACKS["equal to all"][0]: "wrong value",
}


def test_monty_withstands_the_attacks():
    programs = [(code, ATTACKED[name]) for name, (code, _) in ATTACKS.items()]
    programs += [(code, ["assert f(1) == 'done'"]) for code, _ in PROBES.values()]
    programs += [(code, CALLS) for code in (DAEMON, *MONTYS)]
    started = time.monotonic()
    verdicts = run_many(programs, limits=QUICK, backend="monty")
    for program, verdict in zip(programs, verdicts, strict=True):
        assert verdict.passed == 0 and all(verdict.reasons), (program, verdict)
    assert time.monotonic() - started < 30
    assert marked_processes() == []
    for verdict, reason in zip(verdicts[-len(MONTYS) :], MONTYS.values(), strict=True):
        assert verdict.reasons[0].startswith(reason)


def test_what_monty_lacks_is_a_failure_and_no_fault_of_the_program():
    for code in ("import heapq", "def f(x): yield 1", "import sys\nsys.stdin.read()", "exit()"):
        verdict = run_tests(code, CALLS, backend="monty")
        assert "monty cannot run this program" in verdict.failure
    for code in ("import nonsense", "undefined", "raise NotImplementedError('later')"):
        assert run_tests(code, CALLS, backend="monty").failure == ""
