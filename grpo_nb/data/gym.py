"""Generate rows with the tasks of reasoning-gym, each of which has sizes, a seed and a scorer.

    data.source=reasoning-gym:chain_sum         sums
    data.source=reasoning-gym:3*chain_sum+gcd   three of four rows are sums

A row's column `entry` holds, as JSON text, what the task's scorer reads in addition to the answer.
"""

import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from grpo_nb.checks import Check
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
    """Return whether a source names tasks of reasoning-gym."""
    return source.startswith(NAME)


def weights_of(source: str) -> dict[str, float]:
    """Return the weight of each task of a source.

    >>> weights_of("reasoning-gym:3*chain_sum+gcd")
    {'chain_sum': 3.0, 'gcd': 1.0}
    """
    parts = [part.rpartition("*") for part in source.removeprefix(NAME).split("+")]
    return {task.strip(): float(weight or 1) for weight, _, task in parts}


def rows(config: Any) -> Iterator[Row]:
    """Yield rows with different questions, at most `max_rows` of them (ROWS if it is 0).

    Args:
        config: The arguments of `prepare`: source, options, seed, max_rows and form.

    Raises:
        ValueError: The package is missing, a task or an option is unknown, a task is refused, or
            its generator fails.
    """
    weights, target = weights_of(config.source), config.max_rows or ROWS
    size = min(MOST, TRIES * target + 10)
    sources = {(task, n): _rows(task, size, config, n) for task in weights for n in _levels(config)}
    draw = random.Random(config.seed)
    while sources and target:
        source = draw.choices([*sources], [weights[task] for task, _ in sources])[0]
        if row := next(sources[source], None):
            target -= 1
            yield row
        else:
            del sources[source]


def _levels(config: Any) -> Sequence[int]:
    return range(1, config.levels + 1) if config.levels else [0]


def _rows(task: str, size: int, config: Any, level: int = 0) -> Iterator[Row]:
    """Yield the rows of one task, each question once.

    Level 0 uses only the options that were set; other levels add those of the curriculum.
    """
    refuse_unknown("task of reasoning-gym", task, sorted(library().factory.DATASETS))
    if task in REFUSED:
        raise ValueError(f"{NAME}{task} cannot be used: {REFUSED[task]}")
    options = options_of(task, config)
    options = of_level(task, level) | options if level else options
    form, questions = config.form, set()
    # A generator makes row n by the number seed + n, so seeds side by side would share their rows.
    seed = random.Random(f"{config.seed} {task}").getrandbits(31)
    try:
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
                raise ValueError(f"its own answer earns nothing in this form: {scored.reason}")
            row = {"question": item["question"], "answer": answer, "entry": entry}
            yield row | ({"level": f"{task} {level}"} if level else {})
    except Exception as error:  # a generator may raise anything, such as for an option's value
        raise ValueError(
            f"{NAME}{task} with data.options = {options} made no row ({error or repr(error)}): "
            "change data.options, or take another task" + " or fewer data.levels" * (level > 0)
        ) from error


def of_level(task: str, level: int) -> dict[str, Any]:
    """Return the options of a level of the task's curriculum; levels are counted from 1.

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


def options_of(task: str, config: Any) -> dict[str, Any]:
    """Return the options of one task: those nested under its name, or all if none are nested.

    Raises:
        ValueError: There are several tasks, and options are not nested under their names.
    """
    weights = weights_of(config.source)
    if len(weights) == 1 and task not in config.options:
        return dict(config.options)
    for name, options in config.options.items():
        refuse_unknown("task in data.options", name, [*weights])
        if not isinstance(options, dict):
            raise ValueError(f"data.options: {name} = {options!r}: write {{{name}: {{…}}}}")
    return dict(config.options.get(task, {}))


def _key(task: str, question: str) -> Any:
    """Return a key that is equal for questions that ask the same, such as 4 + 3 and 3 + 4.

    >>> _key("chain_sum", "4 + 3 - 2 =") == _key("chain_sum", "3 - 2 + 4 =")
    True
    >>> _key("gcd", "Of 26, 760.") == _key("gcd", "Of 760, 26.")
    True
    """
    if task not in COMMUTED:
        return " ".join(question.casefold().split())
    terms = re.findall(r"[-+*/]?\s*\d+(?:\.\d+)?", question)
    return tuple(sorted(re.sub(r"[+*\s]", "", term) for term in terms))


def figures(splits: Mapping[str, Sequence[Row]], config: Any) -> dict[str, Any]:
    """Return how many questions differ, and how often the best constant answer is right.

    Raises:
        ValueError: Fewer than half of the rows asked for are left.
    """
    left, target = sum(map(len, splits.values())), config.max_rows or ROWS
    if left < target / 2:
        raise ValueError(
            f"{config.source}: {left} different rows of {target} are left; set data.max_rows = "
            f"{left} if these are enough, or larger sizes in data.options"
        )
    answers = Counter(row["answer"] for row in splits["eval"])
    [(constant, times)] = answers.most_common(1)
    share = times / len(splits["eval"])
    return {"questions": left, "constant_answer": constant, "constant_share": share}


def check(about: Mapping[str, Any]) -> Check:
    """Return the check of stage 01 on the figures that `figures` returned."""
    share, constant = about["constant_share"], about["constant_answer"]
    evidence = f"{about['questions']} different questions; {constant[:40]!r}, always the same "
    evidence += f"answer, is right for {share:.0%} of the held-out ones"
    fix = "larger sizes (data.options), or compare with this share" if share > 0.5 else ""
    return Check("generated rows", "warning" if fix else "ok", evidence, fix)
