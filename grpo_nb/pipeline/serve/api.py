"""OpenAI's chat API over an `Engine`, and the guard that stands before it and before vLLM's server.

GET /v1/models, POST /v1/chat/completions (whole or streamed), GET /health. One request is
answered at a time; the others wait.
"""

import asyncio
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_nb.models import Engine, Sample
from grpo_nb.models.chat import count_tokens

RULES = "GRPO_NB_SERVE_RULES"  # in the environment of vLLM's server
# What a client may send only so: the engine draws from the whole distribution.
NEUTRAL = {"top_p": 1, "n": 1, "frequency_penalty": 0, "presence_penalty": 0}
NEUTRAL |= dict.fromkeys(("stop", "tools", "logit_bias", "logprobs", "response_format"))


class Refused(Exception):
    """An answer of this status that says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Rules(NamedTuple):
    """Whom the guard lets in.

    hosts: A request's Host has to be one of these; empty: any, where a key is asked for.
    key: Its bearer token; "" where none is asked for.
    max_bytes: Of its body.
    """

    hosts: list[str]
    key: str
    max_bytes: int


class Guard:
    """Refuses requests that do not mean this server, and bodies that are too large, before the app.

    A page on another site can send a request here from the browser of whoever works on this
    machine: its Origin, or after a changed DNS entry its Host, gives it away.

    Args:
        app: ASGI.
        rules: Default: from the environment, for vLLM builds it without arguments.
    """

    def __init__(self, app: Any, rules: Rules | None = None) -> None:
        self.app, self.rules = app, rules or Rules(**json.loads(os.environ[RULES]))

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check(
                {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            )
            body = await self._body(receive)
        except Refused as refused:
            return await error(refused)(scope, receive, send)
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> dict:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, again, send)

    def _check(self, headers: dict[str, str]) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.rules.hosts and host not in self.rules.hosts:
            raise Refused(421, f"Host {host!r} is not this server: ask {self.rules.hosts[0]}")
        if origin is not None and urlsplit(origin).netloc != host:
            raise Refused(403, f"pages of {origin} may not ask this server")
        given = headers.get("authorization", "").encode()
        if self.rules.key and not secrets.compare_digest(
            given, f"Bearer {self.rules.key}".encode()
        ):
            raise Refused(401, "send the key: Authorization: Bearer …")

    async def _body(self, receive: Callable) -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > self.rules.max_bytes:
                raise Refused(413, f"the request is larger than {self.rules.max_bytes} bytes")
        return body


class Asked(NamedTuple):
    """A request that can be answered: prompt, sampling, and whether the answer is streamed."""

    messages: list[dict[str, str]]
    sampling: dict[str, Any]
    prompt_tokens: int
    stream: bool


class Api:
    """The app.

    Args:
        engine: Answers.
        model: The one name that requests give.
        max_seq_length: Of prompt and completion together [tokens].
        max_completion_length: Where a request names none [tokens].
    """

    def __init__(
        self, engine: Engine, model: str, max_seq_length: int, max_completion_length: int
    ) -> None:
        self.engine, self.model = engine, model
        self.max_seq_length, self.max_completion_length = max_seq_length, max_completion_length
        self.stopping = threading.Event()
        self._one = anyio.CapacityLimiter(1)

    def app(self, rules: Rules) -> Guard:
        routes = [
            Route("/health", lambda _: Response()),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        handlers = {Refused: lambda _, refused: error(refused)}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), rules)

    async def models(self, _: Request) -> Response:
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "grpo_nb"}
        return JSONResponse({"object": "list", "data": [one]})

    async def complete(self, request: Request) -> Response:
        try:
            asked = self._read(await request.json())
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        about["model"] = self.model
        if asked.stream:
            return StreamingResponse(self._stream(asked, about), media_type="text/event-stream")
        sample = await self._answer(asked, lambda _: None)
        used = {"prompt_tokens": asked.prompt_tokens, "completion_tokens": sample.tokens}
        used["total_tokens"] = sum(used.values())
        message = {"role": "assistant", "content": sample.text}
        choice = {"index": 0, "message": message, "finish_reason": _reason(sample)}
        return JSONResponse(
            {**about, "object": "chat.completion", "choices": [choice], "usage": used}
        )

    def _read(self, body: Any) -> Asked:
        """The request, checked.

        Raises:
            Refused: It asks for another model, or for what cannot be done.
        """
        if not isinstance(body, dict):
            raise Refused(400, "give an object with model and messages")
        if body.get("model") != self.model:
            raise Refused(404, f"model {body.get('model')!r}: this server has {self.model!r} alone")
        other = [name for name, plain in NEUTRAL.items() if body.get(name) not in (None, plain)]
        if other:
            raise Refused(400, f"{other[0]} = {body[other[0]]!r} is not offered: leave it out")
        messages = [_message(one) for one in _of_type(body, "messages", list, [])]
        if not messages:
            raise Refused(400, "messages is empty: send one at least")
        try:
            [tokens] = count_tokens(self.engine.tokenizer, [messages])
        except ValueError as refusal:  # a special token among them, or not the template's order
            raise Refused(400, f"these messages cannot be asked: {refusal}") from None
        room = self.max_seq_length - tokens
        if room < 1:
            why = f"a prompt of {tokens} tokens: the model takes {self.max_seq_length}"
            raise Refused(413, f"{why} with its completion")
        given = body.get("max_completion_tokens", body.get("max_tokens"))
        limit = _of_type({"max_tokens": given}, "max_tokens", int, self.max_completion_length)
        temperature = float(_of_type(body, "temperature", (int, float), 1.0))
        if limit < 1 or not 0 <= temperature <= 10:
            raise Refused(400, "max_tokens is at least 1, and temperature from 0 to 10")
        seed = _of_type(body, "seed", int, secrets.randbits(31))
        sampling = {"max_completion_length": min(limit, room), "temperature": temperature}
        return Asked(messages, sampling | {"seed": seed % 2**31}, tokens, bool(body.get("stream")))

    async def _answer(self, asked: Asked, on_text: Callable[[str], None]) -> Sample:
        """In a thread, one at a time; ends early where the server does."""

        def tell(text: str) -> None:
            if self.stopping.is_set():
                raise Refused(503, "the server is ending")
            on_text(text)

        def run() -> Sample:
            [[sample]] = self.engine.generate([asked.messages], **asked.sampling, on_text=tell)
            return sample

        return await anyio.to_thread.run_sync(run, limiter=self._one)

    async def _stream(self, asked: Asked, about: dict[str, Any]) -> AsyncIterator[str]:
        """Server-sent events: each what the completion grew by, then why it ended."""
        loop, texts, gone = asyncio.get_running_loop(), asyncio.Queue(), threading.Event()

        def tell(text: str) -> None:
            if gone.is_set():
                raise Refused(499, "nobody reads along any more")
            loop.call_soon_threadsafe(texts.put_nowait, text)

        def event(delta: dict, reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {**about, "object": "chat.completion.chunk", "choices": [choice]}
            return f"data: {json.dumps(chunk)}\n\n"

        def over(done: asyncio.Task) -> None:
            if not done.cancelled():
                done.exception()  # seen, where nobody is left to be told
            texts.put_nowait(None)

        task = asyncio.create_task(self._answer(asked, tell))
        task.add_done_callback(over)
        sent = ""
        try:
            yield event({"role": "assistant", "content": ""})
            while (text := await texts.get()) is not None:
                if text.startswith(sent) and text != sent:
                    yield event({"content": text[len(sent) :]})
                    sent = text
            yield event({}, _reason(await task))
            yield "data: [DONE]\n\n"
        finally:
            gone.set()


def error(refused: Refused) -> JSONResponse:
    """In the form of OpenAI's."""
    about = {"message": str(refused), "type": "invalid_request_error", "code": refused.status}
    return JSONResponse({"error": about}, refused.status)


def _reason(sample: Sample) -> str:
    return "length" if sample.truncated else "stop"


def _of_type(body: dict, name: str, kind: Any, default: Any) -> Any:
    value = default if body.get(name) is None else body[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Refused(400, f"{name} = {value!r:.100} is of the wrong type")
    return value


def _message(given: Any) -> dict[str, str]:
    """Role and text; a content of parts has to be of text."""
    content = given.get("content") if isinstance(given, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    roles = ("system", "user", "assistant")
    if not isinstance(content, str) or given.get("role") not in roles:
        raise Refused(400, f"a message has a role of {', '.join(roles)} and content of text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Refused(400, "a message holds half a surrogate pair, which is no text") from None
    return {"role": given["role"], "content": content}
