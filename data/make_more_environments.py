"""Write data/tasks/wordle.jsonl (400 rows) and python_sandbox.jsonl (200 rows).

    python data/make_more_environments.py

Rows, shortened:

    wordle          {"question": "Find the word. It is not cab: c absent, a elsewhere, b in place.",
                     "answer": "abb", "secret": "abb", "clue": "cab"}
    python_sandbox  {"question": "Write f(numbers) that returns the largest of the numbers above 4,
                     or 0 without one. f([7, 2, 9]) is 9.", "answer": "def f(numbers):\n    …",
                     "tests": '{"function": "f", "cases": [[[[7, 2, 9]], 9], [[[]], 0], …]}',
                     "example": "f([7, 2, 9])"}

`tests` is JSON text, for its values are of several types. No question stands twice.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from grpo_nb.environments.examples.wordle import hints

HERE = Path(__file__).parent
WORDS, PROGRAMS = 400, 200
SEED = 0
Row = dict[str, Any]

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


def wordle_rows() -> list[Row]:
    """A secret word, and a guess of another one with its hints; no question stands twice."""
    rng, rows = random.Random(SEED), {}
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
    while len(rows) < WORDS:
        secret, clue = rng.sample(words, 2)
        question = f"Find the word. It is not {clue}: {hints(clue, secret)}."
        row = {"question": question, "answer": secret, "secret": secret, "clue": clue}
        rows.setdefault(question, row)
    return list(rows.values())


def sandbox_rows() -> list[Row]:
    """Functions of a list of numbers, with tests that an empty list is among."""
    rng, rows = random.Random(SEED), {}
    while len(rows) < PROGRAMS:
        kept, made, k = rng.choice([*KEPT]), rng.choice([*MADE]), rng.randint(2, 9)
        condition = KEPT[kept].format(k=k)
        code = f"def f(numbers):\n    kept = [n for n in numbers if {condition}]\n"
        code += f"    return {MADE[made]}"
        space: dict[str, Any] = {}
        exec(code, space)
        given = [[rng.randint(-9, 20) for _ in range(size)] for size in (3, 4, 5, 6)]
        given += [[], [k], [k - 1, k, k + 1], [-k, 2 * k, 2 * k]]
        results = [space["f"](numbers) for numbers in given]
        if max(map(results.count, results)) > len(results) // 2:
            continue  # a constant would pass most tests
        example = f"f({given[0]})"
        question = f"Write f(numbers) that returns {made.format(kept=kept.format(k=k))}."
        cases = [[[numbers], result] for numbers, result in zip(given, results, strict=True)]
        row = {
            "question": f"{question} {example} is {results[0]}.",
            "answer": code,
            "tests": json.dumps({"function": "f", "cases": cases}),
            "example": example,
        }
        rows.setdefault(question, row)
    return list(rows.values())


def main() -> None:
    folder = HERE / "tasks"
    folder.mkdir(exist_ok=True)
    for name, rows in (("wordle", wordle_rows()), ("python_sandbox", sandbox_rows())):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
