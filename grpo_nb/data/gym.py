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
from itertools import zip_longest
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
        config: The arguments of `prepare`: source, options, seed, max_rows, levels and form.

    Raises:
        ValueError: The package is missing, or the task is unknown, refused or has no levels.
        Exception: The task's generator refuses its options.
    """
    task = config.source.removeprefix(NAME)
    refuse_unknown("task of reasoning-gym", task, sorted(library().factory.DATASETS))
    if task in REFUSED:
        raise ValueError(f"{NAME}{task} cannot be used: {REFUSED[task]}")
    if not config.levels:
        yield from _rows(task, dict(config.options), config)
        return
    levels = range(1, config.levels + 1)
    options = [of_level(task, level) | config.options for level in levels]
    made = [_rows(task, options, config) for options in options]
    for turn in zip_longest(*made):
        for level, row in zip(levels, turn, strict=True):
            if row:
                yield row | {"level": level}


def _rows(task: str, options: dict[str, Any], config: Any) -> Iterator[Row]:
    """Yield the rows of a task with these options, each question once."""
    size, form = min(MOST, TRIES * (config.max_rows or ROWS) + 10), config.form
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


def of_level(task: str, level: int) -> dict[str, Any]:
    """Return the options of a level of the task's curriculum, which begins at 1.

    Raises:
        ValueError: The task has no curriculum.
    """
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    factory = library().factory
    if not factory.has_curriculum(task):
        raise ValueError(f"{NAME}{task} has no levels: set data.levels = 0")
    curriculum, usual = factory.create_curriculum(task), factory.DATASETS[task][1]()
    curriculum.set_global_level(level - 1)
    context = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)  # this level alone
    options = vars(curriculum.generate_configuration(context=context))
    return {name: value for name, value in options.items() if value != getattr(usual, name)}


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
