"""How right and how fast are the rewards? Figures for docs/rewards.md.

    python benchmarks/rewards.py [GSM8K.jsonl]

Reference answers are those of the file, or of the built-in arithmetic set. Each is written in many
right and wrong ways; correctness has to tell them apart. Throughput is a ratio to
math-verify on the same rows, in the same run. Floods are of a megabyte each.
"""

import sys
import time
from pathlib import Path

from math_verify import parse, verify

from grpo_nb.answers import parse_number
from grpo_nb.data import answer_finder, sources
from grpo_nb.rewards import math_verify_reward, numeric_correctness_reward
from grpo_nb.rewards.sets import built_in
from grpo_nb.runs.settings import DataConfig

FORMS = {
    "tagged": "<reasoning>1+1=2</reasoning><answer>{}</answer>",
    "raw": "{}",
    "boxed": r"so it is \boxed{{{}}}.",
    "####": "because it is so\n#### {}",
}
RESTYLED = [
    "{}.",
    "**{}**",
    "${}",
    "{} apples",
    "{}.0",
    r"\${}",
    "  {}  ",
    "+{}",
    r"{} \text{{ cm}}",
]
NEAR = ["{}1", "1{}", "-{}", "{} or 7", "7 or {}", "7 = {}", "it is not {}", "{}.5", "{} 7", "{}e1"]
FLOODS = ("<answer>", "1+", "1 + ", "[1] ", "{", "```python\n", "a ", r"\boxed{", "<think>", "½")
COLUMNS = {"answer": "1"}


def expected(path: str | None) -> list[str]:
    config = DataConfig(source=str(Path(path).resolve())) if path else DataConfig()
    find_answer = answer_finder("auto")
    numbered = sources.read(config)
    return [find_answer(row["answer"]) for _, row in numbered]


def accuracy(answers: list[str]) -> None:
    whole = [
        expected
        for expected in answers
        if (parse_number(expected) or 0) > 0 and "." not in expected
    ]
    for name, form in FORMS.items():
        right = [form.format(expected) for expected in whole]
        wrong = [form.format(int(expected.replace(",", "")) + 1) for expected in whole]
        scores = numeric_correctness_reward(completions=right + wrong, answer=whole * 2)
        share = sum(s == (i < len(right)) for i, s in enumerate(scores)) / len(scores)
        print(f"accuracy, {name:<8} {share:.4f} of {len(scores)}")
    for title, styles in (("recall, restyled", RESTYLED), ("false positives, near", NEAR)):
        texts = [FORMS["tagged"].format(s.format(expected)) for expected in whole for s in styles]
        columns = [expected for expected in whole for _ in styles]
        scores = numeric_correctness_reward(completions=texts, answer=columns)
        print(f"{title}: {sum(scores) / len(scores):.4f} of {len(scores)}")


def throughput(answers: list[str]) -> None:
    rows = [(FORMS["boxed"].format(expected), expected) for expected in answers]
    texts, columns = zip(*rows, strict=True)

    def timed(score) -> float:
        started = time.perf_counter()
        score()
        return len(rows) / (time.perf_counter() - started)

    def plain() -> None:
        for text, expected in rows:
            verify(parse(f"${expected}$", parsing_timeout=None), parse(text, parsing_timeout=None),
                   timeout_seconds=None)  # fmt: skip

    plain()
    base = timed(plain)
    print(f"math-verify: {base:.0f} completions/s")
    for func in (numeric_correctness_reward, math_verify_reward):
        mine = timed(lambda func=func: func(completions=list(texts), answer=list(columns)))
        print(f"{func.__name__}: {mine:.0f} completions/s, {mine / base:.0f} times math-verify")


def floods() -> None:
    slowest = (0.0, "", "")
    for name, func in built_in().items():
        if {"tests", "environments", "entry"} & {*func.columns}:  # they run programs, tools, tasks
            continue
        given = dict(COLUMNS, answer="{}") if name.startswith("json") else COLUMNS
        columns = {column: [given[column]] for column in func.columns}
        func(completions=["warm"], **columns)
        for flood in FLOODS:
            started = time.perf_counter()
            func(completions=[flood * (1_000_000 // len(flood))], **columns)
            slowest = max(slowest, (time.perf_counter() - started, name, flood))
    print(f"slowest on a megabyte: {slowest[0]:.2f} s, {slowest[1]} on {slowest[2]!r}")


if __name__ == "__main__":
    expected_answers = expected(sys.argv[1] if len(sys.argv) > 1 else None)
    accuracy(expected_answers)
    throughput(expected_answers)
    floods()
