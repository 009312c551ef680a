"""Python processes in no time: forks of one that has imported what takes seconds to import.

    python forked.py SERVER                the process that is forked; SERVER is a socket's path
    python -IS forked.py SERVER -m grpo_nb run --name demo

The second is a process as `python -m grpo_nb run --name demo`: its streams, folder, environment
and exit code, signals passed on; the fork ends with it. Packages of others are imported before,
grpo_nb is not. What is neither a script nor a module of ours is left to Python itself.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import contextmanager

SERVER = "FORKED_PYTHON"  # the environment variable that names it, while it runs
CHILDREN = "FORKED_CHILDREN"  # set: a fork's own Python is this one, too
MODULES = ("grpo_nb", "ipykernel_launcher", "pytest", "torch.distributed.run")
IMPORTS = ("torch", "transformers", "datasets", "peft", "trl.trainer.grpo_trainer", "pandas")
IMPORTS += ("matplotlib.pyplot", "ipykernel.kernelapp", "ipywidgets", "bitsandbytes", "pydantic")
IMPORTS += (
    "transformers.generation.utils",
    "transformers.models.qwen2.modeling_qwen2",
    "papermill",
)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def python():
    """How a command begins: by the server's forks if it runs, otherwise by Python itself."""
    server = os.environ.get(SERVER)
    return [sys.executable, *(["-IS", __file__, server] if server else [])]


@contextmanager
def running(folder):
    """The server, in a folder that all test processes share; Jupyter's kernels are its forks, too.

    It ends when the last of them has let go of the pipe that is its standard input.
    """
    from unittest.mock import patch

    from filelock import FileLock

    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        try:
            held, process = os.open(folder / "in_use", os.O_WRONLY | os.O_NONBLOCK), None
        except OSError:  # nobody reads there
            held, process = start(folder)
    try:
        names = {SERVER: str(folder / "server"), "JUPYTER_PATH": str(folder)}
        with patch.dict(os.environ, names):
            yield
    finally:
        os.close(held)
        if process:
            process.wait()


def start(folder):
    """(what holds it, the process) of a new server in a folder, with a kernel that is its fork."""
    import shlex
    import subprocess

    from grpo_nb.pipeline.notebooks import QUIET

    for name in ("in_use", "server"):
        (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / "in_use")
    environment = os.environ | QUIET | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    reading = os.open(folder / "in_use", os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reading, "rb") as pipe:
        held = os.open(folder / "in_use", os.O_WRONLY)
        streams = {"stdin": pipe, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, __file__, str(folder / "server")]
        process = subprocess.Popen(command, env=environment, **streams)
    with process.stdout as said:
        assert said.readline() == b"ready\n", "it did not start"
    forked = [sys.executable, "-IS", __file__, str(folder / "server")]
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.join(forked)} "$@"\n')
    (folder / "python").chmod(0o755)
    kernel = [*forked, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = {"argv": kernel, "display_name": "Python 3", "language": "python"}
    (folder / "kernels/python3").mkdir(parents=True, exist_ok=True)
    (folder / "kernels/python3/kernel.json").write_text(json.dumps(about))
    return held, process


def ask(server, arguments):
    """Be the process that the server forks."""
    arguments = arguments[arguments[:1] == ["-u"] :]
    ours = arguments[1] in MODULES if arguments[:1] == ["-m"] else arguments[0].endswith(".py")
    if not ours:
        os.execv(sys.executable, [sys.executable, *arguments])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        asked = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()  # noqa: PTH109
        socket.send_fds(connection, [struct.pack("I", len(asked))], [0, 1, 2])
        connection.sendall(asked)
        (child,) = struct.unpack("i", connection.recv(4))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(child, number))
        (code,) = struct.unpack("i", connection.recv(4))
    if code >= 0:
        os._exit(code)
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)


def serve(path):
    """Fork for each that asks; no threads here."""
    import gc
    import importlib

    for name in IMPORTS:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        gc.collect()
        gc.freeze()  # forks share what is not looked through
        print("ready", flush=True)
        children = []
        while server in select.select([server, 0], [], [])[0]:  # 0: who started us has ended
            connection, _ = server.accept()
            children = [one for one in children if os.waitpid(one, os.WNOHANG) == (0, 0)]
            children.append(os.fork())
            if children[-1] == 0:
                server.close()
                attend(connection)
            connection.close()
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def attend(connection):
    """Fork once more, and say how that ended; or end it when the one who asked has ended."""
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    size, asked = *struct.unpack("I", head), b""
    while len(asked) < size:
        asked += connection.recv(size - len(asked))
    child = os.fork()
    if child == 0:
        connection.close()
        become(*json.loads(asked), streams)
    connection.sendall(struct.pack("i", child))
    for stream in streams:
        os.close(stream)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.sendall(struct.pack("i", code))
    finally:
        os._exit(0)


def become(arguments, folder, environment, streams):
    """Run the module or script as a fresh Python would, and end."""
    import atexit
    import random
    import runpy
    import threading
    import traceback
    from pathlib import Path

    import matplotlib as mpl

    os.setsid()
    for stream, here in enumerate(streams):
        os.dup2(here, stream)
        os.close(here)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    at_once = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=at_once)
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    if environment.get(CHILDREN):
        sys.executable = str(Path(environment[SERVER]).with_name("python"))
    mpl.rcParams["backend"] = environment.get("MPLBACKEND", "agg")
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    module = arguments[0] == "-m"
    first = folder if module else str(Path(arguments[0]).resolve().parent)
    sys.path[:1] = [first, *(path for path in paths if path)]
    code = 0
    try:
        if module:
            if arguments[1] == "ipykernel_launcher":
                mpl.rcParams["backend"] = "module://matplotlib_inline.backend_inline"
            sys.argv = arguments[1:]
            runpy._run_module_as_main(arguments[1])
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if code == 1 and asked.code != 1:
            print(asked.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        stream.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        ask(sys.argv[1], sys.argv[2:])
