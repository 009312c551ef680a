"""Grade completions with a judge: a chat model behind an OpenAI-compatible API."""

import asyncio
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar

from grpo_nb.files import append_line, read_lines, read_yaml, runs_root
from grpo_nb.rewards.prompts import Completion, completion_text

LONGEST_CHARACTERS = 20_000  # of a completion; the judge does not see the rest
FRAME = read_yaml(Path(__file__).with_suffix(".yaml"))["rubric"]  # what the judge is told


@dataclass(eq=False)
class LLMJudge:
    """Score a completion by a chat model's grade from 0 to 10, divided by 10; this reward is async.

    The request quotes the question, the completion, and the column `answer` if the dataset has it.
    If a reply has no grade, or a grade out of range, the request is repeated once. The openai
    client retries a request after 429, 5xx, a broken connection or a time-out. If the API keeps
    failing, or no reply has a verdict, the completion scores None and counts in the metric
    `<name>/failures`; a wrong key, model or address raises the client's error. If too many scores
    of a training step are None, a RuntimeError ends training; the steps before it are kept.
    Verdicts are cached in `file`, below the folder of runs. A pickle of the judge contains neither
    a connection nor the key.
    """

    model: str  # name of the judging model
    base_url: str = "https://api.openai.com/v1"
    name: str = "llm_judge"  # the reward's `__name__`, unique among the rewards of a run
    rubric: str = "is it a correct, complete and clear answer to the question?"
    api_key_env: str = "OPENAI_API_KEY"  # has the key, which is read at each call, never stored
    timeout_seconds: float = 30.0  # for one request
    retries: int = 4
    concurrency: int = 8  # requests at a time
    max_none_share: float = 0.25  # of a step's completions; training ends if more have no score
    options: dict[str, Any] = field(default_factory=dict)  # of requests: {"max_tokens": 200}
    cache: bool = True
    range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        self.__name__ = self.name
        self.problem = "the replies have no verdict"  # or the API's latest error

    async def __call__(
        self, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        """Return a score in [0, 1], or None, for each completion.

        Raises:
            openai.APIStatusError: The API refuses the key, model or address.
            RuntimeError: More than `max_none_share` of a training step's completions have no score.
        """
        answers = columns.get("answer") or [None] * len(completions)
        keys = [_key(*each) for each in zip(prompts, completions, answers, strict=True)]
        parts, grades, limit = self._parts(keys), {}, asyncio.Semaphore(self.concurrency)
        async with self.client() as client:
            verdicts = await asyncio.gather(*(self._verdict(client, limit, *p) for p in parts))
        for (head, texts), verdict in zip(parts, verdicts, strict=True):
            for letter, text in zip(ascii_uppercase, texts, strict=False):
                grades[head, text] = verdict[letter] / 10 if verdict else None
        scores = [grades[key] for key in keys]
        failures, state = scores.count(None), columns.get("trainer_state")
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/failures", float(failures))
        trains = getattr(state, "is_training", state is not None)
        if trains and failures > self.max_none_share * len(scores):
            raise RuntimeError(
                f"the judge {self.name} gave no score for {failures} of {len(scores)} completions "
                f"({self.problem}): make sure that {self.base_url} answers, or raise max_none_share"
            )
        return scores

    @property
    def file(self) -> Path:
        """Return the path of the cached verdicts: JSON lines without API keys or request texts."""
        parts = [self.base_url, self.model, self.rubric, self.options]
        return runs_root() / ".judges" / f"{self.name}-{_sha256(parts)[:12]}.jsonl"

    @cached_property
    def replies(self) -> dict[str, dict[str, Any]]:
        """Return {SHA-256 of a request: verdict}, which is read from the file only once."""
        records = read_lines(self.file) if self.cache else []
        return {record["request"]: record["verdict"] for record in records}

    def _parts(self, keys: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        """Return (question, completions) of each request: one request per distinct completion."""
        return [(head, [text]) for head, text in dict.fromkeys(keys)]

    async def _verdict(
        self, client: Any, limit: asyncio.Semaphore, head: str, texts: list[str]
    ) -> dict[str, Any] | None:
        """Return {letter: grade} from the cache or the API, or None if there is no verdict."""
        letters = ascii_uppercase[: len(texts)]
        quotes = quotation({f"COMPLETION {i}": t for i, t in zip(letters, texts, strict=True)})
        system = FRAME.format(rubric=self.rubric, letters=letters)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{head}\n\n{quotes}"},
        ]
        kind = _verdict_type(len(texts))
        form = {"name": "Verdict", "strict": True, "schema": kind.model_json_schema()}
        request = {"model": self.model, "messages": messages, "temperature": 0}
        request["response_format"] = {"type": "json_schema", "json_schema": form}
        request |= self.options
        key = _sha256(request)
        async with limit:
            if key not in self.replies and (verdict := await self._ask(client, request, kind)):
                self.replies[key] = verdict
                if self.cache:
                    append_line(self.file, {"request": key, "verdict": verdict})
        return self.replies.get(key)

    async def _ask(self, client: Any, request: dict, kind: type[Any]) -> dict | None:
        """Return the API's verdict; None if the API fails, or if two replies contain no verdict.

        Raises:
            openai.APIStatusError: The API refuses the key, the model or the address.
        """
        import openai

        refusals = openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError
        for _ in range(2):
            try:
                reply = await client.chat.completions.create(**request)
                text = reply.choices[0].message.content  # some servers put a fence around the JSON
                text = text[text.index("{") : text.rindex("}") + 1]
                return kind.model_validate_json(text).model_dump()
            except refusals:
                raise
            except openai.APIError as e:
                self.problem = " ".join(str(e).split())[:200]
                return None
            except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError):
                continue  # the reply has no verdict
        return None

    def client(self) -> Any:
        """Return a new client: each event loop needs its own, and a notebook has several loops."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=self.base_url,
            api_key=os.environ.get(self.api_key_env) or "none",  # a local server needs no key
            max_retries=self.retries,
            timeout=self.timeout_seconds,
        )


@dataclass(eq=False)
class GroupJudge(LLMJudge):
    """Grade all completions of a prompt against each other in one call; this reward is async.

    The judge sees the distinct completions in shuffled order, labeled with letters. If there is no
    verdict on a group, all its completions score None.
    """

    name: str = "group_judge"
    seed: int = 0  # for the shuffled order
    reverse: bool = False  # whether to reverse the order, which must not change the grades

    def _parts(self, keys: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        """Return (question, shuffled completions) of each request, with at most 26 completions."""
        parts = []
        for head in dict.fromkeys(head for head, _ in keys):
            texts = sorted({text for other, text in keys if other == head})
            random.Random(f"{self.seed} {head} {texts}").shuffle(texts)
            texts = texts[::-1] if self.reverse else texts
            count = math.ceil(len(texts) / len(ascii_uppercase))
            parts += [(head, texts[first::count]) for first in range(count)]
        return parts


def _key(prompt: Completion, completion: Completion, answer: Any) -> tuple[str, str]:
    """Return the quoted question with its reference answer, and the completion's text."""
    texts = {"QUESTION": question(prompt)}
    texts |= {} if answer is None else {"REFERENCE ANSWER": str(answer)}
    return quotation(texts), completion_text(completion)[:LONGEST_CHARACTERS]


def question(prompt: Completion) -> str:
    """Return the text of the user's last message in a prompt."""
    user = prompt if isinstance(prompt, str) else [m for m in prompt if m.get("role") == "user"]
    return completion_text(user or prompt)


def quotation(data: dict[str, str]) -> str:
    """Quote each text between marks that bear its name, so that no text can close its quotation."""
    quotes = []
    for name, text in data.items():
        harmless = re.sub(r"([<>])(?=\1\1)", r"\1 ", text.encode(errors="replace").decode())
        quotes.append(f"<<<{name}>>>\n{harmless}\n<<<END {name}>>>")
    return "\n\n".join(quotes)


@cache
def _verdict_type(completions: int) -> type[Any]:
    """Return the type of a reply, which has a reason and a grade for each letter."""
    from pydantic import ConfigDict, Field, create_model

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    grade = Annotated[float, Field(ge=0, le=10)]
    fields = {"reason": str} | dict.fromkeys(ascii_uppercase[:completions], grade)
    return create_model("Verdict", __config__=strict, **fields)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
