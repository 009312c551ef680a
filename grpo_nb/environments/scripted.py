"""Scripted policies: players without a model, who show what an environment pays for and tells.

    episode = perform(environment, row, policies(environment, row, other)["random calls"])

A policy is asked for its turn as a model is: it sees the prompt, the schemas of the tools and the
results so far. A turn is a text, which ends the episode, or a call, as in an author's `solve`.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from grpo_nb.environments.contract import Call, Environment, Played
from grpo_nb.environments.play import Episode, script
from grpo_nb.rewards.prompts import Message, completion_text

Row = Mapping[str, Any]
Turn = str | dict[str, Any]
MOST_TURNS = 64  # of a scripted episode, whatever the environment allows
AGAIN = 3  # calls after the end
SOLVED = ("oracle", "calls after the end", "cut short", "another row's solution")


class Seen(NamedTuple):
    """What a policy knows when it is asked for a turn."""

    environment: Environment
    messages: Sequence[Message]
    turn: int
    seed: int


Policy = Callable[[Seen], Turn]


class Scripted(NamedTuple):
    """An episode that a policy played.

    prompt: What it began with, the words of `reset` included.
    messages: Its turns and the results.
    calls: As the environment's guard saw them.
    reward: From 0 to 1; NaN where the class has no `get_reward`.
    ended: "answered", "turn limit" or "a call hung".
    done: Whether the environment said that it is finished.
    """

    prompt: list[Message]
    messages: list[Message]
    calls: list[Call]
    reward: float
    ended: str
    done: bool

    @property
    def trace(self) -> list[Any]:
        """What has to be the same when the same is played again."""
        return [turn["content"] for turn in [*self.prompt, *self.messages]] + [str(self.reward)]


def perform(
    environment: Environment, row: Row, policy: Policy, seed: int = 0, used: Played | None = None
) -> Scripted:
    """An episode of a policy.

    Args:
        environment: It plays in.
        row: It begins with.
        policy: Gives the turns.
        seed: Of the policy.
        used: An instance to play in; None: a new one.
    """
    episode = Episode(environment, row, used)
    episode.max_turns = min(environment.max_turns, MOST_TURNS)
    played = episode.played
    while not episode.ended:
        seen = Seen(environment, [*episode.prompt, *episode.messages], episode.turns, seed)
        episode.say(*script([policy(seen)]))
        episode.ended = "a call hung" if played.hung else episode.ended
    reward = played.get_reward() if hasattr(environment.kind, "get_reward") else float("nan")
    done = bool(getattr(played, "done", False))
    return Scripted(episode.prompt, episode.messages, played.calls, reward, episode.ended, done)


def policies(environment: Environment, row: Row, other: Row) -> dict[str, Policy]:
    """Every policy by its name; those in SOLVED only where the class has a `solve`.

    Args:
        environment: They will play in.
        row: They will play.
        other: Another row, whose solution is wrong here.
    """
    own, others = environment.solution(row), environment.solution(other)
    if own is None or others is None:
        return dict(WITHOUT_SKILL)
    acts = [turn for turn in own if not isinstance(turn, str)]  # a text ends the episode
    turns = [own, [*acts, *acts[-1:] * AGAIN], acts[:-1], others]
    return WITHOUT_SKILL | {k: partial(follow, v) for k, v in zip(SOLVED, turns, strict=True)}


def follow(turns: Sequence[Turn], seen: Seen) -> Turn:
    """The policy that says what it was told to, then nothing."""
    return turns[seen.turn] if seen.turn < len(turns) else ""


def _draw(
    seen: Seen, turn: int, texts: Any = "abcdefgh", numbers: Any = range(10), items: int = 2
) -> dict[str, Any]:
    """A call that fits a tool's schema, its values drawn from those given."""
    rng = random.Random(f"{seen.seed} {turn}")
    values = {"boolean": [False, True], "integer": numbers, "number": numbers, "object": [{}]}

    def value(schema: Mapping[str, Any]) -> Any:
        if schema.get("type") == "array":
            return [value(schema.get("items", {}))] * items
        return rng.choice(schema.get("enum") or values.get(str(schema.get("type")), texts))

    tool = rng.choice(seen.environment.tools)["function"]
    properties = tool["parameters"]["properties"]
    return {"name": tool["name"], "arguments": {k: value(v) for k, v in properties.items()}}


def _malformed(seen: Seen) -> Turn:
    """A tool that is not there, a parameter too many, wrong types, no object, in turn."""
    call = _draw(seen, seen.turn)
    given = call["arguments"]
    wrong = [
        call | {"name": "no_tool"},
        call | {"arguments": given | {"no_parameter": 1}},
        call | {"arguments": {name: [{}] for name in given or "x"}},
        call | {"arguments": "no object"},
    ]
    return wrong[seen.turn % len(wrong)]


def _reader(seen: Seen) -> Turn:
    """A call with what stands in the newest turn that holds any words, or numbers."""
    texts = [completion_text([turn]) for turn in reversed(seen.messages)]
    words = next(filter(None, (re.findall(r"\w+", text) for text in texts)), ["a"])
    numbers = next(filter(None, (re.findall(r"-?\d{1,15}", text) for text in texts)), [0])
    return _draw(seen, seen.turn, words, list(map(int, numbers)))


WITHOUT_SKILL: dict[str, Policy] = {
    "idle": lambda seen: "",
    "random calls": lambda seen: _draw(seen, seen.turn),
    "the first call again": lambda seen: _draw(seen, 0),
    "malformed calls": _malformed,
    "huge arguments": lambda seen: _draw(seen, seen.turn, ["9" * 100_000], [10**18], 10_000),
    "what was read": _reader,
}
