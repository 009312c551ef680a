"""Scripted policies: players without a model, which show what an environment rewards and reveals.

    episode = perform(environment, row, policies(environment, row, other)["random calls"])

A policy sees what a model would see: the prompt, the schemas of the tools and the results so far.
Its turn is a text, which ends the episode, or a call, as in an author's `solve`.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from grpo_nb.environments.contract import Environment, Played
from grpo_nb.environments.play import Episode, script
from grpo_nb.rewards.prompts import Message, completion_text

Row = Mapping[str, Any]
Turn = str | dict[str, Any] | list[dict[str, Any]]  # a text, a call, or several
MOST_TURNS = 64  # limit of a scripted episode, even if the environment allows more
AGAIN = 3  # number of calls after the end
STEPS = 8  # number of places at which the solution is stopped, at most
BOUNDS = {"0": 0, "-1": -1, "empty": "", "very large": 10**18}


class Seen(NamedTuple):
    """What a policy sees when it chooses its next turn."""

    environment: Environment
    messages: Sequence[Message]
    turn: int
    seed: int


Policy = Callable[[Seen], Turn]


def perform(
    environment: Environment,
    row: Row,
    policy: Policy,
    seed: int = 0,
    used: Played | None = None,
    beside: Row | None = None,
) -> Episode:
    """Play one episode with a policy and return it, with its reward.

    Args:
        environment: The environment to play in.
        row: The row that the episode starts with.
        policy: The policy that chooses the turns.
        seed: The seed of the policy's random choices.
        used: An instance to play in; None creates one.
        beside: A row that another instance plays between the start and the first turn.
    """
    episode = Episode(environment, row, used)
    if beside is not None:
        perform(environment, beside, WITHOUT_SKILL["random calls"], seed)
    episode.max_turns = min(environment.max_turns, MOST_TURNS)
    while not episode.ended:
        seen = Seen(environment, [*episode.prompt, *episode.messages], episode.turns, seed)
        episode.add_turn(*script([policy(seen)]))
        episode.ended = "a call hung" if episode.played.hung else episode.ended
    if hasattr(environment.kind, "get_reward"):
        episode.reward = episode.played.get_reward()
    return episode


def policies(environment: Environment, row: Row, other: Row) -> dict[str, Policy]:
    """Return the policies by name; without a `solve`, only those without skill.

    Args:
        environment: The environment to play in.
        row: The row to play.
        other: Another row, whose solution is wrong for this one.
    """
    own, others = environment.solution(row), environment.solution(other)
    if own is None or others is None:
        return dict(WITHOUT_SKILL)
    acts, other_acts = ([t for t in turns if not isinstance(t, str)] for turns in (own, others))
    turns = {
        "oracle": own,
        "calls after the end": [*acts, *acts[-1:] * AGAIN],  # a text would end the episode
        "cut short": acts[:-1],
        "another row's solution": others,
        "another row's last call": [*acts[:-1], *other_acts[-1:]],
    }
    for count in range(1, len(acts) - 1, max(1, len(acts) // STEPS)):
        turns[f"stop after {count}"] = acts[:count]
    ends = {f"last call: {name}": partial(_bounded, acts, to) for name, to in BOUNDS.items()}
    return WITHOUT_SKILL | {k: partial(follow, v) for k, v in turns.items()} | ends


def follow(turns: Sequence[Turn], seen: Seen) -> Turn:
    """Play the given turns, then end the episode with an empty text."""
    return turns[seen.turn] if seen.turn < len(turns) else ""


def _bounded(turns: Sequence[Turn], bound: int | str, seen: Seen) -> Turn:
    """Play the given turns, the last one with arguments at the bounds of their types."""
    turn = follow(turns, seen)
    if seen.turn != len(turns) - 1 or not isinstance(turn, dict):
        return turn

    def bounded(value: Any) -> Any:
        if isinstance(value, str):
            return str(bound)
        if isinstance(value, list | dict):
            return type(value)() if bound == "" else value
        return value if bound == "" or isinstance(value, bool) else bound

    return turn | {"arguments": {k: bounded(v) for k, v in turn["arguments"].items()}}


def _draw(
    seen: Seen, turn: int, texts: Any = "abcdefgh", numbers: Any = range(10), items: int = 2
) -> dict[str, Any]:
    """Return a random call that fits a tool's schema, with values drawn from the given ones."""
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
    """Cycle through an unknown tool, an extra parameter, wrong types and a non-object."""
    call = _draw(seen, seen.turn)
    valid = call["arguments"]
    wrong = [
        call | {"name": "no_tool"},
        call | {"arguments": valid | {"no_parameter": 1}},
        call | {"arguments": {name: [{}] for name in valid or "x"}},
        call | {"arguments": "no object"},
    ]
    return wrong[seen.turn % len(wrong)]


def _reader(seen: Seen) -> Turn:
    """Call with words and numbers copied from the latest message that contains any."""
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
