"""Findings: faults of an environment that show when scripted policies play it.

    runs.refuse(findings(environment, rows, tokenizer, max_completion_length=256))

Each has its evidence and its fix. A "stop" forbids a training; a "warning" is for a person to
weigh. Policies without skill are compared with an honest failure: the author's `solve` cut short,
or that of another row, whichever earns more and yet less than the oracle.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb.environments.contract import FINISHED, Environment
from grpo_nb.environments.play import begin
from grpo_nb.environments.scripted import MOST_TURNS, WITHOUT_SKILL, Scripted, perform, policies
from grpo_nb.models import chat
from grpo_nb.runs import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODES, GROUP = 16, 8  # of each policy; of a row, to see whether they begin alike
PATIENCE = 20.0  # seconds, after which the row is played to its end, and none after it
TIE = 1e-6
LUCKY, WON = 0.5, 0.75  # of the way from failure to oracle: a warning, a stop
LEAK = 0.5  # share of the rows that show their answer, less that of other answers
SLOW = 0.3  # seconds a call
SCHEMA, FEW = 0.75, 512  # of the tokens of prompt and episode; so few are never too many
SOME = 0.1  # share of the rows; above it a warning is a stop
FIXES = {
    "episode": "correct it: a training would stop here",
    "not judged": "add get_reward(self), and a classmethod solve(cls, **row): the turns that win",
    "oracle": "correct get_reward, or solve: who wins has to earn most",
    "without skill": "pay for the goal alone, and for form only after a successful call",
    "calls after the end": "set self.done once the episode is over",
    "turns": "set max_turns, at least as many as solve takes, or self.done at the end",
    "starts apart": "draw by `random` or `numpy.random`: both are seeded from the row",
    "not deterministic": "draw by `random` or `numpy.random`, and keep no state in the class",
    "state leaks": "set every attribute in reset: a training uses instances again",
    "answer leaks": "take it out; where copying it is the task, let the question hold it",
    "errors swallowed": "let it raise: the model reads the message, and it is counted",
    "hangs": "give it a limit of its own, or raise tool_seconds",
    "slow": "make it faster: a training makes calls one after another",
    "prints": "return what the model is to read, and print nothing",
    "files": "keep state in attributes, or write into a tempfile.TemporaryDirectory",
    "template": "take a model tuned for tools, or correct tokenizer.response_template",
    "schema": "shorten docstrings and parameters, or offer fewer tools",
    "room": "shorten the results, or raise max_completion_length",
}
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir"}
EXEMPT = re.compile(f"{re.escape(tempfile.gettempdir())}/|{os.devnull}$|.*__pycache__")
Row = Mapping[str, Any]
Found = tuple[str, str, bool]  # rule, evidence, whether it says "stop"
Plays = list[dict[str, Scripted]]  # of each row, by policy


def findings(
    environment: Environment,
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    max_completion_length: int = 256,
) -> list[Check]:
    """What is wrong with an environment, "stop" first; nothing where all is well.

    Args:
        environment: Scripted policies play in it.
        rows: EPISODES of them are played; of fewer, some more than once.
        tokenizer: Of the model that will play; None: its template is not looked at.
        max_completion_length: Of an episode, results included [tokens].
    """
    some = list(islice(cycle(rows), EPISODES))
    _touched().clear()
    try:
        with redirect_stdout(io.StringIO()) as printed:
            plays, found = _played(environment, some)
    except Exception as error:  # an author's class may raise anything, and that is the finding
        at = traceback.extract_tb(error.__traceback__)[-1]
        evidence = f"{type(error).__name__}: {error} (line {at.lineno} of {at.name})"
        return [Check("episode", "stop", f"{environment.title}: {evidence}", FIXES["episode"])]
    if not found:  # else rewards are not comparable
        found = [*_earned(environment, plays), *_told(some, plays)]
        if tokenizer:
            found += _in_tokens(environment, plays, tokenizer, max_completion_length)
    found += [*_of_tools(environment, plays), *_of_source(environment)]
    if said := printed.getvalue().strip():
        found.append(("prints", f"{said!r:.80}", False))
    checks = [
        Check(rule, "stop" if stop else "warning", evidence, FIXES[rule.partition(": ")[0]])
        for rule, evidence, stop in found
    ]
    return sorted(checks, key=lambda check: check.state != "stop")


def _played(environment: Environment, rows: Sequence[Row]) -> tuple[Plays, list[Found]]:
    """Every policy on the rows, in a new instance and in a used one, until they come apart."""
    plays, used, until = [], environment.factory(), time.monotonic() + PATIENCE
    for seed, row in enumerate(rows):
        plays.append({})
        for name, policy in policies(environment, row, rows[(seed + 1) % len(rows)]).items():
            play = partial(perform, environment, row, policy, seed)
            plays[-1][name] = one = play()
            if one.ended == "a call hung":
                return plays, [("hangs", f"{one.calls[-1].error} (policy: {name})", True)]
            patient = time.monotonic() < until
            if patient and (apart := _apart(one, play(used))):
                starts = [begin(environment, row) for _ in range(GROUP)]
                return plays, [_why(play, starts, apart)]
        if not patient:
            break
    return plays, []


def _why(play: Callable[..., Scripted], starts: Sequence[Any], apart: str) -> Found:
    """Why the same calls came to another end: the used instance, the starts, or chance."""
    first, *others = [play() for _ in starts]
    among = next(filter(None, (_apart(first, one) for one in others)), "")
    if not among:
        return "state leaks", f"in a new instance, and in a used one: {apart}", True
    states = [f"{prompt} {getattr(played._own, '__dict__', '')}" for played, prompt in starts]
    alike = len({re.sub(" at 0x[0-9a-f]+", "", state) for state in states}) == 1
    rule = "not deterministic" if alike else "starts apart"
    return rule, f"in episodes of one row, by the same calls: {among}", True


def _apart(one: Scripted, other: Scripted) -> str:
    """The first thing that differs; "" where all is the same."""
    pairs = zip_longest(one.trace, other.trace)
    return next((f"{a!r:.80}, and {b!r:.80}" for a, b in pairs if a != b), "")


def _earned(environment: Environment, plays: Plays) -> Iterator[Found]:
    """Does who wins earn most, and who has no skill less than who fails honestly?"""
    mean = {name: fmean(play[name].reward for play in plays) for name in plays[0]}
    solved, oracle = "oracle" in mean, mean.get("oracle", 1.0)
    never = not any(one.done for play in plays for one in play.values())
    if never and environment.max_turns > MOST_TURNS:
        yield "turns", f"max_turns is {environment.max_turns}, and done is never set", True
    if lacking := [one for one in ("solve", "get_reward") if not hasattr(environment.kind, one)]:
        evidence = f"without {' and '.join(lacking)}, what who wins or fails earns is not known"
        yield "not judged", evidence, False
    if solved and any(play["oracle"].ended == "turn limit" for play in plays):
        limit = min(environment.max_turns, MOST_TURNS)
        yield "turns", f"solve takes more than {limit} turns", True
        return
    failure = fmean([one for play in plays if solved for one in _failure(play)] or [0.0])
    if solved and oracle <= max(mean["idle"], failure) + TIE:
        heard = [turn["content"] for play in plays for turn in play["oracle"].messages]
        error = next((text for text in heard if text.startswith("{'error': ")), "no error")
        best = f"who idles {mean['idle']:.2f}, who fails {failure:.2f}"
        yield "oracle", f"solve earns {oracle:.2f}, {best}; its calls gave {error}", True
        return
    for name in [name for name in WITHOUT_SKILL if name != "what was read"]:
        share = (mean[name] - failure) / (oracle - failure)
        hollow = solved and name in ("idle", "malformed calls")
        if share > LUCKY or (hollow and share > (-TIE if failure > TIE else TIE)):
            evidence = f"earns {mean[name]:.2f}, who fails {failure:.2f}, who wins {oracle:.2f}"
            yield f"without skill: {name}", evidence, hollow or share > WON
    if solved and (after := mean["calls after the end"]) > oracle + TIE:
        yield "calls after the end", f"they raise {oracle:.2f} to {after:.2f}", True


def _failure(play: dict[str, Scripted]) -> list[float]:
    """The most that an honest attempt earns that does not win."""
    tried = [play[name] for name in ("cut short", "another row's solution")]
    lost = [one.reward for one in tried if one.calls and one.reward < play["oracle"].reward - TIE]
    return sorted(lost)[-1:]


def _told(rows: Sequence[Row], plays: Plays) -> Iterator[Found]:
    """Does its answer stand where no skill is needed to read it, more often than other rows'?"""
    answers = [_answer(*one) for one in zip(rows, plays, strict=False)]
    texts = [_texts(*one) for one in zip(rows, plays, answers, strict=False)]
    alike = np.array([[one == other for other in answers] for one in answers])
    for place in texts[0]:
        held = np.array([[_holds(text[place], one) for one in answers] for text in texts])
        own, others = held.diagonal().mean(), 1 if alike.all() else held[~alike].mean()
        if own > LEAK + others:
            copied = fmean(play["what was read"].reward for play in plays)
            evidence = f"{place} holds it on {own:.0%} of the rows, first {', '.join(answers[0])}"
            evidence += f"; who copies what was read earns {copied:.2f}"
            yield f"answer leaks: {place}", evidence, place != "the question"


def _answer(row: Row, play: dict[str, Scripted]) -> list[str]:
    """The arguments of the call that wins; without `solve`, the row's answer."""
    given = [{"answer": row["answer"]}] if "answer" in row else []
    calls = [one.arguments for one in play["oracle"].calls] if "oracle" in play else []
    known = [*given, *filter(None, calls)]
    return [str(value) for value in known[-1].values()] if known else []


def _texts(row: Row, play: dict[str, Scripted], answer: list[str]) -> dict[str, str]:
    question = row["prompt"][-1]["content"]
    calls = [c for name in WITHOUT_SKILL if name != "what was read" for c in play[name].calls]
    # Who already names the answer may be told that it is right.
    calls = [call for call in calls if not _holds(str(call.arguments)[:1000], answer)]
    return {
        "reset": play["idle"].prompt[-1]["content"].removeprefix(question),
        "the question": question,
        "a result": " ".join(f"{call.result[:1000]} {call.error[:1000]}" for call in calls),
    }


def _holds(text: str, answer: list[str]) -> bool:
    words = [rf"(?<!\w){re.escape(value)}(?!\w)" for value in answer]
    return bool(words) and all(re.search(word, text) for word in words)


def _of_tools(environment: Environment, plays: Plays) -> Iterator[Found]:
    """How long tools take, and which files they write, delete or move."""
    calls = [call for play in plays for one in play.values() for call in one.calls]
    made = [call for call in calls if not call.error and call.result != FINISHED]
    for name in environment.methods:
        seconds = median([call.seconds for call in made if call.name == name] or [0])
        if seconds > SLOW:
            yield f"slow: {name}", f"a call takes {seconds:.2f} s", False
    for path in [*_touched()]:
        yield "files", f"a call changes {path}", True


def _of_source(environment: Environment) -> Iterator[Found]:
    """Handlers of every exception that neither raise nor say what it was."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(environment.kind)))
    except (OSError, TypeError):  # made by exec
        return
    for one in [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]:
        broad = one.type is None or ast.unparse(one.type) in ("Exception", "BaseException")
        inside = [node for statement in one.body for node in ast.walk(statement)]
        told = any(isinstance(n, ast.Raise) or getattr(n, "id", "") == one.name for n in inside)
        if broad and not told:
            says = any(isinstance(node, ast.Constant) and node.value for node in inside)
            evidence = f"{ast.unparse(one).replace(chr(10), ' ')!r} in {environment.title}"
            yield f"errors swallowed: line {one.lineno}", evidence, not says


@cache
def _touched() -> deque[str]:
    """The last file that a tool changed, by an audit hook: once, for it lives with the process."""
    paths: deque[str] = deque(maxlen=1)

    def note(event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR)
        moves = event in CHANGES and given[-1] == -1  # and not beside an open folder
        of_tool = threading.current_thread().name.startswith("tool ")
        if of_tool and (writes or moves) and not isinstance(given[0], int):
            path = str(Path(os.fsdecode(given[0])).absolute())
            paths.extend([path] * (not EXEMPT.match(path)))

    sys.addaudithook(note)
    return paths


def _in_tokens(
    environment: Environment, plays: Plays, tokenizer: "PreTrainedTokenizerBase", cap: int
) -> Iterator[Found]:
    """What the chat template makes of tools, calls and results."""
    solved, tools = "oracle" in plays[0], environment.tools
    shown = [play["oracle" if solved else "random calls"] for play in plays]
    prompts, called = [one.prompt for one in shown], plays[0]["random calls"].messages[0]
    try:
        tokenizer = chat.with_tools(tokenizer)
        [bare] = chat.count_tokens(tokenizer, prompts[:1])
        opened = chat.count_tokens(tokenizer, prompts, tools)
        episodes = [
            [*chat.fold_system(tokenizer, one.prompt), *one.messages[: None if solved else 2]]
            for one in shown
        ]
        whole = tokenizer.apply_chat_template(episodes, tools=tools, return_dict=False)
        fault = chat.tool_fault(tokenizer, prompts[0], called, tools)
    except Exception as error:  # templates raise what they like
        fault = f"{type(error).__name__}: {error}"
    if fault:
        yield "template", fault, True
        return
    if opened[0] - bare > max(FEW, SCHEMA * (opened[0] + cap)):
        evidence = f"tools take {opened[0] - bare} tokens of each prompt; an episode may take {cap}"
        yield "schema", evidence, True
    took = np.array(list(map(len, whole))) - opened
    if (took > cap).any():
        what = "what solve plays" if solved else "a call and its result"
        evidence = f"{what} takes {took.max()} tokens, and max_completion_length is {cap}"
        yield "room", evidence, bool((took > cap).mean() > SOME)
