"""`python -m grpo_nb serve`: the run's model behind an OpenAI-compatible server.

By vLLM's server on a GPU, in a process that ends with this one; otherwise by the one of
`transformers serve`, in this process. `guard` stands before both.
"""

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo_nb import data, models
from grpo_nb.evaluation.answers import weights_of
from grpo_nb.models.chat import find_model
from grpo_nb.pipeline.notebooks import QUIET
from grpo_nb.pipeline.sweep import ending_with_us
from grpo_nb.runs import PROJECT_ROOT, Run

if TYPE_CHECKING:
    from fastapi import Request, Response

LOCAL = ("127.0.0.1", "localhost")
PATHS = ("/v1/chat/completions", "/v1/models", "/health")
KEY, MOST_BYTES = "GRPO_NB_API_KEY", "GRPO_NB_MOST_BYTES"  # `guard` reads them


def serve(run: Run, host: str, port: int, adapter: bool = False) -> int:
    """Serve a run's model under the run's name, and say how to ask it, until it is stopped.

    Args:
        run: Its prompts bound how large a request may be.
        host: Elsewhere than on this machine a key is asked for, `$GRPO_NB_API_KEY` or a new one.
        port: To listen at.
        adapter: Serve the base that was trained on with its adapter instead of the merged model.

    Returns:
        The exit code.

    Raises:
        FileNotFoundError: No complete merged model, or no adapter.
        ValueError: The merged model is of an earlier training.
        RuntimeError: The port is taken.
    """
    config, weights = run.config(), weights_of(run, "adapter" if adapter else "merged")
    vllm = models.use_vllm("detect", weights["quantization"])
    with _listening(host, port) as listener:  # requests wait in it until the model is loaded
        largest = 2**16 + 16 * config.model.max_seq_length  # than any prompt that fits
        os.environ.update(QUIET | {MOST_BYTES: str(largest)})
        if host not in LOCAL:
            os.environ.setdefault(KEY, secrets.token_urlsafe(24))
        said = f"Listening at http://{host}:{port}/v1, model {run.name}. Ask it:\n\n"
        body = {"model": run.name, "messages": data.load(run, "eval")[0]["prompt"]}
        body |= {"temperature": 0, "max_tokens": config.train.max_completion_length}
        said += curl(host, port, body)
        if not vllm:
            return _by_transformers(listener, run.name, weights, said)
    print(f"vLLM loads the model, which takes a minute or more. {said}", flush=True)
    command = vllm_command(run.name, host, port, weights, config.model.max_seq_length)
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(ending_with_us(command), env=os.environ | {"PYTHONPATH": path}) as server:
        return server.wait()


async def guard(request: "Request", proceed: Callable[..., Awaitable["Response"]]) -> "Response":
    """Answer only requests that mean this server; a middleware of FastAPI, for both servers.

    A page on another site can send a request here from the browser of whoever works on this
    machine: its Origin, or after a changed DNS entry its Host, gives it away. The servers offer
    more than a chat, such as loading another model: only `PATHS` are let through.
    """
    from fastapi.responses import JSONResponse

    headers, key, most = request.headers, os.environ.get(KEY, ""), int(os.environ[MOST_BYTES])
    host, origin = headers.get("host", ""), headers.get("origin", "")
    size = headers.get("content-length", "0" if request.method == "GET" else "unknown")
    given = headers.get("authorization", "").encode()
    refusals = [
        (404, request.url.path not in PATHS, f"only {', '.join(PATHS)} are served here"),
        (421, not key and urlsplit(f"//{host}").hostname not in LOCAL, f"{host!r} is not served"),
        (403, origin and urlsplit(origin).netloc != host, f"pages of {origin} may not ask here"),
        (401, key and not secrets.compare_digest(given, f"Bearer {key}".encode()), "send the key"),
        (413, not size.isdigit() or int(size) > most, f"send at most {most} bytes, not {size}"),
    ]
    for status, refused, why in refusals:
        if refused:
            return JSONResponse({"error": {"message": why, "code": status}}, status)
    return await proceed(request)


def vllm_command(
    name: str, host: str, port: int, weights: dict[str, Any], max_seq_length: int
) -> list[str]:
    """What starts vLLM's server; the key is not among the arguments, which every user can see."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host]
    command += ["--port", str(port), "--middleware", "grpo_nb.pipeline.serve.guard"]
    command += ["--model", find_model(weights["model_path"]), "--served-model-name"]
    if adapter := weights["adapter"]:  # the base below it has a name as well
        lora = f"{name}={adapter.resolve()}"
        command += [f"{name}-base", "--enable-lora", "--lora-modules", lora]
        command += ["--max-lora-rank", str(models.lora_rank(adapter))]
    else:
        command += [name]
    if weights["quantization"] == "4bit":
        command += ["--quantization", "bitsandbytes"]
    return [*command, "--max-model-len", str(max_seq_length)]


def curl(host: str, port: int, body: dict[str, Any]) -> str:
    """A line for the shell that asks the server."""
    near = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    words = ["curl", f"http://{near}:{port}/v1/chat/completions", "-d", json.dumps(body)]
    words += ["-H", "Content-Type: application/json"]
    words += ["-H", f"Authorization: Bearer {os.environ[KEY]}"] if os.environ.get(KEY) else []
    return shlex.join(words)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = f"port {port} is taken: choose another one with --port"
        raise RuntimeError(f"{why} ({host}: {error})") from None


def _by_transformers(listener: socket.socket, name: str, weights: dict[str, Any], said: str) -> int:
    import uvicorn
    from transformers.cli.serving import chat_completion, model_manager, server, utils

    model = models.load_checkpoint(**weights)
    model.generation_config.update(do_sample=True, top_k=0)  # temperature 0 is greedy all the same
    tokenizer = models.load_tokenizer(weights["model_path"])
    manager = model_manager.ModelManager(model_timeout=-1)
    manager.loaded_models[f"{name}@main"] = model_manager.TimedModel(model, -1, tokenizer)
    manager.force_model = name
    manager.get_gen_models = lambda: [{"id": name, "object": "model", "owned_by": "grpo_nb"}]
    state = utils.GenerationState()
    chat = chat_completion.ChatCompletionHandler(manager, state, chat_template_kwargs={})
    app = server.build_server(manager, chat, None, None, None, state)
    app.middleware("http")(guard)
    print(said, flush=True)
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])
    return 0
