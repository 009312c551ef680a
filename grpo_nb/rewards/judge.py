"""Grade completions with a judge: a chat model behind an OpenAI-compatible API."""

import asyncio
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar

from grpo_nb.files import append_line, read_lines, read_yaml, runs_root
from grpo_nb.rewards.prompts import Completion, completion_text

FRAMES = read_yaml(Path(__file__).with_suffix(".yaml"))
CHARACTERS_PER_TOKEN = 4  # roughly, in English
TOKENS_PER_GRADE = 20  # length of a grade in the reply; the reason counts as ten grades


@dataclass(eq=False)
class LLMJudge:
    """Score a completion by a chat model's grade from 0 to 10, divided by 10; this reward is async.

    The request quotes the question, the completion, and the column `answer` if the dataset has it.
    With `criteria`, the judge answers each criterion with yes or no, and the score is the weighted
    share of yes. If a reply lacks a grade or has one out of range, the request is repeated once.
    The openai client retries a request after 429, 5xx, a broken connection or a time-out. If the
    API keeps failing, or no reply has a verdict, the completion scores None and counts in the
    metric `<name>/failures`; a wrong key, model or address raises ValueError. If too many scores of
    a training step are None, a RuntimeError ends training; the steps before it are kept. Verdicts
    are cached in `file`, below the folder of runs. Each training process has the whole budget; a
    call that would exceed the budget ends training with a RuntimeError. A pickle of the judge
    contains neither a connection nor the key.
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
    criteria: dict[str, float] = field(default_factory=dict)  # weights: {"it cites sources": 2.0}
    cache: bool = True
    max_characters: int = 20_000  # of a completion; the judge does not see the rest
    max_calls: int = 0  # 0: no limit
    max_tokens: int = 0  # of all requests and replies; 0: no limit
    range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        self.__name__ = self.name
        if self.criteria and min(self.criteria.values()) <= 0:
            raise ValueError(f"{self.name}: criteria must weigh more than 0, not {self.criteria}")
        self.spent = {"calls": 0, "tokens": 0}
        self.problem = "the replies have no verdict"  # or the API's latest error

    async def __call__(
        self, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        """Return a score in [0, 1], or None, for each completion.

        Raises:
            ValueError: The columns differ in length, or the API refuses the key, model or address.
            RuntimeError: More than `max_none_share` of a training step's completions have no score.
        """
        keys, limit = self.keys(prompts, completions, columns), asyncio.Semaphore(self.concurrency)
        async with self.client() as client:
            grades = await self.grades(client, limit, keys)
        scores = [grades.get(key) for key in keys]
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

    def changed(self, **fields: Any) -> "LLMJudge":
        """Return a copy with these fields changed; it shares the judge's budget.

        With `cache=False`, the copy starts without earlier verdicts.
        """
        copy = replace(self, **fields)
        copy.spent = self.spent
        return copy

    @property
    def file(self) -> Path:
        """Return the path of the cached verdicts: JSON lines without API keys or request texts."""
        parts = [self.base_url, self.model, self.rubric, self.criteria, self.options]
        return runs_root() / ".judges" / f"{self.name}-{_sha256(parts)[:12]}.jsonl"

    def keys(
        self, prompts: Sequence, completions: Sequence, columns: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """Return the key of each completion, on which its score depends.

        Raises:
            ValueError: The columns differ in length.
        """
        expected = columns.get("answer") or [None] * len(completions)
        if not len(prompts) == len(completions) == len(expected):
            raise ValueError(
                f"reward {self.__name__}: {len(prompts)} prompts, {len(completions)} completions "
                f"and {len(expected)} answers; give one of each for each completion"
            )
        return list(map(self.key, prompts, completions, expected))

    def key(self, prompt: Completion, completion: Completion, expected: Any) -> tuple[str, str]:
        """Return the quoted question with its reference answer, and the completion's text."""
        answer = {} if expected is None else {"REFERENCE ANSWER": str(expected)}
        head = quotation({"QUESTION": question(prompt)} | answer)
        return head, completion_text(completion)[: self.max_characters]

    async def grades(self, client: Any, limit: asyncio.Semaphore, keys: list) -> dict[Any, Any]:
        """Return the score (or None) of each key, from the cache or the API."""
        parts, grades = self._parts(keys), {}
        verdicts = await asyncio.gather(*(self._judge_part(client, limit, *p) for p in parts))
        for (head, texts), verdict in zip(parts, verdicts, strict=True):
            for letter, text in zip(ascii_uppercase, texts, strict=False):
                grades[head, text] = self._score(verdict[letter]) if verdict else None
        return grades

    def _parts(self, keys: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        """Return (question, completions) of each request: one request per distinct completion."""
        return [(head, [text]) for head, text in dict.fromkeys(keys)]

    def _request(self, head: str, texts: list[str]) -> dict[str, Any]:
        letters = ascii_uppercase[: len(texts)]
        criteria = [f"criterion_{number}: {text}" for number, text in enumerate(self.criteria, 1)]
        frame = FRAMES["criteria" if criteria else "rubric"].format(
            rubric=self.rubric, criteria="\n".join(criteria), letters=letters
        )
        quotes = quotation({f"COMPLETION {i}": t for i, t in zip(letters, texts, strict=True)})
        system = {"role": "system", "content": frame}
        messages = [system, {"role": "user", "content": f"{head}\n\n{quotes}"}]
        request = {"model": self.model, "messages": messages, "temperature": 0}
        request["response_format"] = _response_format(len(texts), len(self.criteria))
        return request | self.options

    async def _judge_part(
        self, client: Any, limit: asyncio.Semaphore, head: str, texts: list[str]
    ) -> dict[str, Any] | None:
        """Return {letter: grade} from the cache or the API, or None if there is no verdict."""
        request = self._request(head, texts)
        key, form = _sha256(request), _verdict_type(len(texts), len(self.criteria))
        async with limit:
            if key not in self.replies and (verdict := await self._ask(client, request, form)):
                self.replies[key] = verdict
                if self.cache:
                    append_line(self.file, {"request": key, "verdict": verdict})
        return self.replies.get(key)

    async def _ask(self, client: Any, request: dict, verdict_type: type[Any]) -> dict | None:
        """Return the API's verdict; None if the API fails, or if two replies contain no verdict.

        Raises:
            ValueError: The API refuses the key, the model, the address or the response format.
        """
        import openai

        refusals = openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError
        for _ in range(2):
            tokens = _tokens(request)
            self._spend(tokens)
            try:
                reply = await client.chat.completions.create(**request)
                if reply.usage:
                    self.spent["tokens"] += reply.usage.total_tokens - tokens
                text = reply.choices[0].message.content  # some servers put a fence around the JSON
                text = text[text.index("{") : text.rindex("}") + 1]
                return verdict_type.model_validate_json(text).model_dump()
            except refusals as e:
                raise ValueError(
                    f"the judge at {self.base_url} answered {e.status_code} for the model "
                    f"{self.model!r}: check the address, the model's name, and the key in the "
                    f"environment variable {self.api_key_env}"
                ) from None
            except openai.APIError as e:
                self.problem = " ".join(str(e).split())[:200]
                if getattr(e, "status_code", 0) in (400, 422) and "response_format" in str(e):
                    raise ValueError(
                        f"the judge at {self.base_url} answers: {self.problem}. Ask for plain text "
                        f"by {self.name}'s options={{'response_format': {{'type': 'text'}}}}"
                    ) from None
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

    @cached_property
    def replies(self) -> dict[str, dict[str, Any]]:
        """Return {SHA-256 of a request: verdict}, which is read from the file only once."""
        records = read_lines(self.file) if self.cache else []
        return {record["request"]: record["verdict"] for record in records}

    def _score(self, grade: Any) -> float:
        """Return a grade divided by 10, or the weighted share of the criteria that are met."""
        if not self.criteria:
            return grade / 10
        weights = list(self.criteria.values())
        return sum(weights[n] for n, met in enumerate(grade.values()) if met) / sum(weights)

    def _spend(self, tokens: int) -> None:
        """Count a call, or raise RuntimeError if it would exceed the budget."""
        amounts = {"calls": self.spent["calls"] + 1, "tokens": self.spent["tokens"] + tokens}
        for name, amount in amounts.items():
            if 0 < (most := getattr(self, f"max_{name}")) < amount:
                raise RuntimeError(
                    f"the judge {self.name} has spent its max_{name} = {most:g} on "
                    f"{self.spent['calls']} calls: raise that limit, or judge fewer completions"
                )
        self.spent.update(amounts)


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
def _verdict_type(completions: int, criteria: int) -> type[Any]:
    """Return the type of a reply, which has a reason and a grade for each letter."""
    from pydantic import ConfigDict, Field, create_model

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    grade = Annotated[float, Field(ge=0, le=10)]
    if criteria:
        names = [f"criterion_{number}" for number in range(1, criteria + 1)]
        grade = create_model("Answers", __config__=strict, **dict.fromkeys(names, bool))
    fields = {"reason": str} | dict.fromkeys(ascii_uppercase[:completions], grade)
    return create_model("Verdict", __config__=strict, **fields)


@cache
def _response_format(completions: int, criteria: int) -> dict[str, Any]:
    """Return the part of a request that asks for a reply of the type `_verdict_type`."""
    schema = _verdict_type(completions, criteria).model_json_schema()
    form = {"name": "Verdict", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": form}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _tokens(request: dict[str, Any]) -> int:
    """Estimate the tokens of a request and its reply."""
    text = "".join(message["content"] for message in request["messages"])
    grades = text.count("<<<COMPLETION ")
    return len(text) // CHARACTERS_PER_TOKEN + TOKENS_PER_GRADE * (10 + grades)
