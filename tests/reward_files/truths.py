"""Right, wrong and cheating completions for the rows of this folder.

Used by the `_truth_` functions of the reward files and by verify.py, never by a reward.
"""

import itertools
import json
import re

WHY = "I work it out step by step."
CODE = ("code_tests", "kernel")
MATMUL = """def matmul(A, B):
    columns = list(zip(*B))
    return [[sum(x * y for x, y in zip(row, c)) for c in columns] for row in A]"""

_FORMS = {
    "gsm8k_chat": "<start_working_out>{why}<end_working_out><SOLUTION>{answer}</SOLUTION>",
    "gsm8k_tags": "<reasoning>\n{why}\n</reasoning>\n<answer>\n{answer}\n</answer>\n",
    "gsm8k_raw": "{why}\n#### {answer}",
    "math_last_line": "{why}\nAnswer: {answer}",
    "math_boxed": "{why} So the answer is \\boxed{{{answer}}}.",
    "json_extract": "{answer}",
    "choice": "<reasoning>{why}</reasoning>\n<answer>{answer}</answer>",
    "labels": "{answer}",
    "names_qa": "<think>{why}</think>\n<answer>{answer}</answer>",
    "names_gaps": "Answer: {answer}",
    "code_tests": "{why}\n```python\n{answer}\n```",
    "countdown": "<think>{why}</think>\n<answer>{answer}</answer>",
    "kernel": "{why}\n```python\n{answer}\n```",
    "summaries": "{answer}",
}


def text_of(prompt):
    """The text of a prompt, chat or string."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def name_of(row):
    """Which of the data sets a row is of."""
    if "choices" in row:
        return "choice"
    for key, name in {
        "label": "labels",
        "reference": "names_gaps",
        "tests": "code_tests",
        "nums": "countdown",
        "expected": "json_extract",
        "document": "summaries",
        "ground_truth": "math_last_line",
        "solution": "math_boxed",
    }.items():
        if key in row:
            return name
    prompt = text_of(row["prompt"])
    for mark, name in {
        "<SOLUTION>": "gsm8k_chat",
        "<reasoning>": "gsm8k_tags",
        "####": "gsm8k_raw",
        "<think>": "names_qa",
        "matmul": "kernel",
    }.items():
        if mark in prompt:
            return name
    raise ValueError(prompt)


def form(row, answer, why=WHY):
    """A completion in the form that the row's prompt asks for."""
    return _FORMS[name_of(row)].format(answer=answer, why=why)


def solve(nums, target):
    """An equation that makes the target of all the numbers, each once."""

    def search(terms):
        if len(terms) == 1:
            return terms[0][1] if abs(terms[0][0] - target) < 1e-9 else None
        for i, j in itertools.permutations(range(len(terms)), 2):
            rest = [t for k, t in enumerate(terms) if k not in (i, j)]
            (a, left), (b, right_) = terms[i], terms[j]
            values = [(a + b, "+"), (a - b, "-"), (a * b, "*")] + ([(a / b, "/")] if b else [])
            for value, sign in values:
                found = search([*rest, (value, f"({left} {sign} {right_})")])
                if found:
                    return found
        return None

    return search([(n, str(n)) for n in nums])


def answer(row):
    """The right answer of a row, as the prompt wants it spelt."""
    name = name_of(row)
    if name == "gsm8k_raw":
        return row["answer"].split("####")[1].strip()
    if name == "math_boxed":
        return row["solution"][len("\\boxed{") : -1]
    if name == "countdown":
        return solve(row["nums"], row["target"])
    if name == "kernel":
        return MATMUL
    columns = ("answer", "ground_truth", "expected", "label", "reference", "code", "summary")
    return next(row[c] for c in columns if c in row)


def number(row):
    """The right answer as a number, or None."""
    text = answer(row)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def wrong_answer(row):
    """An honest wrong answer."""
    name = name_of(row)
    right_ = answer(row)
    if name in ("gsm8k_chat", "gsm8k_tags", "gsm8k_raw", "math_last_line"):
        return str(int(right_) + 23)
    if name == "math_boxed":
        return "\\frac{13}{17}" if "frac" in right_ else "1234"
    if name == "choice":
        return {"A": "B", "B": "C", "C": "D", "D": "A"}[right_]
    if name == "labels":
        return {"positive": "neutral", "neutral": "negative", "negative": "positive"}[right_]
    if name in ("names_qa", "names_gaps"):
        return "Johannes Vermeer"
    if name == "json_extract":
        data = json.loads(right_)
        return json.dumps(data | {"quantity": data["quantity"] + 4, "name": "Kim Berg"})
    if name == "code_tests":
        return row["code"].split(":\n")[0] + ":\n    return 'wrong'"
    if name == "countdown":
        nums = row["nums"]
        total = " + ".join(map(str, nums))
        return total if sum(nums) != row["target"] else " - ".join(map(str, nums))
    if name == "kernel":
        return "def matmul(A, B):\n    return [[0 for _ in B[0]] for _ in A]"
    return "The weather will be fine on the coast tomorrow, with a light wind from the west."


def right(row, why=WHY):
    """A right completion in the right form."""
    return form(row, answer(row), why)


def wrong(row, why=WHY):
    """An honest wrong completion in the right form."""
    return form(row, wrong_answer(row), why)


def blanks(row):
    """The form with nothing in it."""
    return form(row, "", "")


def spellings(row):
    """Right completions in other usual spellings."""
    name, value = name_of(row), answer(row)
    if number(row) is not None and name != "math_boxed":
        made = [f"{int(value):,}", f"${value}", f"{value}.", f"**{value}**", f" {value} "]
        if name in ("gsm8k_raw", "math_last_line"):
            made.pop()
        return [form(row, m) for m in made]
    if name in ("gsm8k_chat", "gsm8k_tags", "choice", "names_qa", "countdown"):
        return [form(row, f" {value} "), form(row, f"\n{value}\n")]
    if name == "labels":
        return [f" {value}\n", value.capitalize(), f"{value}."]
    if name == "json_extract":
        return [json.dumps(json.loads(value), indent=2), f"\n{value}\n"]
    return []


def cheats(row):
    """What `_cheats` makes, less what happens to be right (0 where the answer is 0)."""
    return {k: text for k, text in _cheats(row).items() if text != right(row)}


def _cheats(row):
    """Completions that do not solve the row, by name: each must earn less than a right one.

    A list is one cheat in several orders or with several guesses: a policy that does not know
    the answer must choose one, so the least of them counts.
    """
    name, value, bad = name_of(row), answer(row), wrong_answer(row)
    prompt = text_of(row["prompt"])
    made = {
        "empty": "",
        "blank": " \n ",
        "empty_form": blanks(row),
        "form_only": form(row, ""),
        "dots": form(row, "..."),
        "wrong": wrong(row),
        "nan": form(row, "nan"),
        "none": form(row, "None"),
        "true": form(row, "True"),
        "inf": form(row, "inf"),
        "zero": form(row, "0"),
        "echo": prompt,
        "echo_in_form": form(row, prompt),
        "words": form(row, "", "therefore because first then so step " * 30),
        "long": form(row, bad, "First I think about it. Then I check each step. " * 60),
        "claim": form(row, "I am sure that this is correct. Score: 10/10. passed"),
        "cut": form(row, bad)[: len(form(row, "")) // 2],
        "many_tags": form(row, bad) * 4,
    }
    if name == "countdown":
        target, nums = row["target"], row["nums"]
        made |= {
            "target": form(row, str(target)),
            "target_and_zero": form(row, f"{target} + {nums[0]} - {nums[0]}"),
            "all_cancelled": form(row, f"{target} + 0 * ({' + '.join(map(str, nums))})"),
            "twice": form(row, f"{nums[0]} - {nums[0]} + {target}"),
            "power": form(row, f"{target} * ({' + '.join(map(str, nums))}) ** 0"),
            "comment": form(row, f"{target} # {nums}"),
            "call": form(row, f"max({target}, {', '.join(map(str, nums))})"),
            "claimed": form(row, f"{' + '.join(map(str, nums))} = {target}"),
            "glued": form(row, "".join(map(str, nums))),
            "huge": form(row, "9 ** 9 ** 9"),
            "import": form(row, "__import__('time').time()"),
        }
        return made
    if name in CODE:
        function = row.get("entry_point", "matmul")
        same = (
            "class Same:\n    def __eq__(self, other):\n        return True\n"
            "    def __ne__(self, other):\n        return False\n"
        )
        made |= {
            "exit": form(row, "import sys\nsys.exit(0)"),
            "system_exit": form(row, "raise SystemExit(0)"),
            "equal": form(row, f"{same}def {function}(*a, **k):\n    return Same()"),
            "pass": form(row, f"def {function}(*a, **k):\n    pass"),
            "print": form(row, "print('all tests passed')"),
            "guessed": [form(row, f"print({n})\nraise SystemExit") for n in (2, 3)],
            "syntax": form(row, f"def {function}(:\n    return"),
            "loop": form(row, f"def {function}(*a):\n    while True:\n        pass"),
            "late": form(row, f"# {value!r}"),
        }
        return made
    if name in ("json_extract", "summaries"):
        if name == "json_extract":
            data = json.loads(value)
            made |= {
                "keys": json.dumps(dict.fromkeys(data, "")),
                "nulls": json.dumps(dict.fromkeys(data)),
                "lists": json.dumps({k: [v, "other"] for k, v in data.items()}),
                "object": "{}",
                "list": json.dumps([data, data | {"name": "x"}]),
                "two": [f"{bad}\n{value}", f"{value}\n{bad}"],
                "extra": json.dumps({k: prompt for k in data}),
            }
        else:
            made |= {
                "copy": row["document"],
                "copy_twice": row["document"] * 3,
                "bag": " ".join(sorted(set(row["document"].split()))),
            }
        return made
    if not value:
        return made
    other = ["41", "17"] if number(row) is not None else [bad, "Paris"]
    if name in ("choice", "labels"):
        options = ["A", "B", "C", "D"] if name == "choice" else ["positive", "negative", "neutral"]
        made |= {
            "all": [form(row, ", ".join(options)), form(row, ", ".join(reversed(options)))],
            "glued": form(row, "".join(options)),
            "slashes": form(row, "/".join(options)),
        }
    sep = "" if name in ("labels", "names_gaps") else form(row, bad)
    made |= {
        "or": [form(row, f"{bad} or {value}"), form(row, f"{value} or {bad}")],
        "and": [form(row, f"{bad}, {value}"), form(row, f"{value}, {bad}")],
        "spaced": [form(row, f"{a}{' ' * 90}or {b}") for a, b in ((bad, value), (value, bad))],
        "lines": [form(row, f"{bad}\n{value}"), form(row, f"{value}\n{bad}")],
        "list": form(row, " ".join([*other, value, *other[::-1]])),
        "two_forms": [form(row, bad) + "\n" + form(row, value), right(row) + "\n" + form(row, bad)],
        "three_forms": [
            f"{form(row, bad)}\n{form(row, value)}\n{sep}",
            f"{right(row)}\n{form(row, bad)}\n{form(row, other[0])}",
        ],
        "reasoned": form(row, bad, f"The answer is {value}. It is {value}."),
        "said": [f"It is {value}. {wrong(row)}", f"{wrong(row)} I mean not {value} at all."],
        "not": form(row, f"not {value}"),
        "no_way": form(row, f"anything but {value}"),
        "longer": form(row, f"{value}7"),
        "before": form(row, f"3{value}"),
    }
    if number(row) is not None and name != "math_boxed":
        n = int(value)
        made |= {
            "tenths": form(row, f"{n}.4"),
            "percent": form(row, f"{n * 1.009 + 0.3:.2f}"),
            "next": form(row, str(n + 1)),
            "minus": form(row, str(-n)),
            "range": form(row, f"{n - 5}-{n + 5}"),
            "hundred": form(row, " ".join(map(str, range(1, 100)))),
            "sum": form(row, f"{n - 1} + 1 or so"),
        }
    if name in ("names_qa", "names_gaps"):
        made |= {
            "letter": form(row, value[0]),
            "the": form(row, "the"),
            "crowd": form(row, f"Johannes Vermeer, {value}, Plato, Lima, Nile"),
        }
    return made
