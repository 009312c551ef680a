r"""Write data/tasks/calculator.jsonl, guess.jsonl, wordle.jsonl and python_sandbox.jsonl.

    python data/make_environments.py

Rows, shortened, 400 of each, 200 of the last:

    calculator      {"question": "What is 47 times 38?", "answer": "1786", "a": 47, "b": 38}
    guess           {"question": "Guess my number: from 41 to 48.", "answer": "45", "low": 41,
                     "secret": 45}
    wordle          {"question": "Find the word. It is not cab: c absent, a elsewhere, b in place.",
                     "answer": "abb", "secret": "abb", "clue": "cab"}
    python_sandbox  {"question": "Write f(numbers) that returns the largest of the numbers above 4,
                     or 0 without one. f([7, 2, 9]) is 9.", "answer": "def f(numbers):\n    …",
                     "tests": '{"function": "f", "cases": [[[[7, 2, 9]], 9], [[[]], 0], …]}',
                     "example": "f([7, 2, 9])"}

What stands beside question and answer is for the environment's `reset`; `tests` is JSON text, for
its values are of several types. No question stands twice, and make_agent_base.py leaves every row
of the first two out of its training.
"""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.environments.examples.guess import NUMBERS
from grpo_nb.environments.examples.wordle import hints

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
WORDS = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
KEPT = {  # which numbers; {k} is a number
    "above {k}": "n > {k}",
    "below {k}": "n < {k}",
    "divisible by {k}": "n % {k} == 0",
    "other than {k}": "n != {k}",
}
MADE = {  # what is made of them; each meets the empty list in a way of its own
    "the largest of the numbers {kept}, or 0 without one": "max(kept, default=0)",
    "the smallest of the numbers {kept}, or 0 without one": "min(kept, default=0)",
    "the sum of the squares of the numbers {kept}": "sum(n * n for n in kept)",
    "how many of the numbers are {kept}": "len(kept)",
    "the mean of the numbers {kept}, rounded down, or 0 without one": (
        "sum(kept) // len(kept) if kept else 0"
    ),
    "the numbers {kept}, each once, in descending order": "sorted(set(kept), reverse=True)",
    "the last of the numbers {kept}, or None without one": "kept[-1] if kept else None",
    "whether every number is {kept}": "len(kept) == len(numbers)",
}


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


def sample_wordle(rng: random.Random) -> Start:
    """A secret word, and a guess of another one with its hints."""
    secret, clue = rng.sample(WORDS, 2)
    question = f"Find the word. It is not {clue}: {hints(clue, secret)}."
    return Start({"question": question, "answer": secret, "secret": secret, "clue": clue})


def sample_python_sandbox(rng: random.Random) -> Start:
    """A function of a list of numbers, with tests that an empty list is among."""
    kept, made, k = rng.choice([*KEPT]), rng.choice([*MADE]), rng.randint(2, 9)
    condition = KEPT[kept].format(k=k)
    code = f"def f(numbers):\n    kept = [n for n in numbers if {condition}]\n"
    code += f"    return {MADE[made]}"
    exec(code, space := {})
    given = [[rng.randint(-9, 20) for _ in range(size)] for size in (3, 4, 5, 6)]
    given += [[], [k], [k - 1, k, k + 1], [-k, 2 * k, 2 * k]]
    results = [space["f"](numbers) for numbers in given]
    if max(map(results.count, results)) > len(results) // 2:
        return sample_python_sandbox(rng)  # a constant would pass most tests
    example = f"f({given[0]})"
    question = f"Write f(numbers) that returns {made.format(kept=kept.format(k=k))}."
    cases = [[[numbers], result] for numbers, result in zip(given, results, strict=True)]
    row = {"question": f"{question} {example} is {results[0]}.", "answer": code}
    row |= {"tests": json.dumps({"function": "f", "cases": cases}), "example": example}
    return Start(row)


ENVIRONMENTS = {
    "calculator": (sample_calculator, 400),
    "guess": (sample_guess, 400),
    "wordle": (sample_wordle, 400),
    "python_sandbox": (sample_python_sandbox, 200),
}


def make_rows(environment: str) -> list[Row]:
    """The rows of an environment, no question twice, whatever its example."""
    rng, rows = random.Random(SEED), {}
    sample, count = ENVIRONMENTS[environment]
    while len(rows) < count:
        row = sample(rng).row
        rows.setdefault(row["question"].partition(row.get("example", "\n"))[0], row)
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
