"""Score answers to the tasks of reasoning-gym, whose scorers expect honest answers.

Five of these scorers run an answer as Python code. Four of them do so only to pay partial credit,
so they get only right answers (`WHOLE`). The fifth, countdown, gets only arithmetic without powers,
and so does coin_flip, whose scorer builds a fraction of any size (`COMPUTED`).
"""

import json
import re
from functools import cache
from typing import Any

from grpo_nb.answers.forms import TAGS, Form
from grpo_nb.rewards.contract import Scored, reward

LONGEST_CHARACTERS = 10_000
NO_NUMBER = re.compile(r"(?i)\b(?:nan|inf|infinity)[ij]?\b")  # two scorers take it for right
# Tasks whose scorers run whatever is not right as code, for a part of the points.
WHOLE = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
# Tasks whose scorers compute a number from an answer: powers and exponents make it huge.
COMPUTED = {"countdown", "coin_flip"}
ARITHMETIC = re.compile(r"(?![\s\S]*\*\*)[\d\s+*/().-]{1,200}")
INSTALL = "reasoning-gym is not installed: pip install 'reasoning-gym==0.1.25', or '.[gym]'"


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
    if fault := _fault(text, answer, about):
        return Scored(0.0, fault)
    try:
        dataset = _dataset(about["task"], json.dumps(about["options"]))
        points = float(dataset.score_answer(text, about | {"answer": answer}))
    except Exception as error:  # each scorer raises its own errors for what it cannot read
        return Scored(0.0, f"{about['task']} raised {error!r:.100}")
    score = min(1.0, max(0.0, points))
    return Scored(score if partial else float(score >= 1), f"{about['task']} gives {points}")


def _fault(text: str, answer: str, about: dict[str, Any]) -> str:
    """Return why an answer cannot be right and is not given to the scorer; "" if it may be."""
    task = about["task"]
    if not text or len(text) > LONGEST_CHARACTERS:
        return f"an answer of {len(text)} characters"
    if text == answer:
        return ""
    if NO_NUMBER.search(text):
        return "not a number"
    if task in WHOLE and text not in about["metadata"].get("valid_answers", ()):
        return "not the answer"
    if task in COMPUTED and not ARITHMETIC.fullmatch(text):
        return f"not written as an answer to {task} may be"
    return ""
