"""Write data/arithmetic.jsonl: 1,024 two-operand word problems, each number pair once.

    python data/make_arithmetic.py

A row: {"question": "Ann has 47 apples and buys 38 more. How many apples does Ann have
now?", "answer": "85", "a": 47, "operator": "+", "b": 38}. No (a, operator, b) stands
twice, so a split by rows cannot leak, and make_tiny_base.py leaves every one of them
out of the base model's training. Own text, nothing scraped.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
ROWS = 1024
SEED = 0

NAMES = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo"]
THINGS = ["apples", "books", "coins", "eggs", "pens", "shells", "stamps", "tickets"]
TEMPLATES = {
    "+": [
        "What is {a} + {b}?",
        "Add {b} to {a}.",
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "{name} finds {a} {things} on Monday and {b} on Tuesday. How many is that?",
        "A box holds {a} {things}, a bag holds {b}. How many {things} are there?",
        "A bus carries {a} people and {b} get on. How many people are on it now?",
    ],
    "-": [
        "What is {a} - {b}?",
        "Take {b} from {a}.",
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "{name} needs {a} {things} and has {b}. How many are missing?",
        "A shop has {a} {things} and sells {b}. How many {things} are left?",
        "A bus carries {a} people and {b} get off. How many people are on it now?",
    ],
}

Problem = tuple[int, str, int]


def sample_problem(rng: random.Random) -> Problem:
    """Two numbers of two digits, added, or the smaller taken from the larger."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return (a, "+", b) if rng.random() < 0.5 else (max(a, b), "-", min(a, b))


def result(problem: Problem) -> int:
    a, operator, b = problem
    return a + b if operator == "+" else a - b


def phrase(problem: Problem, template: str, rng: random.Random) -> str:
    a, _, b = problem
    return template.format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))


def read_problems(path: Path = HERE / "arithmetic.jsonl") -> set[Problem]:
    """The (a, operator, b) of every row in the shipped file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["a"], row["operator"], row["b"]) for row in rows}


def main() -> None:
    rng = random.Random(SEED)
    problems: dict[Problem, None] = {}
    while len(problems) < ROWS:
        problems[sample_problem(rng)] = None
    with (HERE / "arithmetic.jsonl").open("w", encoding="utf-8") as file:
        for a, operator, b in problems:
            template = rng.choice(TEMPLATES[operator])
            row = {
                "question": phrase((a, operator, b), template, rng),
                "answer": str(result((a, operator, b))),
                "a": a,
                "operator": operator,
                "b": b,
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
