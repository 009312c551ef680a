"""Write data/tasks/*.jsonl: 400 rows for each task that is not arithmetic.

    python data/make_tasks.py

Rows, shortened:

    code             {"question": "Write f(x) that returns 3 less than x.",
                      "answer": "def f(x):\n    return x - 3",
                      "tests": '{"function": "f", "cases": [[[-7], -10], [[0], -3], …]}'}
    summarization    {"question": "Text: The garden was wet. Ann sold the boat at noon. A dog slept
                      by the door.", "answer": "Ann sold the boat."}
    qa               {"question": "Read: Ben, a cook from Oslo, is 34. What is the job of Ben?",
                      "answer": "cook"}
    json_extraction  {"question": "Extract city, age: Ann is 34 and lives in Oslo.",
                      "answer": '{"city": "Oslo", "age": 34}'}

`tests` is JSON text, for its values are of several types. Own text, nothing scraped. No
question stands twice, and make_task_base.py leaves every one out of its training.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROWS = 400
SEED = 0

WORDS = {
    "name": "Ann Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo",
    "city": "Paris Oslo Rome Lima Cairo Delhi Tokyo Riga",
    "job": "cook nurse pilot baker judge farmer singer painter",
    "pet": "cat dog hen pony goat duck frog mouse",
    "item": "boat clock lamp chair violin tent mirror kettle",
    "place": "street garden market harbour station kitchen",
    "mood": "empty noisy dark warm crowded cold",
    "deed": "sold bought found lost painted broke hid repaired",
}
LISTS = {kind: words.split() for kind, words in WORDS.items()}

PHRASES = {  # what the function returns, in words; {k} is a number
    "x + {k}": ["x plus {k}", "{k} more than x"],
    "x - {k}": ["x minus {k}", "{k} less than x"],
    "{k} - x": ["{k} minus x", "x taken from {k}"],
    "x * {k}": ["x times {k}", "{k} times x"],
    "x // {k}": ["x divided by {k}, rounded down", "x floor-divided by {k}"],
    "x % {k}": ["x modulo {k}", "the remainder of x divided by {k}"],
    "max(x, {k})": ["the larger of x and {k}", "x, but at least {k}"],
    "min(x, {k})": ["the smaller of x and {k}", "x, but at most {k}"],
    "x > {k}": ["whether x is above {k}", "whether x is more than {k}"],
    "x < {k}": ["whether x is below {k}", "whether x is less than {k}"],
}
RECORDS = [  # sentences; some of their fields are extracted
    "{name}, a {job} from {city}, is {age}.",
    "{name} is {age} and lives in {city}.",
    "{name} from {city} works as a {job}.",
    "{name}, a {job}, is {age} years old.",
    "{name} paid {price} euros in {city}.",
]
QUESTIONS = {"job": "What is the job of {name}?", "city": "Which city is {name} from?"}
SCENES = [  # sentences beside the point
    "The {place} was {mood}.",
    "A {pet} slept by the {place}.",
    "It rained on the {place}.",
    "Nobody swept the {place}.",
]
DETAILS = ["at noon", "on Monday", "in a hurry", "after lunch", "with a smile", "last week"]


class Problem(NamedTuple):
    """A row, and completions for make_task_base.py: right, wrong, right in a broken format."""

    row: dict[str, str]
    right: str
    wrong: list[str]
    broken: list[str]


def program(expression: str) -> str:
    return f"def f(x):\n    return {expression}"


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"


def sample_code(rng: random.Random) -> Problem:
    """A function of x with one constant, named in words; wrong: another operation."""
    k = rng.randint(2, 60)
    form = rng.choice(list(PHRASES))
    phrase = rng.choice(PHRASES[form]).format(k=k)
    code = program(form.format(k=k))
    function = eval(f"lambda x: {form.format(k=k)}")
    inputs = sorted({-7, 0, 1, k - 1, k, k + 1, 3 * k + 2})
    tests = {"function": "f", "cases": [[[x], function(x)] for x in inputs]}
    row = {"question": f"Write f(x) that returns {phrase}.", "answer": code}
    return Problem(
        {**row, "tests": json.dumps(tests)},
        fenced(code),
        [fenced(program(other.format(k=k))) for other in PHRASES if other != form],
        [code, f"{fenced(code).removesuffix('```')}", fenced(code, "")],
    )


def sample_summary(rng: random.Random) -> Problem:
    """Three sentences, one of which says who did what; wrong: one beside the point, or all."""
    pick = {kind: rng.choice(words) for kind, words in LISTS.items()}
    point = "{name} {deed} the {item}".format(**pick)
    detail = rng.choice(DETAILS)
    beside = [scene.format(**pick) for scene in rng.sample(SCENES, 2)]
    sentences = [f"{point} {detail}.", *beside]
    rng.shuffle(sentences)
    text = " ".join(sentences)
    return Problem(
        {"question": f"Text: {text}", "answer": f"{point}."},
        f"{point}.",
        beside,
        [text, " ".join(beside)],
    )


def sample_fields(rng: random.Random) -> dict[str, str | int]:
    fields = {kind: rng.choice(LISTS[kind]) for kind in ("name", "city", "job")}
    return {**fields, "age": rng.randint(18, 60), "price": rng.randint(2, 60)}


def tagged(field: str, value: str) -> str:
    return f'<reasoning>"{field}": "{value}"</reasoning><answer>{value}</answer>'


def sample_qa(rng: random.Random) -> Problem:
    """A question on one of two facts about a person; wrong: the other fact."""
    fields = sample_fields(rng)
    record = rng.choice([r for r in RECORDS if all(f"{{{key}}}" in r for key in QUESTIONS)])
    asked, other = rng.sample(list(QUESTIONS), 2)
    question = f"Read: {record} {QUESTIONS[asked]}".format(**fields)
    right = tagged(asked, fields[asked])
    return Problem(
        {"question": question, "answer": fields[asked]},
        right,
        [tagged(other, fields[other])],
        [right.removesuffix("</answer>"), f"{asked} {fields[asked]}, so {fields[asked]}."],
    )


def sample_json(rng: random.Random) -> Problem:
    """A sentence and the fields wanted from it; wrong: one is missing or holds another's value."""
    values = sample_fields(rng)
    record = rng.choice(RECORDS)
    fields = [field for field in values if field != "name" and f"{{{field}}}" in record]
    wanted = rng.sample(fields, rng.randint(2, len(fields)))
    expected = {field: values[field] for field in wanted}
    question = f"Extract {', '.join(wanted)}: {record.format(**values)}"
    text = json.dumps(expected)
    missing = [json.dumps({k: v for k, v in expected.items() if k != field}) for field in wanted]
    twisted = dict(zip(wanted, [*expected.values()][1:] + [*expected.values()][:1], strict=True))
    return Problem(
        {"question": question, "answer": text},
        text,
        [*missing, json.dumps(twisted)],
        [text.removesuffix("}"), text.replace('"', "'"), text.removeprefix("{")],
    )


TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "code": sample_code,
    "summarization": sample_summary,
    "qa": sample_qa,
    "json_extraction": sample_json,
}


def read_questions(task: str) -> set[str]:
    """Every question of a shipped set."""
    lines = (HERE / f"tasks/{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["question"] for line in lines}


def sample_rows(task: str) -> list[dict[str, str]]:
    """The rows of a set: ROWS different questions."""
    rng = random.Random(SEED)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < ROWS:
        row = TASKS[task](rng).row
        rows.setdefault(row["question"], row)
    return list(rows.values())


def main() -> None:
    (HERE / "tasks").mkdir(exist_ok=True)
    for task in TASKS:
        lines = [json.dumps(row) + "\n" for row in sample_rows(task)]
        (HERE / f"tasks/{task}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
