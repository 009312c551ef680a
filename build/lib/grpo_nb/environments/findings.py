"""Find faults in an environment by letting scripted policies play it.

    runs.refuse(findings(environment, rows, tokenizer, max_completion_length=256))

Each finding has evidence and a fix. A "stop" forbids training; the user judges a "warning". The
oracle plays the author's `solve`. Policies without skill are compared with an honest failure. This
is the better of two attempts, `solve` cut short and another row's `solve`. An attempt that earns as
much as the oracle is left out.
"""

import inspect
import io
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from grpo_nb.environments.contract import Environment, Row
from grpo_nb.environments.play import Episode
from grpo_nb.environments.scripted import MOST_TURNS, WITHOUT_SKILL, perform, policies
from grpo_nb.models import template, tool_calls
from grpo_nb.runs import Check
from grpo_nb.runs.files import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODES, GROUP = 16, 8  # episodes per policy; episodes of one row that must start alike
PATIENCE = 20.0  # no further row is played after this time [s]
TIE = 1e-6
LUCKY, WON = 0.5, 0.75  # limits for a warning and a stop: 0 is failure, 1 is the oracle
LEAK = 0.5  # limit of (share of rows that show their own answer) - (share that show another's)
SOME = 0.1  # share of the rows above which a warning becomes a stop
FIXES = read_yaml(Path(__file__).with_name("findings.yaml"))  # {finding: what to do}
ATTEMPTS = {  # policies that should not win
    "won early": ["cut short"],
    "wrong answer wins": ["another row's solution", "another row's last call"],
}
Plays = list[dict[str, Episode]]  # for each row: its episodes by policy


def findings(
    environment: Environment,
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    max_completion_length: int = 256,
) -> list[Check]:
    """Return the faults of an environment, "stop" first; [] if the environment is sound.

    Args:
        environment: The environment under test, played by scripted policies.
        rows: Rows to play. EPISODES rows are played, some repeatedly if there are fewer.
        tokenizer: The tokenizer of the model that will play; None skips the tests of its template.
        max_completion_length: The limit of an episode, including results [tokens].
    """
    methods = inspect.getmembers(environment.kind, inspect.iscoroutinefunction)
    if coroutines := ", ".join(name for name, _ in methods if name[0] != "_"):
        return [_finding("async", f"{environment.title}: {coroutines} would return a coroutine")]
    rows = list(islice(cycle(rows), EPISODES))
    try:
        with redirect_stdout(io.StringIO()) as output:
            plays, faults = _play_all(environment, rows)
    except Exception as error:  # an author's class may raise anything, and the error is the finding
        at = traceback.extract_tb(error.__traceback__)[-1]
        evidence = f"{type(error).__name__}: {error} (line {at.lineno} of {at.name})"
        return [_finding("episode", f"{environment.title}: {evidence}")]
    if not faults:  # otherwise rewards are not comparable
        faults = [*_rewards(environment, plays), *_leaks(rows, plays)]
        if all(fault.state != "stop" for fault in faults):  # solve matters only if skill is needed
            faults += _solution([play for play in plays if "oracle" in play])
        if tokenizer:
            faults += _tokens(environment, plays, tokenizer, max_completion_length)
    if text := output.getvalue().strip():
        faults.append(_finding("prints", f"{text!r:.80}", stop=False))
    return sorted(faults, key=lambda fault: fault.state != "stop")


def _finding(rule: str, evidence: str, stop: bool = True) -> Check:
    return Check(rule, "stop" if stop else "warning", evidence, FIXES[rule.partition(": ")[0]])


def _play_all(environment: Environment, rows: Sequence[Row]) -> tuple[Plays, list[Check]]:
    """Play every policy on each row, in a new and in a used instance, up to the first fault."""
    plays, instance, until = [], environment.factory(), time.monotonic() + PATIENCE
    for seed, row in enumerate(rows):
        plays.append({})
        other = rows[(seed + 1) % len(rows)]
        players = policies(environment, row, other)
        for name, policy in players.items():
            play = partial(perform, environment, row, policy, seed)
            plays[-1][name] = episode = play()
            if episode.ended == "a call hung":
                return plays, [_finding("hangs", f"{episode.calls[-1].error} (policy: {name})")]
            patient = time.monotonic() < until
            if patient and (difference := _difference(episode, play(instance))):
                return plays, [_why(play, difference)]
        name = "oracle" if "oracle" in players else "random calls"
        beside = perform(environment, row, players[name], seed, beside=other)
        if patient and (difference := _difference(plays[-1][name], beside)):
            return plays, [_finding("hidden state", f"beside another episode: {difference}")]
        if not patient:
            break
    return plays, []


def _why(play: Callable[..., Episode], difference: str) -> Check:
    """Explain why equal calls gave different results: state left in the instance, or chance."""
    first, *others = [play() for _ in range(GROUP)]
    among_new = next(filter(None, (_difference(first, other) for other in others)), "")
    if not among_new:
        return _finding("state leaks", f"in a new and in a used instance: {difference}")
    return _finding("not deterministic", f"the same calls in episodes of one row: {among_new}")


def _difference(episode: Episode, other: Episode) -> str:
    """Return the first difference between two episodes; "" if there is none."""
    pairs = zip_longest(episode.trace, other.trace)
    return next((f"{a!r:.80} and {b!r:.80}" for a, b in pairs if a != b), "")


def _rewards(environment: Environment, plays: Plays) -> Iterator[Check]:
    """Check that winning earns the most, and that play without skill does not come close to it."""
    names = [*WITHOUT_SKILL, *(["oracle", "calls after the end"] if "oracle" in plays[0] else [])]
    mean = {name: fmean(play[name].reward for play in plays) for name in names}
    solved, oracle = "oracle" in mean, mean.get("oracle", 1.0)
    episodes = [episode for play in plays for episode in play.values()]
    has_end = any(getattr(episode.played, "done", False) for episode in episodes)
    if environment.max_turns > MOST_TURNS and not has_end:
        yield _finding("turns", f"max_turns is {environment.max_turns}, and done is never set")
    if missing := [name for name in ("solve", "get_reward") if not hasattr(environment.kind, name)]:
        evidence = f"without {' and '.join(missing)}, rewards of wins and failures are unknown"
        yield _finding("not judged", evidence, stop=False)
    if solved and any(play["oracle"].ended == "turn limit" for play in plays):
        limit = min(environment.max_turns, MOST_TURNS)
        yield _finding("turns", f"solve takes more than {limit} turns")
        return
    failure = fmean([reward for play in plays if solved for reward in _failure(play)] or [0.0])
    if solved and oracle <= max(mean["idle"], failure) + TIE:
        texts = [turn["content"] for play in plays for turn in play["oracle"].messages]
        error = next((text for text in texts if text.startswith("{'error': ")), "no error")
        others = f"idling {mean['idle']:.2f}, an honest failure {failure:.2f}"
        yield _finding("oracle", f"solve earns {oracle:.2f}, {others}; its calls gave {error}")
        return
    for name in WITHOUT_SKILL:
        share = (mean[name] - failure) / (oracle - failure)
        hollow = solved and name in ("idle", "malformed calls")
        if share > LUCKY or (hollow and share > (-TIE if failure > TIE else TIE)):
            evidence = f"earns {mean[name]:.2f}, a failure {failure:.2f}, a win {oracle:.2f}"
            yield _finding(f"without skill: {name}", evidence, hollow or share > WON)
    if solved and (after := mean["calls after the end"]) > oracle + TIE:
        yield _finding("calls after the end", f"the reward rises from {oracle:.2f} to {after:.2f}")


def _solution(plays: Plays) -> Iterator[Check]:
    """Check that `solve` wins, that it needs all of its calls, and that no other answer wins."""
    rewards = [(play["oracle"].reward, play["idle"].reward + TIE) for play in plays]
    best = max((win for win, _ in rewards), default=0.0) - TIE
    wins = [play for play, (win, idle) in zip(plays, rewards, strict=True) if win > idle]
    if losses := sum(win <= idle and win < best for win, idle in rewards):
        evidence = f"solve earns no more than idling on {losses} of {len(plays)} rows"
        yield _finding("solve fails", evidence, losses > LUCKY * len(plays))
    for rule, names in ATTEMPTS.items():
        share = sum(any(_wins(play, name) for name in names) for play in wins) / max(1, len(wins))
        if share > LUCKY:
            evidence = f"{' or '.join(names)} earns as much as solve on {share:.0%} of the rows"
            yield _finding(rule, evidence, share > WON)
            return


def _wins(play: Mapping[str, Episode], name: str) -> bool:
    """Return whether an attempt earns as much as `solve` does, with different calls."""
    calls, solution = ([call.arguments for call in play[n].calls] for n in (name, "oracle"))
    return calls != solution and play[name].reward >= play["oracle"].reward - TIE


def _failure(play: dict[str, Episode]) -> list[float]:
    """Return a list of the highest reward of an honest attempt that fails; [] if none fails."""
    attempts = [play[name] for name in ("cut short", "another row's solution")]
    win = play["oracle"].reward
    failures = [each.reward for each in attempts if each.calls and each.reward < win - TIE]
    return sorted(failures)[-1:]


def _leaks(rows: Sequence[Row], plays: Plays) -> Iterator[Check]:
    """Check whether play without skill reveals a row's own answer more often than another row's."""
    if "oracle" not in plays[0]:
        return
    answers = list(map(_answer, plays))
    texts = [_texts(*triple) for triple in zip(rows, plays, answers, strict=False)]
    alike = np.array([[answer == other for other in answers] for answer in answers])
    matches = np.array([[_holds(text, answer) for answer in answers] for text in texts])
    share, others = matches.diagonal().mean(), 1 if alike.all() else matches[~alike].mean()
    if share > LEAK + others:
        evidence = f"reset or a result shows the answer on {share:.0%} of the rows, first"
        yield _finding("answer leaks", f"{evidence} {', '.join(answers[0])}")


def _answer(play: dict[str, Episode]) -> list[str]:
    """Return the arguments of the call that wins, as strings."""
    calls = [call.arguments for call in play["oracle"].calls if call.arguments]
    return [str(value) for value in calls[-1].values()] if calls else []


def _texts(row: Row, play: dict[str, Episode], answer: list[str]) -> str:
    """Return the text that `reset` adds, with the results of calls by policies without skill."""
    calls = [call for name in WITHOUT_SKILL for call in play[name].calls]
    # Calls that name the answer are left out: their results may confirm it.
    calls = [call for call in calls if not _holds(str(call.arguments)[:1000], answer)]
    text = play["idle"].prompt[-1]["content"].removeprefix(row["prompt"][-1]["content"])
    return " ".join([text, *(f"{call.result[:1000]} {call.error[:1000]}" for call in calls)])


def _holds(text: str, answer: list[str]) -> bool:
    words = [rf"(?<!\w){re.escape(value)}(?!\w)" for value in answer]
    return bool(words) and all(re.search(word, text) for word in words)


def _tokens(
    environment: Environment, plays: Plays, tokenizer: "PreTrainedTokenizerBase", cap: int
) -> Iterator[Check]:
    """Check how the chat template renders calls and results, and how long episodes are."""
    solved, tools = "oracle" in plays[0], environment.tools
    episodes = [play["oracle" if solved else "random calls"] for play in plays]
    prompts, call = [episode.prompt for episode in episodes], plays[0]["random calls"].messages[0]
    try:
        tokenizer = tool_calls.with_tools(tokenizer)
        prompt_tokens = template.count_tokens(tokenizer, prompts, tools)
        chats = [
            [*template.fold_system(tokenizer, each.prompt), *each.messages[: None if solved else 2]]
            for each in episodes
        ]
        whole = tokenizer.apply_chat_template(chats, tools=tools, return_dict=False)
        fault = tool_calls.tool_fault(tokenizer, prompts[0], call, tools)
    except Exception as error:  # a template may raise anything
        fault = f"{type(error).__name__}: {error}"
    if fault:
        yield _finding("template", fault)
        return
    episode_tokens = np.array(list(map(len, whole))) - prompt_tokens
    if (episode_tokens > cap).any():
        what = "the solution" if solved else "a call with its result"
        evidence = f"{what} takes {episode_tokens.max()} tokens; max_completion_length is {cap}"
        yield _finding("room", evidence, bool((episode_tokens > cap).mean() > SOME))
