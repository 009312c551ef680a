"""`python -m grpo_nb serve`: the run's model behind an OpenAI-compatible server.

By vLLM's server on a GPU, in a process that ends with this one; otherwise by the one of
`transformers serve`, in this process. `guard` stands before both, and asks for the key.
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

from grpo_nb import data, models
from grpo_nb.evaluation.answers import weights_of
from grpo_nb.models.chat import find_model, fold_system
from grpo_nb.pipeline.notebooks import set_environment
from grpo_nb.pipeline.sweep import ending_with_us
from grpo_nb.runs import Run

if TYPE_CHECKING:
    from fastapi import Request, Response

PATHS = ("/v1/chat/completions", "/v1/models", "/health")
KEY = "GRPO_NB_API_KEY"  # `guard` reads it


def serve(run: Run, host: str, port: int, adapter: bool = False) -> int:
    """Serve a run's model under the run's name, and say how to ask it, until it is stopped.

    Whoever asks needs the key: `$GRPO_NB_API_KEY`, or a new one, which the shell line shows.

    Args:
        run: Whose model.
        host: To listen at.
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
        set_environment(run)
        os.environ[KEY] = os.environ.get(KEY) or secrets.token_urlsafe(24)
        said = f"Listening at http://{host}:{port}/v1, model {run.name}. Ask it:\n\n"
        template = config.model.chat_template_kwargs
        tokenizer = models.load_tokenizer(weights["model_path"], template)
        turns = fold_system(tokenizer, data.load(run, "eval")[0]["prompt"])
        asked = {"temperature": 0, "max_tokens": config.train.max_completion_length}
        said += curl(host, port, {"model": run.name, "messages": turns, **asked})
        if not vllm:
            return _by_transformers(listener, run.name, weights, tokenizer, said)
    print(f"vLLM loads the model, which takes a minute or more. {said}", flush=True)
    command = vllm_command(run.name, host, port, weights, config.model.max_seq_length)
    with subprocess.Popen(ending_with_us(command)) as server:
        return server.wait()


async def guard(request: "Request", proceed: Callable[..., Awaitable["Response"]]) -> "Response":
    """Answer only those who have the key, at `PATHS`; a middleware of FastAPI, for both servers.

    Other users of this machine, and any page in its browser, can send requests here: none of them
    has the key. The servers offer more than a chat, such as loading another model.
    """
    from fastapi.responses import JSONResponse

    given = request.headers.get("authorization", "").encode()
    if not secrets.compare_digest(given, f"Bearer {os.environ[KEY]}".encode()):
        status, why = 401, f"send the key: Authorization: Bearer ${KEY}"
    elif request.url.path not in PATHS:
        status, why = 404, f"only {', '.join(PATHS)} are served here"
    else:
        return await proceed(request)
    return JSONResponse({"error": {"message": why, "code": status}}, status)


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
    near = "127.0.0.1" if host == "0.0.0.0" else host
    words = ["curl", f"http://{near}:{port}/v1/chat/completions", "-d", json.dumps(body)]
    words += ["-H", "Content-Type: application/json"]
    return shlex.join([*words, "-H", f"Authorization: Bearer {os.environ[KEY]}"])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        why = f"port {port} is taken: choose another one with --port"
        raise RuntimeError(f"{why} ({host}: {error})") from None


def _by_transformers(
    listener: socket.socket, name: str, weights: dict[str, Any], tokenizer: Any, said: str
) -> int:
    import uvicorn
    from transformers.cli.serving import chat_completion, model_manager, server, utils

    model = models.load_checkpoint(**weights)
    model.generation_config.update(do_sample=True, top_k=0)  # temperature 0 is greedy all the same
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
