"""Findings: faults of an environment that show when scripted policies play it.

    runs.refuse(findings(environment, rows, tokenizer, max_completion_length=256))

Each has its evidence and its fix. A "stop" forbids training; a "warning" is for the user to
judge. Policies without skill are compared with an honest failure: the author's `solve` cut short,
or that of another row, whichever earns more while earning less than the oracle.
"""

import ast
import inspect
import io
import os
import re
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, partial
from itertools import chain, cycle, islice, product, zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from grpo_nb.environments.contract import FINISHED, Environment
from grpo_nb.environments.play import Episode
from grpo_nb.environments.scripted import MOST_TURNS, WITHOUT_SKILL, perform, policies
from grpo_nb.models import template, tool_calls
from grpo_nb.runs import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODES, GROUP = 16, 8  # episodes per policy; episodes of one row, to see if they start alike
PATIENCE = 20.0  # [seconds], after which no further row is played
TIE = 1e-6
LUCKY, WON = 0.5, 0.75  # share of the way from failure to oracle: a warning, a stop
LEAK = 0.5  # share of rows that show their own answer, minus that of other rows' answers
SLOW = 0.3  # [seconds] per call
SCHEMA, FEW = 0.75, 512  # limit of the tools' share of all tokens; number that is always allowed
SOME = 0.1  # share of the rows above which a warning becomes a stop
FIXES = {
    "async": "write `def`, and call asyncio.run inside",
    "episode": "correct it: training would stop here",
    "not judged": "add get_reward(self), and a classmethod solve(cls, **row): the turns that win",
    "oracle": "correct get_reward or solve: winning must earn the most",
    "solve fails": "correct solve for these rows, or get_reward",
    "wrong answer wins": "compare with the row's answer in get_reward",
    "bound wins": "compare with the row's answer, also at the bounds of a type",
    "won early": "pay for the goal alone, or leave out the calls of solve that it does not need",
    "reward asked twice": "compute the reward from what the tools stored, and change nothing",
    "without skill": "pay for the goal alone, and for form only after a successful call",
    "calls after the end": "set self.done once the episode is over",
    "turns": "set max_turns, at least as many as solve takes, or self.done at the end",
    "starts apart": "draw with `random` or `numpy.random`: both are seeded from the row",
    "not deterministic": "draw with `random` or `numpy.random`, and keep no state in the class",
    "state leaks": "set every attribute in reset: training reuses instances",
    "answer leaks": "remove it; if copying it is the task, put it into the question",
    "hidden state": "keep state in attributes: training plays many instances side by side",
    "left behind": "end threads and processes in the call that starts them",
    "no text": "return what the model should read, as a text",
    "errors swallowed": "let it raise: the model reads the message, and the error is counted",
    "hangs": "give the tool its own time limit, or raise tool_seconds",
    "slow": "make it faster: training runs calls one after another",
    "prints": "return what the model should read, and print nothing",
    "changes the process": "keep state in attributes: each call's changes are undone",
    "files": "keep state in attributes, or write into a tempfile.TemporaryDirectory",
    "template": "use a model tuned for tools, or correct tokenizer.response_template",
    "schema": "shorten docstrings and parameters, or offer fewer tools",
    "room": "shorten the results, or raise max_completion_length",
}
SHOWN = ("random calls", "oracle")  # policies whose episodes are tried once more
NO_TEXT = (type(None), bytes, bytearray)
ATTEMPTS = {  # beginnings of the names of policies that should not win
    "won early": ("stop after", "cut short"),
    "wrong answer wins": ("another row's",),
    "bound wins": ("last call:",),
}
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir"}
EXEMPT = re.compile(f"{re.escape(tempfile.gettempdir())}/|{os.devnull}$|.*__pycache__")
Row = Mapping[str, Any]
Finding = tuple[str, str, bool]  # rule, evidence, whether it says "stop"
Plays = list[dict[str, Episode]]  # for each row: its episodes by policy


def findings(
    environment: Environment,
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    max_completion_length: int = 256,
) -> list[Check]:
    """Return the faults of an environment, "stop" first; nothing if it is sound.

    Args:
        environment: The environment under test, played by scripted policies.
        rows: Rows to play; EPISODES of them, with repetition if there are fewer.
        tokenizer: The tokenizer of the model that will play; None skips the tests of its template.
        max_completion_length: The limit of an episode, including results [tokens].
    """
    methods = inspect.getmembers(environment.kind, inspect.iscoroutinefunction)
    if coroutines := ", ".join(name for name, _ in methods if name[0] != "_"):
        evidence = f"{environment.title}: {coroutines} would return a coroutine"
        return [Check("async", "stop", evidence, FIXES["async"])]
    tested = list(islice(cycle(rows), EPISODES))
    _touched().clear()
    try:
        with redirect_stdout(io.StringIO()) as printed, _left_behind() as changes:
            plays, found = _play_all(environment, tested)
    except Exception as error:  # an author's class may raise anything, and that is the finding
        at = traceback.extract_tb(error.__traceback__)[-1]
        evidence = f"{type(error).__name__}: {error} (line {at.lineno} of {at.name})"
        return [Check("episode", "stop", f"{environment.title}: {evidence}", FIXES["episode"])]
    if not found:  # otherwise rewards are not comparable
        found = [*_rewards(environment, plays), *_leaks(tested, plays)]
        found += [*_asked_twice(environment, plays)]
        if not any(stop for *_, stop in found):  # what needs no skill needs no solution
            found += _solution([play for play in plays if "oracle" in play])
        if tokenizer:
            found += _tokens(environment, plays, tokenizer, max_completion_length)
    rules = {rule for rule, *_ in found}
    found += [change for change in changes if change[0] not in rules]
    found += [*_tools(environment, plays), *_source(environment)]
    if output := printed.getvalue().strip():
        found.append(("prints", f"{output!r:.80}", False))
    checks = [
        Check(rule, "stop" if stop else "warning", evidence, FIXES[rule.partition(": ")[0]])
        for rule, evidence, stop in found
    ]
    return sorted(checks, key=lambda check: check.state != "stop")


def _play_all(environment: Environment, rows: Sequence[Row]) -> tuple[Plays, list[Finding]]:
    """Play every policy on the rows, in a new and in a used instance, until these two differ."""
    plays, used, until = [], environment.factory(), time.monotonic() + PATIENCE
    for seed, row in enumerate(rows):
        plays.append({})
        other, alone = rows[(seed + 1) % len(rows)], ()
        for name, policy in policies(environment, row, other).items():
            play = partial(perform, environment, row, policy, seed)
            plays[-1][name] = episode = play()
            if episode.ended == "a call hung":
                return plays, [("hangs", f"{episode.calls[-1].error} (policy: {name})", True)]
            patient = time.monotonic() < until
            if patient and (difference := _difference(episode, play(used))):
                starts = [Episode(environment, row) for _ in range(GROUP)]
                return plays, [_why(play, starts, difference)]
            alone = (episode, play) if name in SHOWN else alone
        if patient and (difference := _difference(alone[0], alone[1](beside=other))):
            return plays, [("hidden state", f"beside another episode: {difference}", True)]
        if not patient:
            break
    return plays, []


def _why(play: Callable[..., Episode], starts: Sequence[Episode], difference: str) -> Finding:
    """Explain why equal calls had different results: a used instance, the starts, or chance."""
    first, *others = [play() for _ in starts]
    among_new = next(filter(None, (_difference(first, other) for other in others)), "")
    if not among_new:
        return "state leaks", f"in a new and in a used instance: {difference}", True
    alike = len({f"{each.prompt} {_state(each)}" for each in starts}) == 1
    rule = "not deterministic" if alike else "starts apart"
    return rule, f"in episodes of one row, with the same calls: {among_new}", True


def _state(episode: Episode) -> str:
    """Return the attributes of an episode's instance, without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", str(getattr(episode.played._own, "__dict__", "")))


def _difference(episode: Episode, other: Episode) -> str:
    """Return the first difference between two episodes; "" if there is none."""
    pairs = zip_longest(episode.trace, other.trace)
    return next((f"{a!r:.80} and {b!r:.80}" for a, b in pairs if a != b), "")


def _rewards(environment: Environment, plays: Plays) -> Iterator[Finding]:
    """Check that winning earns the most, and that an honest failure earns more than no skill."""
    names = [*WITHOUT_SKILL, *(["oracle", "calls after the end"] if "oracle" in plays[0] else [])]
    mean = {name: fmean(play[name].reward for play in plays) for name in names}
    solved, oracle = "oracle" in mean, mean.get("oracle", 1.0)
    ends = [getattr(episode.played, "done", False) for play in plays for episode in play.values()]
    never_done = not any(ends)
    if never_done and environment.max_turns > MOST_TURNS:
        yield "turns", f"max_turns is {environment.max_turns}, and done is never set", True
    if lacking := [name for name in ("solve", "get_reward") if not hasattr(environment.kind, name)]:
        evidence = f"without {' and '.join(lacking)}, rewards of wins and failures are unknown"
        yield "not judged", evidence, False
    if solved and any(play["oracle"].ended == "turn limit" for play in plays):
        limit = min(environment.max_turns, MOST_TURNS)
        yield "turns", f"solve takes more than {limit} turns", True
        return
    failure = fmean([reward for play in plays if solved for reward in _failure(play)] or [0.0])
    if solved and oracle <= max(mean["idle"], failure) + TIE:
        texts = [turn["content"] for play in plays for turn in play["oracle"].messages]
        error = next((text for text in texts if text.startswith("{'error': ")), "no error")
        others = f"idling {mean['idle']:.2f}, an honest failure {failure:.2f}"
        yield "oracle", f"solve earns {oracle:.2f}, {others}; its calls gave {error}", True
        return
    for name in [name for name in WITHOUT_SKILL if name != "what was read"]:
        share = (mean[name] - failure) / (oracle - failure)
        hollow = solved and name in ("idle", "malformed calls")
        if share > LUCKY or (hollow and share > (-TIE if failure > TIE else TIE)):
            evidence = f"earns {mean[name]:.2f}, a failure {failure:.2f}, a win {oracle:.2f}"
            yield f"without skill: {name}", evidence, hollow or share > WON
    if solved and (after := mean["calls after the end"]) > oracle + TIE:
        yield "calls after the end", f"they raise {oracle:.2f} to {after:.2f}", True


def _solution(plays: Plays) -> Iterator[Finding]:
    """Check that solve wins, that it needs all of its calls, and that no other answer wins."""
    earned = [(play["oracle"].reward, play["idle"].reward + TIE) for play in plays]
    best = max((win for win, _ in earned), default=0.0) - TIE
    wins = [play for play, (win, idle) in zip(plays, earned, strict=True) if win > idle]
    if losses := sum(win <= idle and win < best for win, idle in earned):
        evidence = f"solve earns no more than idling on {losses} of {len(plays)} rows"
        yield "solve fails", evidence, losses > LUCKY * len(plays)
    winners = list(map(_winners, wins))
    for rule, starts in ATTEMPTS.items():
        names = [[name for name in won if name.startswith(starts)] for won in winners]
        share = sum(map(bool, names)) / max(1, len(names))
        if share > LUCKY:
            [(name, _)] = Counter(chain(*names)).most_common(1)
            evidence = f"{name!r} or the like earns as much as solve on {share:.0%} of the rows"
            yield rule, evidence, share > WON


def _winners(play: Mapping[str, Episode]) -> list[str]:
    """Return the attempts that earn as much as solve by other calls; early ends hide the rest."""
    calls = {name: [call.arguments for call in episode.calls] for name, episode in play.items()}
    least = play["oracle"].reward - TIE
    others = [name for name in play if calls[name] != calls["oracle"]]
    names = [name for name in others if play[name].reward >= least]
    return [name for name in names if name.startswith(ATTEMPTS["won early"])] or names


def _asked_twice(environment: Environment, plays: Plays) -> Iterator[Finding]:
    """Check that get_reward gives the same again, and changes nothing."""
    if not hasattr(environment.kind, "get_reward"):
        return
    names = [name for name in SHOWN if name in plays[0]]
    for play, name in product(plays[:GROUP], names):
        episode, before = play[name], _state(play[name])
        try:
            again: Any = episode.played.get_reward()
        except Exception as error:  # the author's code may raise anything
            again = f"{type(error).__name__}: {error}"
        if again != episode.reward:
            evidence = f"first {episode.reward:g}, then {again} (policy: {name})"
            yield "reward asked twice", evidence, True
            return
        if _state(episode) != before:
            yield "reward asked twice", f"it changes the instance (policy: {name})", False
            return


def _failure(play: dict[str, Episode]) -> list[float]:
    """Return the highest reward of an honest attempt that does not win, if there is one."""
    attempts = [play[name] for name in ("cut short", "another row's solution")]
    win = play["oracle"].reward
    lost = [each.reward for each in attempts if each.calls and each.reward < win - TIE]
    return sorted(lost)[-1:]


def _leaks(rows: Sequence[Row], plays: Plays) -> Iterator[Finding]:
    """Check whether a row's answer can be read without skill, more often than other rows' can."""
    answers = [_answer(*pair) for pair in zip(rows, plays, strict=False)]
    texts = [_texts(*triple) for triple in zip(rows, plays, answers, strict=False)]
    alike = np.array([[answer == other for other in answers] for answer in answers])
    for place in texts[0]:
        held = np.array([[_holds(text[place], answer) for answer in answers] for text in texts])
        own, others = held.diagonal().mean(), 1 if alike.all() else held[~alike].mean()
        if own > LEAK + others:
            copied = fmean(play["what was read"].reward for play in plays)
            evidence = f"{place} holds it on {own:.0%} of the rows, first {', '.join(answers[0])}"
            evidence += f"; copying what was read earns {copied:.2f}"
            yield f"answer leaks: {place}", evidence, place != "the question"


def _answer(row: Row, play: dict[str, Episode]) -> list[str]:
    """Return the arguments of the call that wins; without `solve`, the row's answer."""
    column = [{"answer": row["answer"]}] if "answer" in row else []
    calls = [call.arguments for call in play["oracle"].calls] if "oracle" in play else []
    answers = [*column, *filter(None, calls)]
    return [str(value) for value in answers[-1].values()] if answers else []


def _texts(row: Row, play: dict[str, Episode], answer: list[str]) -> dict[str, str]:
    """Return the texts in which the answer might leak, by their place."""
    question = row["prompt"][-1]["content"]
    calls = [c for name in WITHOUT_SKILL if name != "what was read" for c in play[name].calls]
    # The result of a call that names the answer may confirm it.
    calls = [call for call in calls if not _holds(str(call.arguments)[:1000], answer)]
    return {
        "reset": play["idle"].prompt[-1]["content"].removeprefix(question),
        "the question": question,
        "a result": " ".join(f"{call.result[:1000]} {call.error[:1000]}" for call in calls),
    }


def _holds(text: str, answer: list[str]) -> bool:
    words = [rf"(?<!\w){re.escape(value)}(?!\w)" for value in answer]
    return bool(words) and all(re.search(word, text) for word in words)


def _tools(environment: Environment, plays: Plays) -> Iterator[Finding]:
    """Check how long tools take, and whether they write, delete or move files."""
    calls = [call for play in plays for episode in play.values() for call in episode.calls]
    succeeded = [call for call in calls if not call.error and call.result != FINISHED]
    for name in environment.methods:
        seconds = median([call.seconds for call in succeeded if call.name == name] or [0])
        if seconds > SLOW:
            yield f"slow: {name}", f"a call takes {seconds:.2f} s", False
    for call in {call.name: call for call in succeeded if call.kind in NO_TEXT}.values():
        evidence = f"it returns {call.kind.__name__}, which the model reads as {call.result!r:.40}"
        yield f"no text: {call.name}", evidence, False
    if changes := {each for play in plays for one in play.values() for each in one.played.changes}:
        yield "changes the process", f"a method changes {', '.join(sorted(changes))}", False
    for path in [*_touched()]:
        yield "files", f"a call changes {path}", True


def _source(environment: Environment) -> Iterator[Finding]:
    """Find handlers of all exceptions that neither raise nor use the exception."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(environment.kind)))
    except (OSError, TypeError):  # made by exec
        return
    for handler in [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]:
        broad = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
        body = [node for statement in handler.body for node in ast.walk(statement)]
        used = any(isinstance(n, ast.Raise) or getattr(n, "id", "") == handler.name for n in body)
        if broad and not used:
            answers = any(isinstance(node, ast.Constant) and node.value for node in body)
            evidence = f"{ast.unparse(handler).replace(chr(10), ' ')!r} in {environment.title}"
            yield f"errors swallowed: line {handler.lineno}", evidence, not answers


@contextmanager
def _left_behind() -> Iterator[list[Finding]]:
    """Yield a list of what goes on after the calls, filled at the end."""
    changes: list[Finding] = []
    threads, processes = set(threading.enumerate()), set(psutil.Process().children())
    try:
        yield changes
    finally:
        # A notebook's kernel starts threads of its own meanwhile, by classes of ipykernel's.
        new = [one for one in threading.enumerate() if one not in threads]
        new = [one for one in new if type(one).__module__.partition(".")[0] != "ipykernel"]
        rest = [f"thread {one.name}" for one in new if not one.name.startswith("tool ")]
        rest += [f"process {p.pid}" for p in psutil.Process().children() if p not in processes]
        if rest:
            evidence = f"after the calls {len(rest)} threads and processes go on, such as {rest[0]}"
            changes.append(("left behind", evidence, len(rest) > GROUP))


@cache
def _touched() -> deque[str]:
    """Return the last file that a tool changed, noted by an audit hook, which stays installed."""
    paths: deque[str] = deque(maxlen=1)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        moves = event in CHANGES and arguments[-1] == -1  # not relative to an open folder
        in_tool = threading.current_thread().name.startswith("tool ")
        if in_tool and (writes or moves) and not isinstance(arguments[0], int):
            path = str(Path(os.fsdecode(arguments[0])).absolute())
            paths.extend([path] * (not EXEMPT.match(path)))

    sys.addaudithook(note)
    return paths


def _tokens(
    environment: Environment, plays: Plays, tokenizer: "PreTrainedTokenizerBase", cap: int
) -> Iterator[Finding]:
    """Check how the chat template renders tools, calls and results, and their token counts."""
    solved, tools = "oracle" in plays[0], environment.tools
    shown = [play["oracle" if solved else "random calls"] for play in plays]
    prompts, call = [episode.prompt for episode in shown], plays[0]["random calls"].messages[0]
    try:
        tokenizer = tool_calls.with_tools(tokenizer)
        [bare_tokens] = template.count_tokens(tokenizer, prompts[:1])
        prompt_tokens = template.count_tokens(tokenizer, prompts, tools)
        chats = [
            [*template.fold_system(tokenizer, each.prompt), *each.messages[: None if solved else 2]]
            for each in shown
        ]
        whole = tokenizer.apply_chat_template(chats, tools=tools, return_dict=False)
        fault = tool_calls.tool_fault(tokenizer, prompts[0], call, tools)
    except Exception as error:  # a template may raise anything
        fault = f"{type(error).__name__}: {error}"
    if fault:
        yield "template", fault, True
        return
    tool_tokens = prompt_tokens[0] - bare_tokens
    if tool_tokens > max(FEW, SCHEMA * (prompt_tokens[0] + cap)):
        evidence = f"tools take {tool_tokens} tokens of each prompt; an episode may take {cap}"
        yield "schema", evidence, True
    episode_tokens = np.array(list(map(len, whole))) - prompt_tokens
    if (episode_tokens > cap).any():
        what = "the solution" if solved else "a call with its result"
        evidence = f"{what} takes {episode_tokens.max()} tokens; max_completion_length is {cap}"
        yield "room", evidence, bool((episode_tokens > cap).mean() > SOME)
