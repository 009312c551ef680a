"""Score answers to the tasks of reasoning-gym, whose scorers are made for honest programs.

Some of these scorers run an answer as Python code, and some numbers are too large for others. Such
an answer is scored in the sandbox, and only if it is written as an answer of its task may be
(`EVALUATED`), so that it cannot forge its score there.
"""

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_nb.answers.forms import TAGS, Form
from grpo_nb.rewards.contract import Scored, reward

LONGEST_CHARACTERS = 10_000
NO_NUMBER = re.compile(r"(?i)\b(?:nan|inf|infinity)[ij]?\b")  # two scorers take it for right
NUMBERS, LISTS = r"(?!.*\*\*)[\d\s+*/().-]{1,200}", r"[\w\s\[\]'\",]{1,1000}"
FUNCTIONS = "asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|exp|log|ln|sqrt|Abs|pi"
FORMULA = rf"(?:[\d\s+*/().^-]|\b(?:[A-Za-z]|{FUNCTIONS})\b){{1,200}}"
# {task whose scorer runs an answer as code: what an answer may be written as}
EVALUATED = dict.fromkeys(("countdown", "puzzle24"), NUMBERS)
EVALUATED |= dict.fromkeys(("simple_integration", "intermediate_integration"), FORMULA)
EVALUATED |= {"polynomial_multiplication": FORMULA, "coin_flip": NUMBERS}
EVALUATED |= dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix"), LISTS)
EVALUATED |= {"string_insertion": LISTS}
INSTALL = "reasoning-gym is not installed: pip install 'reasoning-gym==0.1.25', or '.[gym]'"
SECONDS = 2  # for an answer that is scored in the sandbox
# Only the scorer's own module is imported, for the whole package takes seconds.
PROGRAM = r"""
import importlib, json, os, sys, types
os.environ["OPENBLAS_NUM_THREADS"] = "1"
scorers = {}

def prepare(place, *_):
    folders, module, kind, options = place
    if str(place) in scorers:
        return
    sys.path += [folder for folder in folders if folder not in sys.path]
    parts = module.split(".")
    for depth in (1, 2):
        name = ".".join(parts[:depth])
        package = sys.modules.setdefault(name, types.ModuleType(name))
        package.__path__ = [os.path.join(folder, *parts[:depth]) for folder in folders]
    made = importlib.import_module(module)
    config = getattr(made, kind.replace("Dataset", "Config"))(size=1, seed=0, **json.loads(options))
    scorers[str(place)] = getattr(made, kind)(config).score_answer

def answer(place, text, entry):
    return scorers[str(place)](text, json.loads(entry))
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


@reward(max_none_share=0.05, resists="code, endless numbers, NaN, credit for a wrong answer")
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
    text, about = (form.extract(response) or "").strip(), json.loads(entry)
    scored = _scored(text, about | {"answer": answer})
    if scored.score is None or partial:
        return scored
    return scored._replace(score=float(scored.score >= 1))


def _scored(text: str, entry: dict[str, Any]) -> Scored:
    """Return the points of an answer, which are not scored if it cannot be right."""
    task, answer = entry["task"], entry["answer"]
    if not text or len(text) > LONGEST_CHARACTERS:
        return Scored(0.0, f"an answer of {len(text)} characters")
    if NO_NUMBER.search(text) and text != answer:
        return Scored(0.0, "not a number")
    if task not in EVALUATED:
        return _points(text, entry)
    if text == answer:
        return Scored(1.0, "the reference answer")
    if not re.fullmatch(EVALUATED[task], text):
        return Scored(0.0, f"not written as an answer to {task} may be")
    return evaluate(text, entry)


def _points(text: str, entry: dict[str, Any]) -> Scored:
    """Return the score of an answer by its task's scorer, which does not run it as code."""
    try:
        points = _dataset(entry["task"], json.dumps(entry["options"])).score_answer(text, entry)
        return Scored(min(1.0, max(0.0, float(points))), f"{entry['task']} gives {points}")
    except Exception as error:  # each scorer raises its own errors for what it cannot read
        return Scored(0.0, f"{entry['task']} raised {error!r:.100}")


@cache
def _server(folders: tuple[str, ...]) -> Any:
    from grpo_nb.sandbox.server import Server

    return Server(PROGRAM, folders)


def evaluate(text: str, entry: dict[str, Any]) -> Scored:
    """Return the score of an answer by its task's scorer, which runs it as code, in the sandbox."""
    kind = library().factory.DATASETS[entry["task"]][0]
    specs = [find_spec(name) for name in ("reasoning_gym", "sympy", "mpmath", "numpy", "yaml")]
    folders = sorted({str(Path(spec.origin).resolve().parents[1]) for spec in specs if spec})
    place = [folders, kind.__module__, kind.__name__, json.dumps(entry["options"])]
    try:
        points = _server(tuple(folders)).ask(place, text, json.dumps(entry), seconds=SECONDS)
    except RuntimeError as error:
        return Scored(None, str(error))
    if points is None:
        return Scored(0.0, f"{entry['task']} did not score it in {SECONDS} s")
    return Scored(min(1.0, max(0.0, points)), f"{entry['task']} gives {points}, in the sandbox")
