"""`python -m grpo_nb serve`: the run's model behind an OpenAI-compatible server.

By vLLM on a GPU, in a process that ends with this one; else by `api`, in this process.
"""

import ctypes
import importlib.util
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from grpo_nb import data, models
from grpo_nb.export import check_complete, trained_paths
from grpo_nb.models.chat import find_model
from grpo_nb.runs import PROJECT_ROOT, Run
from grpo_nb.runs.config import RunConfig

LOCAL = ("127.0.0.1", "localhost")
KEY = "GRPO_NB_API_KEY"
STARTING_SECONDS = 600  # vLLM compiles


class Served(NamedTuple):
    """Which weights: a folder or hub name, an adapter over it or none, "4bit" or "16bit"."""

    model_path: str
    adapter: Path | None
    quantization: str


class Server(NamedTuple):
    """What is served, where, to whom, and how vLLM would be started for it.

    model: The name that a request gives: the run's.
    key: A request's bearer token; "" where none is asked for.
    """

    served: Served
    model: str
    host: str
    port: int
    key: str
    config: RunConfig

    @property
    def url(self) -> str:
        near = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{near}]' if ':' in near else near}:{self.port}"

    @property
    def rules(self) -> dict:
        """Of `api.Guard`; a body that is larger than any prompt that fits is not even read."""
        hosts = [f"{name}:{self.port}" for name in (self.host, *LOCAL)] if not self.key else []
        largest = 2**16 + 16 * self.config.model.max_seq_length
        return {"hosts": hosts, "key": self.key, "max_bytes": largest}

    @property
    def command(self) -> list[str]:
        """Of vLLM's server."""
        served, room = self.served, self.config.model.max_seq_length
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += [
            "--middleware",
            "grpo_nb.pipeline.serve.api.Guard",
            "--max-model-len",
            str(room),
        ]
        command += ["--model", find_model(served.model_path)]
        if served.adapter:
            command += ["--enable-lora", "--max-lora-rank", str(models.lora_rank(served.adapter))]
            command += ["--lora-modules", f"{self.model}={served.adapter.resolve()}"]
            # The base below it has a name as well, which is not the run's.
            command += ["--served-model-name", f"{self.model}-base"]
        else:
            command += ["--served-model-name", self.model]
        if served.quantization == "4bit":
            command += ["--quantization", "bitsandbytes"]
        if not models.cuda_available():
            # vLLM's build for CPUs otherwise compiles for minutes, and takes all memory there is.
            command += ["--enforce-eager", "--gpu-memory-utilization", "0.3"]
        return command

    @property
    def environment(self) -> dict[str, str]:
        """Of vLLM's server: the key is not among the arguments, which every user can see."""
        path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
        return {"GRPO_NB_SERVE_RULES": json.dumps(self.rules), "PYTHONPATH": path}


def plan(run: Run, host: str, port: int, *, adapter: bool = False) -> Server:
    """The server for a run.

    Args:
        host: Address to listen at; elsewhere than on this machine a key is asked for,
            `$GRPO_NB_API_KEY` or a new one.
        adapter: Serve the base that was trained on + adapter instead of the merged model.

    Raises:
        ValueError: An adapter is asked for, and every weight was trained; or the merged
            model is of an earlier training.
        FileNotFoundError: No whole merged model, or no adapter.
    """
    config = run.config()
    served = Served(str(run / "model/merged"), None, "16bit")
    if adapter:
        _, base, folder = trained_paths(run, config)
        if folder is None:
            raise ValueError(f"run {run.name!r} trained every weight: leave --adapter out")
        served = Served(base, folder, config.model.quantization)
    else:
        run.refuse_stale()
        check_complete(run / "model/merged")
    key = "" if host in LOCAL else os.environ.get(KEY) or secrets.token_urlsafe(24)
    return Server(served, run.name, host, port, key, config)


def curl(server: Server, prompt: list[dict]) -> str:
    """A line for the shell that asks the server a held-out question, greedily."""
    body = {"model": server.model, "messages": prompt, "temperature": 0}
    body["max_tokens"] = server.config.train.max_completion_length
    words = ["curl", f"{server.url}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    words += ["-H", f"Authorization: Bearer {server.key}"] if server.key else []
    return shlex.join(words)


def serve(run: Run, host: str, port: int, adapter: bool = False) -> int:
    """Start the server, print how to ask it, and wait until it ends; returns its exit code.

    Raises:
        RuntimeError: The port is taken, or the server did not start.
    """
    server = plan(run, host, port, adapter=adapter)
    said = f"Listening at http://{host}:{port}/v1, model {server.model}. Ask it:\n\n"
    said += curl(server, data.load(run, "eval")[0]["prompt"])
    vllm = models.cuda_available() and not models.vllm_lacks(server.served.quantization)
    try:
        return _by_vllm(server, said) if vllm else _in_this_process(server, said)
    except KeyboardInterrupt:
        return 0


def _in_this_process(server: Server, said: str) -> int:
    if missing := [m for m in ("starlette", "uvicorn") if not importlib.util.find_spec(m)]:
        raise RuntimeError(f"serving needs {', '.join(missing)}: type `make install`")
    import uvicorn

    from grpo_nb.pipeline.serve import api

    with _listening(server.host, server.port) as listener:
        engine = models.open_engine(**server.served._asdict(), engine="transformers")
        config = server.config
        lengths = (config.model.max_seq_length, config.train.max_completion_length)
        chat = api.Api(engine, server.model, *lengths)
        app = chat.app(api.Rules(**server.rules))

        class Ending(uvicorn.Server):
            def handle_exit(self, *caught: Any) -> None:
                chat.stopping.set()  # ends what is being answered
                super().handle_exit(*caught)

        print(said, flush=True)
        Ending(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    """Listens there; requests wait in it until the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = f"port {port} is taken: choose another one with --port"
        raise RuntimeError(f"{why} ({host}: {error})") from None


def _by_vllm(server: Server, said: str) -> int:
    _listening(server.host, server.port).close()  # vLLM says it minutes later
    environment = os.environ | server.environment
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(server.command, env=environment, preexec_fn=end_with_parent)
    try:
        _wait(process, server)
        print(said, flush=True)
        return process.wait()
    finally:
        process.terminate()
        process.wait()
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Linux sends this process SIGTERM when its parent has ended, however that came about."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _wait(process: subprocess.Popen, server: Server) -> None:
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    for _ in range(2 * STARTING_SECONDS):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}; see above why")
        try:
            if httpx.get(f"{server.url}/health", headers=headers, timeout=2).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"{server.url} did not answer within {STARTING_SECONDS} s")
