"""Read right answers from the columns of the rows, and take wrong ones from other rows.

An answer is the value of a column, the part of this value that is marked as the answer, the word
that rewards accept for a number or a truth value, or a combination of several columns. Each way to
read answers has a description, such as "answer, after ####".
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from string import ascii_uppercase
from typing import Any

from grpo_nb.answers.find import extract_boxed, extract_hash_answer
from grpo_nb.reward_lab.programs import spoiled
from grpo_nb.reward_lab.scoring import TIE, Row, Scorer, prompt_text
from grpo_nb.reward_lab.source import columns_of, strings_of

OTHERS = 32  # distinct answers among which a row's wrong answer is looked for
PASSAGE = 25  # characters of a column, on average, that may be a passage of the prompt
COPIED = 0.3  # an answer that is more than this share of its prompt is the prompt
EXPRESSION = "an expression of the row's numbers"
TOOL_CALL = "a call of the row's tool"
JOINS = ("{} {}", "{}, {}", "({}, {})", "{}{}", "{}/{}", "{}-{}", "{}:{}")
RECORDS = (", as JSON", ", in tags")  # of several columns
MOST_JOINED = 3  # columns that are written together
SEPARATOR = re.compile(r"\W{1,4}|\s+(and|or|then)\s+")
COMMA, MOST_SEPARATORS = ", ", 8
VALUES, MOST_WORDS, FORMS = 8, 120, 12  # values whose words are looked for; what is tried
SAME = 4  # rows
BOX = re.compile(r"\[\s*" + r",\s*".join([r"(\d+(?:\.\d+)?)"] * 4) + r"\s*\]")
# Columns that hold answers; whether others, which rewards read too, do so is not known.
ANSWERS = re.compile(
    r"(?i)answer|solution|label|gold|reference|target|expected|truth|output|summar|respon|correct"
    r"|result|completion|final"
)
WIDTH = 24  # characters of the longest word
SECONDS = 0.5  # for the words in one form; slower rewards are not asked
USUAL = ("yes", "no", "Yes", "No", "true", "false", "True", "False")


def column_of(way: str) -> str:
    """Return the column named at the start of a description of how answers are read.

    >>> column_of("solution, after ####"), column_of("options[label]")
    ('solution', 'options')
    """
    return re.split(r"[.,\[]", way)[0]


def columns_in_use(scorer: Scorer) -> list[str]:
    """Return the columns that rewards read."""
    return sorted({name for func in scorer.funcs for name in columns_of(func, scorer.columns)})


def answers_to_try(scorer: Scorer) -> list[dict[str, dict[int, str]]]:
    """Return the ways to read answers, first from the columns that rewards read, then from others.

    A column that is a large part of the prompt holds no answers. A passage of the prompt is tried
    after the other columns.
    """
    in_use, separators, result = columns_in_use(scorer), separators_of(scorer), []
    for columns in (in_use, [name for name in scorer.columns if name not in in_use]):
        ways = answers_of(scorer.rows, columns, separators)
        ways = {way: each for way, each in ways.items() if not _is_prompt(scorer, each)}
        passages = {way: each for way, each in ways.items() if _is_passage(scorer, way, each)}
        ways = {way: each for way, each in ways.items() if way not in passages}
        if solved := solutions(scorer.rows, columns):
            ways = {EXPRESSION: solved, **ways}
        more = selected(scorer.rows, columns) | calls_of(scorer.rows, columns)
        result += [more | ways, passages]
    return [ways for ways in result if ways]


def solutions(rows: Sequence[Row], columns: Sequence[str]) -> dict[int, str]:
    """Return {row: an expression of its numbers that gives its target}, for rows of countdown.

    Rows of countdown have a number and a list of at most five numbers. For other data, the result
    is {}.

    >>> solutions([{"target": 93, "nums": [54, 34, 5]}], ["target", "nums"])
    {0: '(5 + 34) + 54'}
    """
    result = {}
    for number, row in enumerate(rows[:16]):
        values = [row.get(column) for column in columns]
        values += [part for v in values if isinstance(v, Mapping) for part in v.values()]
        lists = [v for v in values if isinstance(v, list) and 2 <= len(v) <= 5]
        lists = [v for v in lists if all(isinstance(n, int | float) for n in v)]
        goals = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(lists) == 1 and goals and (text := _reach(goals[0], lists[0])):
            result[number] = text
    return result if len(result) > len(rows[:16]) / 2 else {}


def calls_of(rows: Sequence[Row], columns: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return {way: {row: tool call as JSON}} for rows with a tool's name and its arguments.

    >>> calls_of([{"tool": "get_time", "args": '{"city": "Rome"}'}], ["tool", "args"])[TOOL_CALL]
    {0: '{"name": "get_time", "arguments": {"city": "Rome"}}'}
    """
    calls: dict[int, str] = {}
    for number, row in enumerate(rows):
        values = [row[column] for column in columns if column in row]
        tools = [value for value in values if isinstance(value, str) and value.isidentifier()]
        texts = [value if isinstance(value, dict) else _from_json(value) for value in values]
        objects = [value for value in texts if isinstance(value, dict)]
        if len(tools) == 1 and len(objects) == 1:
            calls[number] = json.dumps({"name": tools[0], "arguments": objects[0]})
    return {TOOL_CALL: calls} if len(calls) > len(rows) / 2 else {}


class Selected(dict[int, str]):
    """Hold right answers that are list entries; `others` has wrong ones from the same lists."""

    others: dict[int, str]


def selected(rows: Sequence[Row], columns: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return {way: {row: text}}: the list entry whose number or letter is in another column.

    Such a list holds the options of a question.

    >>> selected([{"options": ["sun", "sea"], "label": 1}], ["label", "options"])
    {'options[label]': {0: 'sea'}}
    """
    ways: dict[str, dict[int, str]] = {}
    for one, other in permutations(columns, 2):
        places = [_place(row.get(one), row.get(other)) for row in rows]
        if places and None not in places:
            lists = [row[one] for row in rows]
            answers = Selected({n: lists[n][place] for n, place in enumerate(places)})
            answers.others = {n: lists[n][place - 1] for n, place in enumerate(places)}
            ways[f"{one}[{other}]"] = answers
    return ways


def _place(texts: Any, place: Any) -> int | None:
    """Return the index that a number or letter gives in a list of distinct texts, else None."""
    if isinstance(place, str) and re.fullmatch(r"[A-Z]", place):
        place = ord(place) - ord("A")
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_list or not isinstance(place, int) or not len({*texts}) == len(texts) > 1:
        return None
    return place if 0 <= place < len(texts) else None


def words_for(
    scorer: Scorer, columns: Sequence[str], strings: Sequence[str], forms: Sequence[str]
) -> dict[str, dict[int, str]]:
    """Return {description: {number of a row: word}} for columns of whole numbers.

    A word stands for a column's value, such as a label for 0. It is the one that earns most.

    Args:
        scorer: The rewards with rows and weights.
        columns: The columns that the rewards read.
        strings: The strings of the rewards' code.
        forms: Forms in which a word may be written.
    """
    words = [text for text in strings if re.fullmatch(rf"\w[\w /&-]{{0,{WIDTH}}}", text)]
    words = list(dict.fromkeys([*words[:MOST_WORDS], *ascii_uppercase[:10], *USUAL]))
    short = [form for form in forms if "{reasoning}" not in form][:FORMS]
    ways = {}
    for column in columns:
        values = [row.get(column) for row in scorer.rows]
        if all(isinstance(value, int) for value in values):
            choice = _chosen(scorer, values, words, short)
            if answers := {n: choice[v] for n, v in enumerate(values) if v in choice}:
                ways[f"{column}, as a word"] = answers
    return ways


def _chosen(
    scorer: Scorer, values: Sequence[Any], words: Sequence[str], forms: Sequence[str]
) -> dict[Any, str]:
    """Return {value: the word that earns most}, in the first form that tells values apart.

    Each value must have a clear best word of its own; {} if no form gives that.
    """
    first: dict[Any, int] = {}
    for number, value in enumerate(values):
        first.setdefault(value, number)
    first = dict(list(first.items())[:VALUES])
    for form in forms:
        pairs = [(row, form.replace("{answer}", word)) for row in first.values() for word in words]
        if scorer.each.sum() * len(pairs) > SECONDS:
            break
        totals = scorer.totals(pairs).reshape(len(first), len(words))
        best = totals.argmax(axis=1)
        is_clear = (totals.max(axis=1) > totals.mean(axis=1) + TIE).all()
        if is_clear and len(first) > 1 and len(set(best)) == len(first):
            return {value: words[place] for value, place in zip(first, best, strict=True)}
    return {}


def joined(scorer: Scorer) -> dict[str, dict[int, str]]:
    """Return {way: {row: text}} of texts that combine two or three columns which the rewards read.

    Such a text is a value with its unit, a point, an answer with its citations, or a record.
    """
    ways: dict[str, dict[int, str]] = {}
    in_use = columns_in_use(scorer)
    each = [columns_of(func, scorer.columns) for func in scorer.funcs]
    texts = {name: {n: f"{row.get(name)}" for n, row in enumerate(scorer.rows)} for name in in_use}
    prompts = {n for n in in_use if _is_prompt(scorer, t := texts[n]) or _is_passage(scorer, n, t)}
    for names in {tuple(n for n in names if n not in prompts): None for names in (*each, in_use)}:
        for number, row in enumerate(scorer.rows if 2 <= len(names) <= MOST_JOINED else ()):
            values = {name: row.get(name) for name in names}
            for way, text in _together(values):
                ways.setdefault(way, {})[number] = text
    return {way: each for way, each in ways.items() if len(each) > len(scorer.rows) / 2}


def _together(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (description, text) of each way to write several values together."""
    names = ", ".join(values)
    if all(_is_single(value) or isinstance(value, list) for value in values.values()):
        yield f"{names}{RECORDS[0]}", json.dumps(values, default=str)
    if all(map(_is_single, values.values())):
        yield f"{names}{RECORDS[1]}", "\n".join(f"<{k}>{v}</{k}>" for k, v in values.items())
    for one, other in permutations(values, 2) if len(values) == 2 else ():
        if not _is_single(values[one]):
            continue
        if isinstance(values[other], list):
            marks = " ".join(f"[{each}]" for each in values[other])
            yield f"{one}, with [{other}]", f"{values[one]} {marks}"
        elif _is_single(values[other]):
            for join in JOINS:
                text = join.format(values[one], values[other])
                yield f"{one}, as {join.format(one, other)!r}", text


def _is_single(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _from_json(text: Any) -> Any:
    """Return the value of a text in JSON; None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return None


def _reach(goal: float, numbers: Sequence[float]) -> str:
    """Return an expression that uses each number once and gives the goal; "" if there is none."""
    states = [[(float(n), f"{n:g}") for n in numbers]]
    while states:
        state = states.pop()
        if len(state) == 1:
            if abs(state[0][0] - goal) < 1e-9:
                return state[0][1].removeprefix("(").removesuffix(")")
            continue
        for one, other in permutations(range(len(state)), 2):
            rest = [part for place, part in enumerate(state) if place not in (one, other)]
            (a, left), (b, right) = state[one], state[other]
            values = {"/": a / b if b else None, "*": a * b, "-": a - b, "+": a + b}
            for sign, value in values.items():
                if value is not None:
                    states.append([*rest, (value, f"({left} {sign} {right})")])
    return ""


def _is_prompt(scorer: Scorer, answers: Mapping[int, str]) -> bool:
    """Return whether most of these texts are a large part of their prompts."""
    prompts = {number: prompt_text(scorer.rows[number]) for number in list(answers)[:16]}
    parts = [len(answers[n]) / max(len(p), 1) * (answers[n] in p) for n, p in prompts.items()]
    return sum(part > COPIED for part in parts) > len(parts) / 2


def _is_passage(scorer: Scorer, way: str, answers: Mapping[int, str]) -> bool:
    """Return whether a column is a text from the prompt, such as a question, and not an answer."""
    if ANSWERS.search(way) or sum(map(len, answers.values())) < PASSAGE * len(answers):
        return False
    return all(answers[n] in prompt_text(scorer.rows[n]) for n in list(answers)[:16])


def separators_of(scorer: Scorer) -> list[str]:
    """Return texts that may separate the entries of a list: a comma, and those in the code."""
    strings = dict.fromkeys(text for func in scorer.funcs for text in strings_of(func))
    short = [text for text in strings if SEPARATOR.fullmatch(text)]
    return [COMMA, *(text for text in short if text.strip() != ",")][:MOST_SEPARATORS]


def answers_of(
    rows: Sequence[Row], columns: Sequence[str], separators: Sequence[str]
) -> dict[str, dict[int, str]]:
    """Return {description: {number of a row: answer}} for each way to read answers from columns."""
    ways: dict[str, dict[int, str]] = {}
    for number, row in enumerate(rows):
        for column in columns:
            for name, value in _leaves(column, row.get(column), separators):
                for way, text in _texts(name, value):
                    ways.setdefault(way, {})[number] = text
    enough = [way for way, answers in ways.items() if len(answers) > len(rows) / 4]
    # What is the same in every row is no answer, unless it is called so.
    enough = [
        w for w in enough if len(rows) < SAME or ANSWERS.search(w) or len({*ways[w].values()}) > 1
    ]
    distinct: dict[str, dict[int, str]] = {}
    for way in enough:
        if not any(ways[way] == other for other in distinct.values()):
            distinct[way] = ways[way]
    return distinct


def _leaves(name: str, value: Any, separators: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the single values in a column: numbers, texts, fields of a dict."""
    if _is_single(value):
        yield name, value
        if isinstance(parts := _from_json(value), Mapping):
            yield from _fields(name, parts, separators)
    elif isinstance(value, Mapping):
        yield from _fields(name, value, separators)
        yield name, json.dumps(value, default=str)
    elif isinstance(value, list) and value and isinstance(value[-1], Mapping | list):
        if isinstance(value[-1], Mapping) and "content" in value[-1]:
            yield f"{name}[-1]", value[-1]["content"] or ""  # the last turn of a chat
        elif all(isinstance(line, list) for line in value):
            yield f"{name}, in lines", "\n".join(" ".join(map(str, line)) for line in value)
        elif len(value) == 1:
            for key, part in value[0].items():
                yield from _leaves(f"{name}[0].{key}", part, separators)
        yield name, json.dumps(value, default=str)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], str | int | float):
        yield f"{name}[0]", value[0]
        for separator in separators:
            yield f"{name}, joined by {separator!r}", separator.join(map(str, value))
        yield f"{name}, in order", " > ".join(f"[{each}]" for each in value)
        yield name, json.dumps(list(value), default=str)


def _fields(
    name: str, value: Mapping[str, Any], separators: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each field of a dict; two fields also together, such as 25 m/s."""
    for key, part in value.items():
        yield from _leaves(f"{name}.{key}", part, separators)
    if len(value) == 2 and all(map(_is_single, value.values())):
        yield from ((f"{name}.{way}", text) for way, text in _together(value))


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (description, text) of each way to read an answer from a value."""
    text = str(value)
    if not text.strip() or text.lstrip("[\"' \n").startswith("assert"):  # no answer
        return
    if (marked := extract_hash_answer(text)) is not None:
        yield f"{name}, after ####", marked
    if (boxed := extract_boxed(text)) is not None:
        yield f"{name}, in \\boxed{{}}", boxed
    tags = re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", text, re.DOTALL)
    if BOX.search(inner := tags[-1][1] if tags else text):  # where to click
        yield f"{name}, boxes by their centre", BOX.sub(_centre, inner)
        yield f"{name}, boxes with sizes by their centre", BOX.sub(_centre_by_size, inner)
    if tags:
        yield f"{name}, in <{tags[-1][0]}>", tags[-1][1]
        if len(tags) == 1 and re.fullmatch(r"<(\w+)>.*</\1>", text.strip(), re.DOTALL):
            return
    if text.lstrip()[:1] == "[" and (first := _first_of(text)):
        yield f"{name}[0]", first
    if fenced := re.findall(r"```\w*\n(.*?)\n?```", text, re.DOTALL):
        yield f"{name}, in a block of code", fenced[-1]
    yield name, text.strip() if text.strip()[:1] not in ("$",) else text.strip().strip("$")


def _centre(box: re.Match[str]) -> str:
    """Return the centre of a box that is written as two corners."""
    a, b, c, d = map(float, box.groups())
    return f"[{(a + c) / 2:g}, {(b + d) / 2:g}]"


def _centre_by_size(box: re.Match[str]) -> str:
    """Return the centre of a box that is written as a corner with width and height."""
    a, b, width, height = map(float, box.groups())
    return f"[{a + width / 2:g}, {b + height / 2:g}]"


def _first_of(text: str) -> str:
    """Return the first entry of a list in JSON; "" for other texts."""
    entries = _from_json(text)
    first = entries[0] if isinstance(entries, list) and entries else ""
    return first if isinstance(first, str) else json.dumps(first)


def others_of(answers: Mapping[int, str]) -> dict[int, str]:
    """Return {row: a wrong answer}, which is another row's answer.

    If possible, the wrong answer neither contains the row's own answer nor is contained in it. If
    all rows have the same answer, the wrong answer is that answer, changed. For `Selected`, it is
    another entry of the row's list.
    """
    if isinstance(answers, Selected):
        return answers.others
    plain, others = {text: _plain(text) for text in answers.values()}, {}
    choice = list({short: text for text, short in plain.items()}.values())[:OTHERS]
    for number, answer in answers.items():
        rest = [text for text in choice if plain[text] != plain[answer]]
        apart = [text for text in rest if text not in answer and answer not in text]
        apart = [text for text in apart if not _is_near(answer, text)] or apart
        if apart or rest:
            pool = apart or rest
            others[number] = pool[number % len(pool)]
        else:
            others[number] = changed(answer)
    return others


def _is_near(answer: str, other: str) -> bool:
    """Return whether two numbers differ by less than half of the first."""
    try:
        return abs(float(answer) - float(other)) < abs(float(answer)) / 2
    except ValueError:
        return False


def changed(answer: str) -> str:
    """Return a wrong answer for data in which every answer is the same.

    >>> changed("18"), changed("B"), changed("yes")
    ('25', 'C', 'none of these')
    """
    if re.fullmatch(r"-?\d+(\.\d+)?", answer):
        return str(int(float(answer)) + 7)
    if re.fullmatch(r"[A-Ya-y]", answer):
        return chr(ord(answer) + 1)
    return spoiled(answer) or "none of these"


def _plain(text: str) -> str:
    return re.sub(r"\W+", "", text.casefold()) or text


def distinct_rows(answers: Mapping[int, str], count: int) -> list[int]:
    """Return at most `count` row numbers: one row for each distinct answer, then other rows."""
    first = list({_plain(text): number for number, text in reversed(answers.items())}.values())
    first.sort()
    return (first + [number for number in answers if number not in first])[:count]
