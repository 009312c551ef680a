"""Write data/tasks/calculator.jsonl and guess.jsonl.

    python data/make_environments.py

Rows, 400 of each:

    calculator      {"question": "What is 47 times 38?", "answer": "1786", "a": 47, "b": 38}
    guess           {"question": "Guess my number: from 41 to 48.", "answer": "45", "low": 41,
                     "secret": 45}

What stands beside question and answer is for the environment's `reset`. No question stands twice,
and make_agent_base.py leaves every row out of its training.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.environments.examples import NUMBERS

HERE = Path(__file__).parent
SEED = 0
Row = dict[str, Any]

PRODUCTS = [
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "What is {a} * {b}?",
    "{a} x {b} = ?",
    "Find the product of {a} and {b}.",
    "How much is {a} times {b}?",
    "A box holds {a} pens. How many do {b} boxes hold?",
    "A row has {a} seats. How many are in {b} rows?",
]
OPENINGS = [
    "Guess my number",
    "Find my number",
    "What is my number",
    "Guess what I have in mind",
    "Let us play",
]
RANGES = ["from {low} to {high}", "between {low} and {high}", "{low} to {high}"]


class Start(NamedTuple):
    """A row, and the number of its wording."""

    row: Row
    wording: int = 0


def sample_calculator(rng: random.Random, limits: Sequence[int] = (99,)) -> Start:
    """A product of two numbers, each from 11 to one of the limits."""
    a, b = (rng.randint(11, rng.choice(limits)) for _ in range(2))
    wording = rng.randrange(len(PRODUCTS))
    question = PRODUCTS[wording].format(a=a, b=b)
    return Start({"question": question, "answer": str(a * b), "a": a, "b": b}, wording)


def sample_guess(rng: random.Random) -> Start:
    """A secret among eight numbers that share their tens."""
    low, wording = 10 * rng.randrange(10) + rng.randrange(3), rng.randrange(len(OPENINGS))
    among = rng.choice(RANGES).format(low=low, high=low + NUMBERS - 1)
    secret = rng.randrange(low, low + NUMBERS)
    question = f"{OPENINGS[wording]}: {among}."
    row = {"question": question, "answer": str(secret), "low": low, "secret": secret}
    return Start(row, wording)


ENVIRONMENTS = {"calculator": sample_calculator, "guess": sample_guess}
COUNT = 400


def make_rows(environment: str) -> list[Row]:
    """Return the rows of an environment, no question twice."""
    rng, rows = random.Random(SEED), {}
    while len(rows) < COUNT:
        row = ENVIRONMENTS[environment](rng).row
        rows.setdefault(row["question"], row)
    return list(rows.values())


def read_rows(environment: str) -> list[Row]:
    """The rows as they were written."""
    path = HERE / f"tasks/{environment}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    folder = HERE / "tasks"
    folder.mkdir(exist_ok=True)
    for environment in ENVIRONMENTS:
        lines = [json.dumps(row) + "\n" for row in make_rows(environment)]
        (folder / f"{environment}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
