"""Score answers to the tasks of reasoning-gym, whose scorers are made for honest programs.

Some of these scorers run an answer as Python code, and some numbers are too large for others. Such
an answer is scored in the sandbox, and only if it is written as an answer of its task may be
(`EVALUATED`), so that it cannot forge its score there.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_nb.answers.forms import TAGS, Form
from grpo_nb.rewards.contract import Reward, Scored, reward

LONGEST_CHARACTERS = 10_000
NO_NUMBER = re.compile(r"(?i)\b(?:nan|inf|infinity)[ij]?\b")  # two scorers take it for right
NUMBERS, LISTS = r"[\d\s+*/().-]*", r"[\w\s\[\]'\",]*"
FUNCTIONS = "asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|exp|log|ln|sqrt|Abs|pi"
FORMULA = rf"(?:[\d\s+*/().^-]|\b(?:[A-Za-z]|{FUNCTIONS})\b)*"
# {task whose scorer runs an answer as code: what an answer may be written as}
EVALUATED = dict.fromkeys(("countdown", "puzzle24"), NUMBERS)
EVALUATED |= dict.fromkeys(("simple_integration", "intermediate_integration"), FORMULA)
EVALUATED |= {"polynomial_multiplication": FORMULA, "coin_flip": NUMBERS}
EVALUATED |= dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix"), LISTS)
EVALUATED |= {"string_insertion": LISTS}
INSTALL = "reasoning-gym is not installed: pip install 'reasoning-gym==0.1.25', or 'grpo-nb[gym]'"
START_SECONDS, SECONDS = 30, 2  # to import the scorer in the sandbox; for each answer
# Only the scorer's own module is imported, for the package takes seconds. Each answer has a process
# of its own, which SIGALRM ends even in the middle of a multiplication.
PROGRAM = r"""
import importlib, json, os, signal, sys, types
os.environ["OPENBLAS_NUM_THREADS"] = "1"

def scorer(folders, module, kind, options):
    sys.path += folders
    parts = module.split(".")
    for depth in (1, 2):
        name = ".".join(parts[:depth])
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [os.path.join(folder, *parts[:depth]) for folder in folders]
    made = importlib.import_module(module)
    config = getattr(made, kind.replace("Dataset", "Config"))(size=1, seed=0, **json.loads(options))
    return getattr(made, kind)(config).score_answer

def score(place, seconds, answer, entry):
    global found
    found = globals().get("found") or scorer(*place)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        try:
            os.write(writing, repr(float(found(answer, json.loads(entry)))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    text = os.read(reading, 64)
    os.close(reading)
    os.waitpid(child, 0)
    return float(text) if text else None
"""


def library() -> Any:
    """Return the package reasoning_gym.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import reasoning_gym.factory
    except ImportError as error:
        raise ValueError(f"{INSTALL} ({error})") from None
    return reasoning_gym


@cache
def _dataset(task: str, options: str) -> Any:
    return library().create_dataset(task, size=1, seed=0, **json.loads(options))


def gym_reward(
    response: str, answer: str, entry: str, *, partial: bool = False, form: Form = TAGS
) -> Scored:
    """Pay 1 if the scorer of a task of reasoning-gym gives the final answer its full score.

    With `partial`, less than the full score is paid as well. An empty answer, and one for which the
    scorer raises an error, earn nothing.

    Args:
        response: The completion.
        answer: The reference answer.
        entry: What else the scorer reads, as JSON: task, options and metadata.
        partial: Whether to pay a part of the score.
        form: The form of completions.
    """
    return _scored([(response, answer, entry)], partial, form)[0]


class GymReward(Reward):
    """Score a batch at once, because the sandbox takes a second to start."""

    def explain(self, completions, prompts=None, **columns) -> list[Scored]:
        rows = self._rows(completions, prompts, columns)
        triples = [(text, row["answer"], row["entry"]) for _, text, row in rows]
        return _scored(triples, **self.options)


def _scored(
    triples: Sequence[tuple[str, str, str]], partial: bool = False, form: Form = TAGS
) -> list[Scored]:
    """Return the scores of (completion, reference answer, entry) triples."""
    texts = [(form.extract(text) or "").strip() for text, *_ in triples]
    questions = [
        (text, answer, entry) for text, (_, answer, entry) in zip(texts, triples, strict=True)
    ]
    scores: dict[tuple[str, str, str], Scored] = {}
    evaluated = defaultdict(list)
    for question in dict.fromkeys(questions):
        text, answer, entry = question
        about = json.loads(entry)
        task, pattern = about["task"], EVALUATED.get(about["task"])
        if not text or len(text) > LONGEST_CHARACTERS:
            scores[question] = Scored(0.0, f"an answer of {len(text)} characters")
        elif NO_NUMBER.search(text) and text != answer:
            scores[question] = Scored(0.0, "not a number")
        elif pattern is None:
            scores[question] = _points(text, about | {"answer": answer})
        elif text == answer:
            scores[question] = Scored(1.0, "the reference answer")
        elif not re.fullmatch(pattern, text):
            scores[question] = Scored(0.0, f"not written as an answer to {task} may be")
        else:
            evaluated[task, json.dumps(about["options"])].append(question)
    for place, several in evaluated.items():
        scores |= zip(several, evaluate(*place, several), strict=True)
    return [_paid(scores[question], partial) for question in questions]


def _paid(scored: Scored, partial: bool) -> Scored:
    """Return a score within [0, 1]; unless parts are paid, one below 1 is 0."""
    if scored.score is None or partial:
        return scored
    return scored._replace(score=float(scored.score >= 1))


def _points(text: str, entry: dict[str, Any]) -> Scored:
    """Return the score of an answer by its task's scorer, which does not run it as code."""
    try:
        points = _dataset(entry["task"], json.dumps(entry["options"])).score_answer(text, entry)
        return Scored(min(1.0, max(0.0, float(points))), f"{entry['task']} gives {points}")
    except Exception as error:  # each scorer raises its own errors for what it cannot read
        return Scored(0.0, f"{entry['task']} raised {error!r:.100}")


def evaluate(task: str, options: str, questions: Sequence[tuple[str, str, str]]) -> list[Scored]:
    """Return the scores of answers to one task, whose scorer runs them as code, in the sandbox.

    Args:
        task: The task.
        options: Its options, as JSON.
        questions: (answer, reference answer, entry) of each answer.
    """
    from grpo_nb.sandbox.bubblewrap import in_bubblewrap
    from grpo_nb.sandbox.limits import Limits

    kind = library().factory.DATASETS[task][0]
    specs = [find_spec(name) for name in ("reasoning_gym", "sympy", "mpmath", "numpy", "yaml")]
    folders = sorted({str(Path(spec.origin).resolve().parents[1]) for spec in specs if spec})
    place = [folders, kind.__module__, kind.__name__, options]
    asks = [
        ("score", [place, SECONDS, text, json.dumps(json.loads(entry) | {"answer": answer})])
        for text, answer, entry in questions
    ]
    limits = Limits(START_SECONDS + SECONDS * len(asks), memory_mib=1024)
    outcome = in_bubblewrap(PROGRAM, asks, limits, folders)
    results = outcome.answers + [("failed", outcome.ending)] * (len(asks) - len(outcome.answers))
    if outcome.failure:
        return [Scored(None, outcome.failure)] * len(asks)
    return [
        Scored(min(1.0, max(0.0, value)), f"{task} gives {value}, in the sandbox")
        if isinstance(value, float)
        else Scored(0.0, f"{task} did not score it in {SECONDS} s: {value}")
        for _, value in results
    ]


gym_reward = GymReward(
    gym_reward,
    reward(max_none_share=0.05, resists="code, endless numbers, NaN, credit for a wrong answer"),
)
