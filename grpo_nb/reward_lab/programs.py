"""Write programs that cheat, and find out what they earn where no right program is known.

Prompts that ask for a kernel, or for a strategy of a game, show the line that begins the function:
`def strategy(board):`. A program that begins with this line and does nothing shows what the rewards
pay for any program. Some programs are wrong for every task: one that returns NaN, and one that
writes the result that it should achieve into its arguments.
"""

import ast
import ctypes
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.files import read_yaml
from grpo_nb.reward_lab.scoring import TIE, Pair, Row, Scorer, clock, cut
from grpo_nb.reward_lab.source import names_used, strings_of
from grpo_nb.rewards.calls import TookTooLong

HEAD = re.compile(r"def (\w+)\(([^()]*)\)(?: *-> *[^\n:]+)?:")
RETURN = re.compile(r"^ +return (.+?) *(?:#.*)?$", re.MULTILINE)
BLOCK = re.compile(r"```(?:python)?\n(.*?)\n?```", re.DOTALL)
RUNNERS = {"exec", "eval", "compile", "FunctionType", "subprocess", "run_code"}
ENDLESS = 12.0  # seconds after which a program that never ends should have been stopped
LIMIT = re.compile(r"(?i)^timeout|alarm|itimer|rlimit_cpu")  # in the code of a time limit
LATE = 0.95  # share of ENDLESS that counts as all of it
NAN = "not a number"
# What programs without content do: {name: [family, body]}.
BODIES = read_yaml(Path(__file__).with_suffix(".yaml"))
TESTS = ("tests", "test_list", "test_cases", "unit_tests", "assertions")  # columns of tests


def tests_of(row: Row) -> Any:
    """Return the tests that a row's program has to pass; None if there are none."""
    fields = {k: v for each in row.values() if isinstance(each, dict) for k, v in each.items()}
    fields |= row
    return next((fields[name] for name in TESTS if fields.get(name)), None)


class Task(NamedTuple):
    """Describe the program that is asked for.

    head: The line that begins the program.
    arguments: The names of its arguments.
    example: The value that the prompt's example returns, "None" if that is not a literal; "" if it
        returns nothing. A program that returns nothing may have to change its arguments.
    goal: The largest number in the prompt, which may be the program's target.
    """

    head: str
    arguments: list[str]
    example: str
    goal: int

    def program(self, body: str) -> str:
        """Write the program with this body."""
        values = {"first": self.arguments[0] if self.arguments else "None", "goal": self.goal}
        values |= {"example": self.example or "None"}
        return f"{self.head}\n{indent(body.format(**values), '    ')}"


def asked(texts: Sequence[str]) -> Task | None:
    """Return the program that the first text with a function's head asks for; None if none does.

    >>> asked(["Reach 2048.\\n```python\\ndef play(board):\\n    return 'W' # Example\\n```"])
    Task(head='def play(board):', arguments=['board'], example="'W'", goal=2048)
    """
    for text in texts:
        if head := HEAD.search(text):
            parts = [re.split(r"[:=]", part)[0].strip(" *") for part in head[2].split(",")]
            returned = RETURN.search(text, head.end())
            numbers = [int(number) for number in re.findall(r"\d{1,9}", text)]
            example = _literal(returned[1]) if returned else ""
            return Task(head[0], [name for name in parts if name], example, max([0, *numbers]))
    return None


def tested(tests: Any) -> Task | None:
    """Return the program that tests call; None if they are not assertions on a function.

    >>> tested(["assert rev('abc') == 'cba'"]).head
    'def rev(a=None, *rest):'
    """
    name = re.search(
        r"\bassert\s+(?:not\s+)?(?!all\b|any\b|abs\b|len\b|set\b|sorted\b)(\w+)\(", str(tests)
    )
    return Task(f"def {name[1]}(a=None, *rest):", ["a"], "", 0) if name else None


def _literal(text: str) -> str:
    """Return a literal as it stands, and "None" for anything else."""
    try:
        return "None" if ast.literal_eval(text) is ... else text
    except (ValueError, SyntaxError):
        return "None"


def fenced(program: str) -> str:
    """Write a program as a block of code."""
    return f"```python\n{program}\n```"


def program_in(text: str) -> str:
    """Return the first block of code that contains a function; "" if there is none."""
    return next((block for block in BLOCK.findall(text) if HEAD.search(block)), "")


def spoiled(program: str) -> str:
    """Return a program that does the same work and returns nothing; "" if it is no function.

    >>> print(spoiled("def f(a):\\n    return a + 1"))
    def f(a):
        def f(a):
            return a + 1
        f(a)
        return None
    """
    task = asked([program])
    if task is None or not program.startswith(task.head):
        return ""
    call = f"{task.head[4 : task.head.index('(')]}({', '.join(task.arguments)})"
    body = "\n".join([program, call, "return None"])
    return f"{task.head}\n{indent(body, '    ')}"


def trials(scorer: Scorer, task: Task) -> list[tuple[str, str, str]]:
    """Return (name, state, evidence) of findings that need no right program.

    The list is empty if no reward seems to run programs.

    Args:
        scorer: The rewards.
        task: The program that the first row asks for.
    """
    texts = {name: fenced(task.program(body)) for name, (_, body) in BODIES.items()}
    pairs = [(0, text) for text in texts.values()]
    totals = dict(zip(texts, scorer.totals(pairs), strict=True))
    families = {name: family for name, (family, _) in BODIES.items()}
    plain = {name: total for name, total in totals.items() if families[name] == "empty program"}
    spread = np.ptp(np.nan_to_num(scorer.scores(pairs)), axis=0)
    running = [n for n in range(len(scorer.funcs)) if spread[n] > TIE]
    if not running and not any(RUNNERS & names_used(func) for func in scorer.funcs):
        return []
    best = max(plain, key=lambda name: plain[name])
    evidence = (
        f"{task.head!r} is asked for and no right program is known, so that attacks are not "
        f"judged; without content, {best} earns most: {plain[best]:.3g}"
    )
    findings = [("no reference", "warning", evidence)]

    def bare() -> float:
        text = fenced(task.program("return {example}"))
        return float(scorer.totals([(0, text)])[0])

    for name, total in totals.items():
        if name not in plain and total > plain[best] + TIE and _is_wrong(name, total, task, bare):
            evidence = f"{name} earns {total:.3g}, {best} {plain[best]:.3g}: {cut(texts[name])}"
            findings.append((families[name], "stop", evidence))
    return findings


def _is_wrong(name: str, total: float, task: Task, bare: Callable[[], float]) -> bool:
    """Return whether a program that earns more than those without content must be wrong.

    A program that returns NaN is wrong. A program that changes its arguments is wrong if the task
    has a value to return, and if a program that only returns the example (`bare`) earns less.
    """
    return BODIES[name][0] == NAN or bool(task.example and total > bare() + TIE)


def endless(scorer: Scorer, pairs: Sequence[Pair], write: Callable[[str], str]) -> tuple | None:
    """Return (state, evidence, number of a reward) if a program that never ends is not stopped.

    A reward is taken to run programs if its scores differ between the programs in `pairs`. Such
    rewards are tried until one does not stop: first those whose code names no time limit, and of
    them the quickest.

    Args:
        scorer: The rewards.
        pairs: Completions with programs, all on one row.
        write: A function that writes a program into a completion.
    """
    task, spread = asked([pairs[0][1]]), np.ptp(np.nan_to_num(scorer.scores(pairs)), axis=0)
    text = write(task.program("while True:\n    pass"))
    running = [n for n in range(len(scorer.funcs)) if spread[n] > TIE]
    words = {n: {*strings_of(scorer.funcs[n]), *names_used(scorer.funcs[n])} for n in running}
    limited = {number for number in running if any(map(LIMIT.search, words[number]))}
    for number in sorted(running, key=lambda n: (n in limited, scorer.each[n])):
        start, before = clock(), {*threading.enumerate()}
        try:
            scorer.call(number, [(pairs[0][0], text)], limit=ENDLESS, patient=False)
            is_late = clock() - start > LATE * ENDLESS  # it may have caught the interruption
        except Exception as error:  # a user's reward may raise anything
            is_late = isinstance(error, TookTooLong)
        if _stop_programs(before):
            return "stop", f"it leaves behind, in a thread that never ends, {cut(text)}", number
        if is_late:
            evidence = f"after {ENDLESS:g} s it is still running {cut(text)}"
            if number in limited:
                evidence += "; the time limit that its code names may be longer"
            return "warning" if number in limited else "stop", evidence, number
    return None


def _stop_programs(before: Collection[threading.Thread]) -> bool:
    """Stop programs in threads that are not in `before`; return whether there are any.

    A thread runs a program if the code of the thread is in no file. Python cannot exit while such a
    thread runs.
    """
    frames, is_running = sys._current_frames(), False
    for thread in {*threading.enumerate()} - {*before}:
        frame = frames.get(thread.ident)
        if frame and not Path(frame.f_code.co_filename).is_file():
            is_running, number = True, ctypes.c_ulong(thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
    return is_running
