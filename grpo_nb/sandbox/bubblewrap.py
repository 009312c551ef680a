"""Run a program in bubblewrap, with its own user, processes, network and files, and with limits."""

import contextlib
import functools
import io
import json
import marshal
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_nb.sandbox.values import FILE_BYTES, START_SECONDS, Limits, Outcome, decode

# The first process in a sandbox, which receives code and calls, and sends values. It imports
# little, because each import delays every program. A program may take it over, but gains nothing:
# the process can only send values.
HARNESS = r"""
import marshal, os, resource, sys
from _json import encode_basestring_ascii as quote

with os.fdopen(os.dup(0), "rb") as file:
    token, code, asks, output_bytes, limits = marshal.load(file)
channel = os.fdopen(int(sys.argv[1]), "w", encoding="ascii")

def send(kind, text):
    if len(text) > 6 * output_bytes + 2:
        kind, text = "failed", quote(f"returned more than {output_bytes} bytes")
    channel.write(f'\n{token}["{kind}", {text}]\n')
    channel.flush()

def describe(error):
    if isinstance(error, MemoryError):
        return quote("out of memory")
    try:
        return quote(f"raised {type(error).__name__}: {error}"[:300])
    except BaseException:
        return quote("raised an exception that cannot be shown")

def encode(value):
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int:
        return str(value)
    if kind is float:
        return repr(value).replace("nan", "NaN").replace("inf", "Infinity")
    if kind is str:
        return quote(value)
    if isinstance(value, dict):
        kind, value = dict, [list(pair) for pair in dict.items(value)]
    if kind not in (dict, list, tuple, set, frozenset):
        return f'{{"other": {quote(kind.__name__)}}}'
    items = "[" + ", ".join(map(encode, value)) + "]"
    return items if kind is list else f'{{"{kind.__name__}": {items}}}'

def load(name):
    for limit, amount in limits.items():
        resource.setrlimit(getattr(resource, limit), (amount, amount))
    module = sys.modules[name] = type(sys)(name)
    module.exit = module.quit = sys.exit
    exec(compile(code, "program.py", "exec"), module.__dict__)
    return module.__dict__

os.dup2(os.memfd_create("stdin"), 0)
send("ready", "null")
problem = None
try:
    space = load("program")
except BaseException as error:
    problem = describe(error)
for expression, arguments in asks:
    try:
        value = None if problem else eval(expression, space)
        text = encode(value if arguments is None or problem else value(*arguments))
    except BaseException as error:
        send("failed", describe(error))
    else:
        send("failed" if problem else "value", problem or text)
os._exit(0)
"""


def command(gate_fd: int, info_fd: int, channel_fd: int) -> list[str]:
    """Return the command that starts bubblewrap, as an ordinary user.

    Limits on processes do not apply to root, so root becomes another user first. That user cannot
    read an interpreter below /root, so the interpreter's folder is also mounted at /mnt, for this
    process tree only.
    """
    prefix = Path(sys.base_prefix).resolve()
    python = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    source, before = str(prefix), []
    if os.geteuid() == 0:
        nobody = [find_tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        if not all(path.stat().st_mode & 1 for path in (prefix, *prefix.parents)):
            stage = f'{find_tool("mount")} --bind "$0" /mnt && exec "$@"'
            before = [find_tool("unshare"), "--mount", "--", "/bin/sh", "-c", stage, source]
            source = "/mnt"
        before += nobody
    sandbox = "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session"
    sandbox += " --as-pid-1 --uid 65534 --gid 65534 --hostname sandbox --clearenv"
    sandbox += " --setenv PYTHONHASHSEED 0"  # so that sets have the same order each time
    sandbox += f" --block-fd {gate_fd} --info-fd {info_fd}"
    for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"):
        sandbox += f" --ro-bind-try {path} {path}"
    sandbox += f" --dev-bind /dev/null /dev/null --size {16 * FILE_BYTES} --tmpfs /tmp --chdir /tmp"
    command = [*before, find_tool("bwrap"), *sandbox.split(), "--ro-bind", source, str(prefix)]
    command += ["--remount-ro", "/", "--", python, "-P", "-S", "-s", "-B", "-X", "utf8"]
    return [*command, "-c", HARNESS, str(channel_fd)]


def find_tool(name: str) -> str:
    path = shutil.which(name)
    if not path:
        raise FileNotFoundError(f"{name} is not on PATH")
    return path


def in_bubblewrap(code: str, asks: list[Any], limits: Limits) -> Outcome:
    """Run a program in bubblewrap, and return its answers; `run_tests` judges them.

    Args:
        code: The program.
        asks: What each test asks, (expression, arguments or None).
        limits: What the program may use.
    """
    token = secrets.token_hex(8).encode()  # begins each line that the program's process writes
    rlimits = {
        "RLIMIT_AS": limits.memory_mib << 20,
        "RLIMIT_CPU": int(limits.seconds) + 2,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": limits.processes,
    }
    job = marshal.dumps((token.decode(), code, asks, limits.output_bytes, rlimits))
    answer_bytes = 6 * limits.output_bytes + 1024
    try:
        with started(job) as (process, channel, stderr):
            raw, ending = _collect(channel, limits, (len(asks) + 1) * answer_bytes)
            errors = os.pread(stderr.fileno(), 4096, 0)
    except OSError as error:
        return Outcome([], failure=f"could not start bubblewrap: {error}")
    lines = [line.removeprefix(token) for line in raw.split(b"\n")[:-1] if line.startswith(token)]
    if not lines:
        message = " ".join(errors.decode(errors="replace").split())[-300:]
        why = message or ending
        return Outcome([], failure=f"bubblewrap ended before the program began: {why}")
    status = process.returncode
    crash = (
        f"exited with status {status}" if status < 129 else f"crashed with signal {status - 128}"
    )
    answers = [_read(line, answer_bytes) for line in lines[1 : len(asks) + 1]]
    return Outcome(answers, ending or f"{crash} before it gave a result")


@contextlib.contextmanager
def started(job: bytes) -> Iterator[tuple[subprocess.Popen, io.FileIO, io.FileIO]]:
    """Yield a sandbox that runs `job`, its result channel and its stderr; then end the sandbox.

    The sandbox's stdout is discarded. The limit on the size of files applies to its stderr.
    """
    with contextlib.ExitStack() as stack:
        own = (*os.pipe(), *os.pipe(), *os.pipe(), *map(os.memfd_create, ("job", "stderr")))
        files = [stack.enter_context(os.fdopen(fd, "rb", 0)) for fd in own]
        channel, channel_end, info, info_end, gate_end, gate, inbox, stderr = files
        with os.fdopen(os.dup(inbox.fileno()), "wb") as file:
            file.write(job)
        os.lseek(inbox.fileno(), 0, os.SEEK_SET)
        inherited = [file.fileno() for file in (gate_end, info_end, channel_end)]
        process = subprocess.Popen(
            command(*inherited),
            env={},  # not even bubblewrap's own processes may hold the caller's tokens
            cwd="/",
            stdin=inbox,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=inherited,
            start_new_session=True,
        )
        stack.enter_context(process)
        channel_end.close()
        info_end.close()
        first = re.search(rb'"child-pid": (\d+)', info.read(4096))
        first_fd = os.pidfd_open(int(first[1])) if first else None
        gate.close()  # the first process continues; it had to wait until its pidfd was open
        try:
            yield process, channel, stderr
        finally:
            if first_fd is None:
                process.kill()
            else:  # when the first process ends, all others end, and then bubblewrap
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(first_fd, signal.SIGKILL)
                os.close(first_fd)


def _collect(channel: io.FileIO, limits: Limits, most_bytes: int) -> tuple[bytes, str]:
    """Return (output of the channel, why the program was stopped), or (output, "") if it ended."""
    output, seconds = bytearray(), START_SECONDS
    deadline, poller = time.monotonic() + seconds, select.poll()
    poller.register(channel, select.POLLIN)
    while poller.poll(1000 * max(0.0, deadline - time.monotonic())):
        if not (chunk := channel.read(65536)):
            return bytes(output), ""
        if not output:
            seconds = limits.seconds
            deadline = time.monotonic() + seconds
        output += chunk
        if len(output) > most_bytes:
            return bytes(output), f"returned more than {limits.output_bytes} bytes"
    return bytes(output), f"timed out after {seconds:g} s"


def _read(line: bytes, most_bytes: int) -> tuple[str, Any]:
    """Parse the answer in a line; never raise, because the program may have forged the line."""
    try:
        if len(line) > most_bytes:  # a set of many numbers with equal hashes would take forever
            raise ValueError
        kind, payload = json.loads(line)
        return ("value", decode(payload)) if kind == "value" else ("failed", str.strip(payload))
    except Exception:  # json and each constructor raise their own errors
        return "failed", "sent a result that cannot be read"


@functools.cache
def bubblewrap_problem() -> str:
    """Run a test program and return why bubblewrap cannot work here; "" if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    outcome = in_bubblewrap("def f(): return 1", [("f()", None)], Limits(START_SECONDS))
    return "" if outcome.answers == [("value", 1)] else outcome.failure or outcome.ending
