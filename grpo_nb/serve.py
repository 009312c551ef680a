"""`python -m grpo_nb serve`: the run's model behind an OpenAI-compatible server."""

import importlib.util
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import httpx

from grpo_nb import data
from grpo_nb.chat import find_model
from grpo_nb.export import check_complete
from grpo_nb.models import cuda_available
from grpo_nb.runs import Run

LOCAL = ("127.0.0.1", "localhost")
KEY = "GRPO_NB_API_KEY"
STARTING_SECONDS = 600  # vLLM compiles


class Server(NamedTuple):
    """What to start, where, and how to ask it.

    model: The name that a request gives.
    key: A request's bearer token; "" where none is asked for.
    """

    command: list[str]
    environment: dict[str, str]
    model: str
    key: str = ""


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None and cuda_available()


def plan(run: Run, host: str, port: int, *, adapter: bool = False, vllm: bool = False) -> Server:
    """The server for a run.

    Args:
        host: Address to listen at; elsewhere than on this machine a key is asked for,
            `$GRPO_NB_API_KEY` or a new one.
        adapter: Serve base + adapter instead of the merged model.
        vllm: By vLLM; else by transformers' own server.

    Raises:
        ValueError: transformers' server cannot do what is asked.
        RuntimeError: A package is missing.
        FileNotFoundError: No whole merged model.
    """
    merged = "" if adapter else str(check_complete(run / "model/merged").resolve())
    listen = ["--host", host, "--port", str(port)]
    if not vllm:
        _check_transformers(host, adapter)
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", merged, *listen]
        return Server(command, {"HF_HUB_OFFLINE": "1"}, merged)
    key = "" if host in LOCAL else os.environ.get(KEY) or secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *listen]
    if adapter:
        model, lora = run.config().model, run / "train/adapter"
        command += ["--model", find_model(model.model_path), "--enable-lora"]
        command += ["--max-lora-rank", str(model.lora_rank)]
        command += ["--lora-modules", f"{run.name}={lora.resolve()}"]
        command += ["--quantization", "bitsandbytes"] if model.quantization == "4bit" else []
    else:
        command += ["--model", merged, "--served-model-name", run.name]
    if not cuda_available():
        # vLLM's build for CPUs otherwise compiles for minutes, and takes all memory there is.
        command += ["--enforce-eager", "--gpu-memory-utilization", "0.3"]
    # By the environment, for arguments are seen by every user of the machine.
    return Server(command, {"VLLM_API_KEY": key} if key else {}, run.name, key)


def _check_transformers(host: str, adapter: bool) -> None:
    missing = [m for m in ("fastapi", "uvicorn", "openai") if not importlib.util.find_spec(m)]
    if missing:
        raise RuntimeError(f"serving needs {', '.join(missing)}: type `make install`")
    if adapter:
        raise ValueError("transformers' server takes no adapter: leave --adapter out")
    if host not in LOCAL:
        raise ValueError(
            f"--host {host} lets others in, and transformers' server knows no API key: stay on "
            "127.0.0.1 behind an SSH tunnel, or use vLLM, whose server asks for a key"
        )


def curl(server: Server, host: str, port: int, prompt: list[dict], max_tokens: int) -> str:
    """A line for the shell that asks the server a held-out question, greedily."""
    body = {"model": server.model, "messages": prompt, "temperature": 0, "max_tokens": max_tokens}
    words = ["curl", f"http://{host}:{port}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    words += ["-H", f"Authorization: Bearer {server.key}"] if server.key else []
    return shlex.join(words)


def serve(run: Run, host: str, port: int, adapter: bool = False) -> int:
    """Start the server, print how to ask it, and wait until it ends; returns its exit code.

    Raises:
        RuntimeError: The port is taken, or the server did not start.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError(f"port {port} is taken: choose another one with --port")
    server = plan(run, host, port, adapter=adapter, vllm=has_vllm())
    asked, length = data.load(run, "eval")[0], run.config().train.max_completion_length
    near = "127.0.0.1" if host == "0.0.0.0" else host
    process = subprocess.Popen(server.command, env=os.environ | server.environment)
    try:
        _wait(process, f"http://{near}:{port}/health")
        print(f"Listening at http://{host}:{port}/v1, model {server.model}. Ask it:\n")
        print(curl(server, near, port, asked["prompt"], length), flush=True)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen, url: str) -> None:
    for _ in range(2 * STARTING_SECONDS):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}; see above why")
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"{url} did not answer within {STARTING_SECONDS} s")
