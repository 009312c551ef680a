"""Find faults in an environment by playing it without a model.

    check_environment(Guess, rows).refuse()

The author's `solve` has to win. Idling, random calls, `solve` cut short and another row's `solve`
have to lose. Equal calls have to give equal results, even in a reused instance and beside another
episode, and no call may hang. Each finding has evidence and a fix. A "stop" forbids training; a
"warning" is for the user to judge.
"""

import io
import random
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_nb.checks import Check, Checks
from grpo_nb.environments.contract import Environment, Played, Row
from grpo_nb.environments.play import Episode, script
from grpo_nb.files import read_yaml

EPISODES, MOST_TURNS = 16, 64  # episodes per player; the most turns of an episode
PATIENCE = 20.0  # no further row is played after this time [s]
TIE = 1e-6
LUCKY, WON = 0.5, 0.75  # limits for a warning and a stop: 0 is failure, 1 is the oracle
SOME = 0.1  # share of the rows on which `solve` may lose
FIXES = read_yaml(Path(__file__).with_name("check.yaml"))  # {finding: what to do}
RULES = {player: f"without skill: {player}" for player in ("idle", "random calls")}
RULES |= {"cut short": "won early", "another row's solution": "wrong answer wins"}
Turn = str | dict[str, Any] | list[dict[str, Any]]  # text, a call, or several calls
Plays = list[dict[str, Episode]]  # for each row: its episodes by player


def check_environment(environment: Environment | type, rows: Sequence[Row]) -> Checks:
    """Return the faults of an environment, "stop" first; a single "ok" if it is sound.

    Args:
        environment: The environment, or the author's class.
        rows: Rows to play. EPISODES rows are played, some repeatedly if there are fewer.

    Raises:
        ValueError: The class is not an environment.
    """
    if not isinstance(environment, Environment):
        environment = Environment(environment)
    if not rows:
        raise ValueError("rows is empty: give rows with the columns that `reset` takes")
    try:
        with redirect_stdout(io.StringIO()):
            plays, fault = _play_all(environment, list(islice(cycle(rows), EPISODES)))
    except Exception as error:  # an author's class may raise anything, and the error is the finding
        at = traceback.extract_tb(error.__traceback__)[-1]
        evidence = f"{type(error).__name__}: {error} (line {at.lineno} of {at.name})"
        return Checks([_finding("episode", f"{environment.title}: {evidence}")])
    # Rewards of calls that do not repeat are not comparable.
    faults = [fault] if fault else _rewards(environment, plays)
    sound = Check(environment.title, "ok", "its solution wins, all others lose, no call hangs")
    return Checks(sorted(faults, key=lambda each: each.state != "stop") or [sound])


def _finding(rule: str, evidence: str, stop: bool = True) -> Check:
    return Check(rule, "stop" if stop else "warning", evidence, FIXES[rule.partition(": ")[0]])


def perform(
    environment: Environment,
    row: Row,
    turns: Sequence[Turn],
    instance: Played | None = None,
    beside: Row | None = None,
) -> Episode:
    """Play one episode with a list of turns, and return the episode with its reward.

    Args:
        environment: The environment to play in.
        row: The row that the episode starts with.
        turns: The turns, as in an author's `solve`; an empty turn follows the last one.
        instance: An instance to play in; None creates one.
        beside: A row to play in another instance between the start and the first turn.
    """
    episode = Episode(environment, row, instance)
    if beside is not None:
        perform(environment, beside, players(environment, beside, row)["random calls"])
    for message in script([*turns, ""]):
        if not episode.ended:
            episode.add_turn(message)
            episode.ended = "a call hung" if episode.played.hung else episode.ended
    if hasattr(environment.kind, "get_reward"):
        episode.reward = episode.played.get_reward()
    return episode


def players(
    environment: Environment, row: Row, other: Row, seed: int = 0
) -> dict[str, Sequence[Turn]]:
    """Return the turns of each player; a player is a scripted policy.

    If the class has no `solve`, there are only the players without skill.

    Args:
        environment: The environment to play in.
        row: The row to play.
        other: Another row, whose solution is wrong for this one.
        seed: The seed of random calls.
    """
    turns = range(min(environment.max_turns, MOST_TURNS))
    calls = [_draw(environment, random.Random(f"{seed} {turn}")) for turn in turns]
    unskilled = {"idle": [], "random calls": calls}
    solution, wrong = environment.solution(row), environment.solution(other)
    if solution is None or wrong is None:
        return unskilled
    cut = [turn for turn in solution if not isinstance(turn, str)][:-1]
    wrong = [] if wrong == solution else wrong
    return unskilled | {"oracle": solution, "cut short": cut, "another row's solution": wrong}


def _draw(environment: Environment, rng: random.Random) -> dict[str, Any]:
    """Return a random call that fits a tool's schema."""
    numbers = range(10)
    values = {"boolean": [False, True], "integer": numbers, "number": numbers, "object": [{}]}

    def value(schema: Mapping[str, Any]) -> Any:
        if schema.get("type") == "array":
            return [value(schema.get("items", {}))] * 2
        return rng.choice(schema.get("enum") or values.get(str(schema.get("type")), "abcdefgh"))

    tool = rng.choice(environment.tools)["function"]
    properties = tool["parameters"]["properties"]
    return {"name": tool["name"], "arguments": {k: value(v) for k, v in properties.items()}}


def _play_all(environment: Environment, rows: Sequence[Row]) -> tuple[Plays, Check | None]:
    """Let each player play each row twice, until a call hangs or gives another result."""
    plays: Plays = []
    veteran, until = environment.factory(), time.monotonic() + PATIENCE
    for seed, row in enumerate(rows):
        other = rows[(seed + 1) % len(rows)]
        plays.append({})
        for name, turns in players(environment, row, other, seed).items():
            plays[-1][name] = episode = perform(environment, row, turns)
            if episode.ended == "a call hung":
                result = episode.messages[-1]["content"]
                return plays, _finding("hangs", f"{result} (player: {name})")
            again = perform(environment, row, turns, veteran, beside=other)
            for one, two in zip_longest(episode.trace, again.trace):
                if one != two:
                    evidence = f"the same calls gave {one!r:.80}, and then {two!r:.80}"
                    return plays, _finding("not repeatable", evidence)
        if time.monotonic() > until:
            break
    return plays, None


def _rewards(environment: Environment, plays: Plays) -> Iterator[Check]:
    """Check that `solve` wins, and that no other player comes close to it; yield the first fault.

    How close a player comes is measured from a failure's reward (0) to that of `solve` (1). A
    failure is an honest attempt, with calls, that earns less than `solve`.
    """
    if missing := [name for name in ("solve", "get_reward") if not hasattr(environment.kind, name)]:
        evidence = f"without {' and '.join(missing)}, rewards of wins and failures are unknown"
        yield _finding("not judged", evidence, stop=False)
    if "get_reward" in missing:
        return
    mean = {name: fmean(play[name].reward for play in plays) for name in plays[0]}
    solved, oracle, failure = "oracle" in mean, mean.get("oracle", 1.0), 0.0
    if solved:
        failure = fmean([reward for play in plays for reward in _failure(play)] or [0.0])
        lost = [p for p in plays if p["oracle"].reward <= p["idle"].reward + TIE]
        if oracle <= max(mean["idle"], failure) + TIE:
            yield _finding("oracle", _loss(plays, plays))
            return
    for name in [name for name in RULES if name in mean]:
        if name == "cut short" and len(lost) > SOME * len(plays):
            yield _finding("oracle", _loss(lost, plays))
            return
        share = (mean[name] - failure) / (oracle - failure)
        hollow = name == "idle" and solved and mean[name] > max(failure - TIE, TIE)
        if share > LUCKY or hollow:
            evidence = f"earns {mean[name]:.2f}, a failure {failure:.2f}, a win {oracle:.2f}"
            yield _finding(RULES[name], evidence, hollow or share > WON)
            return


def _loss(lost: Plays, plays: Plays) -> str:
    """Say on how many rows `solve` loses, and how."""
    episodes = [play["oracle"] for play in lost]
    if any(episode.ended == "turn limit" for episode in episodes):
        return f"solve takes more than {min(episodes[0].environment.max_turns, MOST_TURNS)} turns"
    texts = [turn["content"] for episode in episodes for turn in episode.messages]
    error = next((text for text in texts if text.startswith("{'error': ")), "no error")
    rows = f"{len(lost)} of {len(plays)} rows"
    return f"solve earns no more than others on {rows}; its calls gave {error}"


def _failure(play: Mapping[str, Episode]) -> list[float]:
    """Return [the highest reward of an honest attempt that fails], or [] if none fails."""
    attempts, win = [play["cut short"], play["another row's solution"]], play["oracle"].reward
    failures = [each.reward for each in attempts if each.turns and each.reward < win - TIE]
    return sorted(failures)[-1:]
