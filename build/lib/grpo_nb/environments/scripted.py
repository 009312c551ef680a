"""Play an environment without a model, to show what it rewards and reveals.

    episode = perform(environment, row, policies(environment, row, other)["random calls"])

A policy gets the same input as a model: the prompt, the tools' schemas and the results so far. Its
turn is text, which ends the episode, or a call, as in an author's `solve`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from grpo_nb.environments.contract import Environment, Played, Row
from grpo_nb.environments.play import Episode, script
from grpo_nb.rewards.prompts import Message

Turn = str | dict[str, Any] | list[dict[str, Any]]  # text, a call, or several calls
MOST_TURNS = 64  # limit of a scripted episode, even if the environment allows more
AGAIN = 3  # number of calls after the end


class PlayerView(NamedTuple):
    """Hold the information from which a policy chooses its next turn."""

    environment: Environment
    messages: Sequence[Message]
    turn: int
    seed: int


Policy = Callable[[PlayerView], Turn]


def perform(
    environment: Environment,
    row: Row,
    policy: Policy,
    seed: int = 0,
    instance: Played | None = None,
    beside: Row | None = None,
) -> Episode:
    """Play one episode with a policy and return it, with its reward.

    Args:
        environment: The environment to play in.
        row: The row that the episode starts with.
        policy: The policy that chooses the turns.
        seed: The seed of the policy's random choices.
        instance: An instance to play in; None creates one.
        beside: A row to play in another instance between the start and the first turn.
    """
    episode = Episode(environment, row, instance)
    if beside is not None:
        perform(environment, beside, WITHOUT_SKILL["random calls"], seed)
    episode.max_turns = min(environment.max_turns, MOST_TURNS)
    while not episode.ended:
        messages = [*episode.prompt, *episode.messages]
        turn = policy(PlayerView(environment, messages, episode.turns, seed))
        episode.add_turn(*script([turn]))
        episode.ended = "a call hung" if episode.played.hung else episode.ended
    if hasattr(environment.kind, "get_reward"):
        episode.reward = episode.played.get_reward()
    return episode


def policies(environment: Environment, row: Row, other: Row) -> dict[str, Policy]:
    """Return the policies by name; if the class has no `solve`, only those without skill.

    Args:
        environment: The environment to play in.
        row: The row to play.
        other: Another row, whose solution is wrong for this one.
    """
    solution, wrong = environment.solution(row), environment.solution(other)
    if solution is None or wrong is None:
        return dict(WITHOUT_SKILL)
    calls, others = ([t for t in turns if not isinstance(t, str)] for turns in (solution, wrong))
    scripts = {
        "oracle": solution,
        "calls after the end": [*calls, *calls[-1:] * AGAIN],  # text would end the episode
        "cut short": calls[:-1],
        "another row's solution": wrong,
        "another row's last call": [*calls[:-1], *others[-1:]],
    }
    return WITHOUT_SKILL | {name: partial(follow, turns) for name, turns in scripts.items()}


def follow(turns: Sequence[Turn], view: PlayerView) -> Turn:
    """Return the next turn; after the last, return "", which ends the episode."""
    return turns[view.turn] if view.turn < len(turns) else ""


def _draw(
    view: PlayerView, turn: int, texts: Any = "abcdefgh", numbers: Any = range(10), items: int = 2
) -> dict[str, Any]:
    """Return a random call that fits a tool's schema; it draws from `texts` and `numbers`."""
    rng = random.Random(f"{view.seed} {turn}")
    values = {"boolean": [False, True], "integer": numbers, "number": numbers, "object": [{}]}

    def value(schema: Mapping[str, Any]) -> Any:
        if schema.get("type") == "array":
            return [value(schema.get("items", {}))] * items
        return rng.choice(schema.get("enum") or values.get(str(schema.get("type")), texts))

    tool = rng.choice(view.environment.tools)["function"]
    properties = tool["parameters"]["properties"]
    return {"name": tool["name"], "arguments": {k: value(v) for k, v in properties.items()}}


def _malformed(view: PlayerView) -> Turn:
    """Return a malformed call; the fault (tool, parameter, type, arguments) changes each turn."""
    call = _draw(view, view.turn)
    valid = call["arguments"]
    faults = [
        {"name": "no_tool"},
        {"arguments": valid | {"no_parameter": 1}},
        {"arguments": {name: [{}] for name in valid or "x"}},
        {"arguments": "no object"},
    ]
    return call | faults[view.turn % len(faults)]


WITHOUT_SKILL: dict[str, Policy] = {
    "idle": lambda view: "",
    "random calls": lambda view: _draw(view, view.turn),
    "the first call again": lambda view: _draw(view, 0),
    "malformed calls": _malformed,
    "huge arguments": lambda view: _draw(view, view.turn, ["9" * 100_000], [10**18], 10_000),
}
