"""Generate rows by a task of reasoning-gym, which has sizes, a seed and a scorer.

    data.source=reasoning-gym:chain_sum

A row's column `entry` holds, as JSON text, what the task's scorer reads beside the answer.
"""

import io
import json
import random
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from grpo_nb.files import read_yaml
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.gym import gym_reward, library

NAME = "reasoning-gym:"
ROWS = 1000  # as many are asked for if data.max_rows is 0
TRIES = 4  # how many rows are made for each row asked for, as questions repeat
MOST = 20_000  # rows that every generator can make
REFUSED = read_yaml(Path(__file__).with_suffix(".yaml"))
COMMUTED = {"chain_sum", "decimal_chain_sum", "products", "gcd", "lcm"}
SETTINGS = {"answer_kind": "text", "answer_format": "as_is", "extra_columns": ""}
SETTINGS |= {"question_column": "question", "answer_column": "answer", "image_column": ""}
Row = dict[str, Any]


def is_gym(source: str) -> bool:
    """Return whether a source names a task of reasoning-gym."""
    return source.startswith(NAME)


def rows(config: Any) -> Iterator[Row]:
    """Yield rows with different questions, at most as many as asked for.

    Args:
        config: The arguments of `prepare`: source, options, seed, max_rows and form.

    Raises:
        ValueError: The package is missing, or the task is unknown or refused.
        Exception: The task's generator refuses its options.
    """
    task, form, options = config.source.removeprefix(NAME), config.form, dict(config.options)
    refuse_unknown("task of reasoning-gym", task, sorted(library().factory.DATASETS))
    if task in REFUSED:
        raise ValueError(f"{NAME}{task} cannot be used: {REFUSED[task]}")
    size = min(MOST, TRIES * (config.max_rows or ROWS) + 10)
    questions = set()
    # A generator makes row n by the number seed + n, so seeds side by side would share their rows.
    seed = random.Random(f"{config.seed} {task}").getrandbits(31)
    with redirect_stdout(io.StringIO()):  # some generators print
        dataset = library().create_dataset(task, size=size, seed=seed, **options)
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
