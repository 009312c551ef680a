"""Write data/word_problems.jsonl: 800 word problems of one or two steps, for a small real model.

    python data/make_word_problems.py

A row, as in GSM8K:

    {"question": "Ann has 6 pens. Ben gives her 3 more. How many pens does Ann have now?",
     "answer": "6 + 3 = 9\n#### 9"}

Own text, nothing scraped. Two of three problems take two steps. No question stands twice.
"""

import json
import random
from pathlib import Path

PATH = Path(__file__).with_name("word_problems.jsonl")
ROWS = 800
SEED = 0
NAMES = "Ann Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noah Olga Pia"
THINGS = "apples books coins eggs marbles pens shells stamps stickers tickets"

# Text with its question, and the steps: each uses numbers of the text (a, b, c) or the result of
# the step before (r).
ONE_STEP = [
    ("{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?", ["a + b"]),
    ("There are {a} {t} in one box and {b} in another. How many {t} are there in all?", ["a + b"]),
    ("{n} had {a} {t} and lost {b} of them. How many {t} are left?", ["a - b"]),
    ("{n} has {a} {t}, {m} has {b}. How many more {t} has {n} than {m}?", ["a - b"]),
    ("{n} buys {b} bags with {c} {t} in each. How many {t} does {n} buy?", ["b * c"]),
    ("{b} children have {c} {t} each. How many {t} do they have together?", ["b * c"]),
]
TWO_STEPS = [
    (
        "{n} has {a} {t} and buys {b} more. Then {n} gives {c} to {m}. How many {t} has {n} now?",
        ["a + b", "r - c"],
    ),
    (
        "{n} has {b} boxes with {c} {t} in each, and {a} {t} more. How many {t} has {n}?",
        ["b * c", "r + a"],
    ),
    (
        "{n} has {a} {t}. {m} has {b} fewer than {n}. How many {t} do they have together?",
        ["a - b", "a + r"],
    ),
    (
        "{n} has {a} {t}. {m} has {b} more than {n}. How many {t} do they have together?",
        ["a + b", "a + r"],
    ),
    (
        "{n} had {a} coins and sells {b} {t} for {c} coins each. How many coins has {n} now?",
        ["b * c", "a + r"],
    ),
    (
        "{n} finds {a} {t} on Monday, {b} on Tuesday and {c} on Friday. How many {t} is that?",
        ["a + b", "r + c"],
    ),
    (
        "A shop has {a} {t}. It sells {b} at noon and {c} in the evening. How many {t} are left?",
        ["a - b", "r - c"],
    ),
    (
        "{n} packs {b} bags with {c} {t} each, {m} packs one with {a}. How many {t} are packed?",
        ["b * c", "r + a"],
    ),
]


def sample(rng: random.Random) -> dict[str, str]:
    """Return a row: numbers stay below 100, and no result is negative."""
    text, steps = rng.choice(ONE_STEP if rng.random() < 1 / 3 else TWO_STEPS)
    n, m = rng.sample(NAMES.split(), 2)
    numbers = {"a": rng.randint(8, 20), "b": rng.randint(2, 6), "c": rng.randint(2, 5)}
    lines = []
    for step in steps:
        written = " ".join(str(numbers.get(part, part)) for part in step.split())
        numbers["r"] = eval(written)
        lines.append(f"{written} = {numbers['r']}")
    question = text.format(n=n, m=m, t=rng.choice(THINGS.split()), **numbers)
    return {"question": question, "answer": "\n".join([*lines, f"#### {numbers['r']}"])}


def main() -> None:
    rng, rows = random.Random(SEED), {}
    while len(rows) < ROWS:
        row = sample(rng)
        rows.setdefault(row["question"], row)
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    PATH.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
