"""Grade the completions of a prompt against each other, in one call to a judge."""

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any

from grpo_nb.rewards.judge import LLMJudge, question, quotation
from grpo_nb.rewards.prompts import Completion, completion_text
from grpo_nb.runs import runs_root
from grpo_nb.runs.files import append_line, read_lines, read_yaml

FRAMES = read_yaml(Path(__file__).with_name("group_judge.yaml"))
CHARACTERS_PER_TOKEN = 4  # roughly, in English
TOKENS_PER_GRADE = 20  # in the reply; the reason counts as ten grades


@dataclass(eq=False)
class GroupJudge(LLMJudge):
    """Grade all completions of a prompt against each other in one call; this reward is async.

    The judge sees the completions in shuffled order, labelled with letters, and equal ones once. It
    grades each from 0 to 10 by `rubric`. With `criteria`, it answers each criterion with yes or no
    instead, and the score is the weighted share of yes. If a reply lacks a letter or has a grade
    out of range, the request is repeated once. If that fails too, or the API keeps failing, the
    group scores None. Verdicts are cached in `file`, below the folder of runs. Each training
    process has the whole budget; a call that would exceed it ends training with a RuntimeError.
    """

    name: str = "group_judge"
    criteria: dict[str, float] = field(default_factory=dict)  # {"it cites the source": 2.0}
    seed: int = 0  # for the shuffled order
    reverse: bool = False  # whether to reverse the order, which must not change the grades
    cache: bool = True
    max_characters: int = 20_000  # of a completion; the judge does not see the rest
    max_calls: int = 0  # 0: no limit
    max_tokens: int = 0  # of all requests and replies; 0: no limit
    max_dollars: float = 0.0  # 0: no limit
    dollars_per_million_tokens: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criteria and min(self.criteria.values()) <= 0:
            raise ValueError(f"{self.name}: criteria must weigh more than 0, not {self.criteria}")
        if self.max_dollars and not self.dollars_per_million_tokens:
            raise ValueError(f"{self.name}: max_dollars needs dollars_per_million_tokens")
        self.spent = self._amounts(0, 0)

    def changed(self, **fields: Any) -> "GroupJudge":
        """Return a copy with these fields changed, which shares the judge's budget."""
        copy = replace(self, **fields)
        copy.spent = self.spent
        return copy

    def newcomer(self, **fields: Any) -> "GroupJudge":
        """Return a copy with these fields changed and no cache; it shares the judge's budget."""
        return self.changed(cache=False, **fields)

    @property
    def file(self) -> Path:
        """Return the path of the cached verdicts: one JSON line each, without API key or texts."""
        parts = [self.base_url, self.model, self.rubric, self.criteria, self.options]
        return runs_root() / ".judges" / f"{self.name}-{_sha256(parts)[:12]}.jsonl"

    def estimate(self, **columns: Any) -> dict[str, float]:
        """Estimate the requests, tokens and dollars of a call; cached verdicts cost nothing."""
        keys = self.keys(columns["prompts"], columns["completions"], columns)
        requests = [self._request(*part) for part in self._parts(keys)]
        tokens = [_tokens(each) for each in requests if _sha256(each) not in self.replies]
        return self._amounts(len(tokens), sum(tokens))

    def _amounts(self, calls: int, tokens: int) -> dict[str, float]:
        dollars = tokens * self.dollars_per_million_tokens / 1e6
        return {"calls": calls, "tokens": tokens, "dollars": dollars}

    def key(self, prompt: Completion, completion: Completion, expected: Any) -> tuple[str, str]:
        """Return the quoted question with its reference answer, and the completion's text."""
        answer = {} if expected is None else {"REFERENCE ANSWER": str(expected)}
        head = quotation({"QUESTION": question(prompt)} | answer)
        return head, completion_text(completion)[: self.max_characters]

    async def grades(self, client: Any, limit: asyncio.Semaphore, keys: list) -> dict[Any, Any]:
        """Return the score (or None) of each key, with one request per group."""
        parts, grades = self._parts(keys), {}
        verdicts = await asyncio.gather(*(self._judge_part(client, limit, *p) for p in parts))
        for (head, texts), verdict in zip(parts, verdicts, strict=True):
            for letter, text in zip(ascii_uppercase, texts, strict=False):
                grades[head, text] = self._score(verdict[letter]) if verdict else None
        return grades

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

    def _request(self, head: str, texts: list[str]) -> dict[str, Any]:
        letters = ascii_uppercase[: len(texts)]
        criteria = [f"criterion_{number}: {text}" for number, text in enumerate(self.criteria, 1)]
        frame = FRAMES["criteria" if criteria else "rubric"].format(
            rubric=self.rubric, criteria="\n".join(criteria), letters=letters
        )
        quotes = quotation({f"COMPLETION {i}": t for i, t in zip(letters, texts, strict=True)})
        system = {"role": "system", "content": frame}
        messages = [system, {"role": "user", "content": f"{head}\n\n{quotes}"}]
        return {"model": self.model, "messages": messages, "temperature": 0} | self.options

    async def _judge_part(
        self, client: Any, limit: asyncio.Semaphore, head: str, texts: list[str]
    ) -> dict[str, Any] | None:
        """Return {letter: grade} from the cache or the API, or None if there is no verdict."""
        request = self._request(head, texts)
        key, tokens = _sha256(request), _tokens(request)

        async def send() -> dict[str, Any]:
            self._spend(tokens)
            reply = await client.chat.completions.parse(
                response_format=_verdict_type(len(texts), len(self.criteria)), **request
            )
            if reply.usage:
                total = self.spent["tokens"] + reply.usage.total_tokens - tokens
                self.spent.update(self._amounts(self.spent["calls"], total))
            return reply.choices[0].message.parsed.model_dump()

        async with limit:
            if key not in self.replies and (verdict := await self.ask(send, attempts=2)):
                self.replies[key] = verdict
                if self.cache:
                    append_line(self.file, {"request": key, "verdict": verdict})
        return self.replies.get(key)

    @cached_property
    def replies(self) -> dict[str, dict[str, Any]]:
        """Return {SHA-256 of a request: verdict}, read from the file once."""
        records = read_lines(self.file) if self.cache else []
        return {record["request"]: record["verdict"] for record in records}

    def _score(self, grade: Any) -> float:
        """Return a tenth of a grade, or the share of the criteria that are met, by weight."""
        if not self.criteria:
            return grade / 10
        weights = list(self.criteria.values())
        return sum(weights[n] for n, met in enumerate(grade.values()) if met) / sum(weights)

    def _spend(self, tokens: int) -> None:
        """Count a call, or raise RuntimeError if it would exceed the budget."""
        amounts = self._amounts(self.spent["calls"] + 1, self.spent["tokens"] + tokens)
        for name, amount in amounts.items():
            if 0 < (most := getattr(self, f"max_{name}")) < amount:
                raise RuntimeError(
                    f"the judge {self.name} has spent its max_{name} = {most:g} on "
                    f"{self.spent['calls']} calls: raise it, or judge fewer completions"
                )
        self.spent.update(amounts)


@cache
def _verdict_type(completions: int, criteria: int) -> type[Any]:
    """Return the type of a reply: a reason, and a grade for each letter."""
    from pydantic import ConfigDict, Field, create_model

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    grade = Annotated[float, Field(ge=0, le=10)]
    if criteria:
        names = [f"criterion_{number}" for number in range(1, criteria + 1)]
        grade = create_model("Answers", __config__=strict, **dict.fromkeys(names, bool))
    fields = {"reason": str} | dict.fromkeys(ascii_uppercase[:completions], grade)
    return create_model("Verdict", __config__=strict, **fields)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _tokens(request: dict[str, Any]) -> int:
    """Estimate the tokens of a request and its reply."""
    text = "".join(message["content"] for message in request["messages"])
    grades = text.count("<<<COMPLETION ")
    return len(text) // CHARACTERS_PER_TOKEN + TOKENS_PER_GRADE * (10 + grades)
