"""Hold the tasks of reasoning-gym: rows by their generators, and the reward by their scorers.

    data.source=reasoning-gym:chain_sum

A row's column `entry` holds, as JSON text, what the task's scorer reads beside the answer.

The scorers are made for honest programs. Five of them run an answer as Python code. Four do so only
where they pay a part of the points: they get no answer but a right one (`WHOLE`). countdown gets
only arithmetic without powers.
"""

import io
import json
import random
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from grpo_nb.answers.forms import TAGS, Form
from grpo_nb.files import read_yaml
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.contract import Scored, reward

NAME = "reasoning-gym:"
ROWS = 1000  # as many are asked for if data.max_rows is 0
TRIES = 4  # how many rows are made for each row asked for, as questions repeat
MOST = 20_000  # rows that every generator can make
REFUSED = read_yaml(Path(__file__).with_suffix(".yaml"))
COMMUTED = {"chain_sum", "decimal_chain_sum", "products", "gcd", "lcm"}
LONGEST_CHARACTERS = 10_000
NO_NUMBER = re.compile(r"(?i)\b(?:nan|inf|infinity)[ij]?\b")  # two scorers take it for right
# Tasks whose scorers run whatever is not right as code, for a part of the points.
WHOLE = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
# Tasks whose scorers compute an answer: Python's or sympy's numbers grow without end by powers.
COMPUTED = {"countdown", "coin_flip"}
ARITHMETIC = re.compile(r"(?![\s\S]*\*\*)[\d\s+*/().-]{1,200}")


def is_gym(source: str) -> bool:
    """Return whether a source names a task of reasoning-gym."""
    return source.startswith(NAME)


def rows(config: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with different questions, at most as many as asked for.

    Args:
        config: The arguments of `prepare`: source, options, seed, max_rows and form.

    Raises:
        ImportError: The package is missing: `pip install '.[gym]'` in a clone.
        ValueError: The task is unknown or refused.
        Exception: The task's generator refuses its options.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    task, form, options = config.source.removeprefix(NAME), config.form, dict(config.options)
    refuse_unknown("task of reasoning-gym", task, sorted(DATASETS))
    if task in REFUSED:
        raise ValueError(f"{NAME}{task} cannot be used: {REFUSED[task]}")
    size = min(MOST, TRIES * (config.max_rows or ROWS) + 10)
    questions = set()
    # A generator makes row n by the number seed + n, so seeds side by side would share their rows.
    seed = random.Random(f"{config.seed} {task}").getrandbits(31)
    with redirect_stdout(io.StringIO()):  # some generators print
        dataset = create_dataset(task, size=size, seed=seed, **options)
    for number in range(size):
        with redirect_stdout(io.StringIO()):
            item = dataset[number]
        if (key := _key(task, item["question"])) in questions:
            continue
        questions.add(key)
        about = {"task": task, "options": options, "metadata": item["metadata"]}
        answer, entry = item["answer"].strip(), json.dumps(about, default=str)
        scored = gym_reward.score(form.write(None, answer), answer, entry, form=form)
        if answer and scored.score != 1:
            raise ValueError(f"{NAME}{task}: its own answer earns nothing: {scored.reason}")
        yield {"question": item["question"], "answer": answer, "entry": entry}


def _key(task: str, question: str) -> Any:
    """Return what two questions share if they ask the same: 4 + 3 asks what 3 + 4 does.

    >>> _key("chain_sum", "4 + 3 - 2 =") == _key("chain_sum", "3 - 2 + 4 =")
    True
    >>> _key("gcd", "Of 26, 760.") == _key("gcd", "Of 760, 26.")
    True
    """
    if task not in COMMUTED:
        return " ".join(question.casefold().split())
    terms = re.findall(r"[-+*/]?\s*\d+(?:\.\d+)?", question)
    return tuple(sorted(re.sub(r"[+*\s]", "", term) for term in terms))


@cache
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(options))


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
    dataset = _dataset(about["task"], json.dumps(about["options"]))
    try:
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
