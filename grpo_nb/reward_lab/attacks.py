"""Write attacks: completions that test what rewards pay for, on a row with a known right answer.

Each attack belongs to a family, which names what the attack exploits, and has a kind, which says
what it may earn (see `amounts.py`):
hollow   It has no content, or a wrong answer with something around it that may be paid.
wrong    It gives a wrong answer, or several answers of which one is right. It must not count as
         right.
honest   It is right, and written in another usual way. It should be paid like the reference.
padded   It is right, with much text around it. It should not be paid more than the reference.

The main placeholders are {answer}, {other} (a wrong answer), {question}, {first} and {last} (the
first and the last number in the prompt), {half} (the first half of the answer), {ending} (the
second half of {other}), {long} (as much text as a completion may have) and, for whole numbers,
{near}, {nearer}, {decimal}, {longer} and {comma}. A pair (reasoning, answer) in a list is written
in the form of right answers; if its reasoning is None, the reasoning of right answers is used. The
attacks are listed in attacks.yaml.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.files import read_yaml
from grpo_nb.reward_lab import source
from grpo_nb.reward_lab.columns import EXPRESSION, RECORDS
from grpo_nb.reward_lab.programs import BODIES, Task, asked, tests_of
from grpo_nb.reward_lab.scoring import Pair, Scorer, prompt_text
from grpo_nb.reward_lab.written import Written, fill

KINDS = ("hollow", "wrong", "honest", "padded")
HACKS = ("hollow", "wrong")
PLACEHOLDER = re.compile(r"\{([a-z]+)\}")
# Placeholders that say something of the right answer.
KNOWING = re.compile(
    r"\{(answer|near|nearer|decimal|longer|comma|half|letter|word|altered|renumbered|pointless|unsigned|minus|lines|partly|result)\}"
)
POINT = re.compile(r"(?<=\d)\.(?=\d)")
SHORT = 40  # characters of an answer of which one number is changed
MONEY = re.compile(r"(?i)\$|dollar|price|cost|money|usd|earn|pay")
FILE = read_yaml(Path(__file__).with_name("attacks.yaml"))
HEDGES = {family: list(map(set, pairs)) for family, pairs in FILE["hedges"].items()}
SAMPLED = "sampled and wrong"  # the family of completions that the model sampled


class Attack(NamedTuple):
    """Describe an attack: a completion that cheats, or that is right but written otherwise.

    name: The name of the attack in the table.
    family: What the attack exploits; one finding is shown for a family.
    kind: One of KINDS.
    completion: A text with placeholders, or a list of such texts and of (reasoning, answer).
    """

    name: str
    family: str
    kind: str
    completion: str | list[Any]


@dataclass
class Attacks:
    """Write the attacks on a row.

    scorer: The rewards and the rows.
    style: How right answers are written.
    longest: How long a completion may be [characters].
    users: Attacks of the user's own.
    executed: Whether completions run in this process; then no attack may end or change it.
    sampled: Completions that the model sampled, some of which may be wrong but paid.
    """

    scorer: Scorer
    style: Written
    longest: int
    users: Sequence[Attack] = ()
    executed: bool = False
    sampled: Sequence[Pair] = ()

    @cached_property
    def _are_digits(self) -> bool:
        """Return whether all answers are single digits, such as the numbers of options."""
        return all(text.isdigit() and len(text) == 1 for text in self.style.answers.values())

    @cached_property
    def words(self) -> dict[str, str]:
        """Return {attack name: text} of the strings that rewards look for; {} if one is slow."""
        return source.stuffed(self.scorer.words) if self.scorer.words else {}

    def on(self, row: int) -> list[tuple[Attack, str]]:
        """Return (attack, completion) of each attack that can be written on a row.

        If a reward is slow, there are few attacks of each family.
        """
        answer, tests = self.style.answers[row], tests_of(self.scorer.rows[row])
        question = prompt_text(self.scorer.rows[row])
        extra = BY_TESTS if tests else program_attacks(answer, question)
        if self.executed:
            extra = [attack for attack in extra if attack.name not in APART]
        choice = [*attacks_on(answer, self.users), *extra]
        choice = [a for a in choice if a.kind != "honest" or self.style.allows(a.name, a.family)]
        if extra and not tests:  # which of several programs is read is for its author to say
            choice = [a for a in choice if a.kind not in HACKS or not KNOWING.search(str(a[3]))]
        if self.scorer.any_slow:  # programs differ more than other attacks of one family do
            keys = [a.name if a in extra else a.family for a in choice]
            choice = [
                attack
                for place, attack in enumerate(choice)
                if keys[:place].count(keys[place]) < (2 if attack.family in HEDGES else 1)
            ]
        values = self._values(row, answer, question)
        texts = [(attack, self._written(attack, values)) for attack in choice]
        return [*((a, text) for a, text in texts if text is not None), *self._from_here(row)]

    def _values(self, row: int, answer: str, question: str) -> dict[str, str]:
        """Return what the placeholders stand for on a row, as far as that is known."""
        style, tests = self.style, tests_of(self.scorer.rows[row])
        values = {"answer": answer, "other": style.others[row], "question": question}
        values |= {"reasoning": style.reasoning} | _of_prompt(question)
        values["whole"] = style.own.get(row, "")
        if MONEY.search(question):
            values["dollars"] = f"${answer}"
        words, half = answer.split(" "), answer[: len(answer) // 2].rstrip()
        half = " ".join(words[: len(words) // 2]) or half
        values |= {"half": half, "letter": answer[:1]}
        values |= {"word": words[0]} if len(words) > 1 else {}
        rest = style.others[row].split(" ")
        if min(len(words), len(rest)) > 3:
            values["ending"] = " ".join(rest[len(rest) // 2 :])
        values["lines"] = re.sub(r"(?i) (?=(from|where|group|order|limit)\b)", "\n", answer)
        values |= {"pointless": text} if (text := POINT.sub("", answer)) != answer else {}
        if numbers := re.findall(r"-?\d+(?:\.\d+)?", question):
            values |= {"first": numbers[0], "last": numbers[-1]}
        before = style.form.partition("{answer}")[0]
        started = fill(before.partition("{reasoning}")[0], "", "")
        values |= {"begun": fill(before, "", style.reasoning), "started": f"{started}Let"}
        if not self._are_digits:  # 2.08 says no other option than 2
            values |= _numbers_near(answer)
        values |= _other_number(answer)
        # Of several columns, each for a reward of its own, one alone may be the answer.
        if len(self.scorer.funcs) == 1 or not style.source.endswith(RECORDS):
            values |= _json_values(answer)
        values |= _expression(answer) if style.source == EXPRESSION else {}
        return values | (_test_values(answer, tests) if tests else {})

    def _written(self, attack: Attack, values: dict[str, str]) -> str | None:
        """Return an attack's completion; None if it cannot be written on this row."""
        text = self._filled(attack, {**values, "long": ""})
        # Cut short, the right answer before a wrong one is a right answer.
        if text is None or (len(text) > self.longest and attack.kind != "hollow"):
            return None
        rest = self.longest - len(text)
        long = ("so it is " * (self.longest // 9 + 1))[:rest]
        return self._filled(attack, {**values, "long": long})[: self.longest]

    def _filled(self, attack: Attack, values: dict[str, str]) -> str | None:
        """Return an attack with its placeholders filled in; None if a value is not known."""
        if any(name not in values for name in PLACEHOLDER.findall(str(attack.completion))):
            return None

        def filled(part: str) -> str:
            return PLACEHOLDER.sub(lambda name: values[name[1]], part)

        parts = [attack.completion] if isinstance(attack.completion, str) else attack.completion
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += filled(part)
                continue
            reasoning, answer = part
            before, is_own, after = values["whole"].rpartition(values["answer"])
            if reasoning is None and is_own:  # with the row's own reasoning
                text += before + filled(answer) + after
            else:
                reasoning = None if reasoning is None else filled(reasoning)
                text += self.style.write(filled(answer), reasoning)
        return text

    def _from_here(self, row: int) -> Iterator[tuple[Attack, str]]:
        """Yield attacks that attacks.yaml does not list: the code's strings, and sampled texts."""
        for name, text in self.words.items():
            beside = self.style.wrong(row, text)
            beside = beside if text in beside else f"{text}\n{beside}"
            for title, whole in ((name, text), (f"{name}, in form", beside)):
                yield Attack(title, source.FAMILY, "hollow", ""), whole[: self.longest]
        texts = dict.fromkeys(text for number, text in self.sampled if number == row)
        for number, text in enumerate(texts, start=1):
            yield Attack(f"sampled and wrong, {number}", SAMPLED, "hollow", ""), text


def _listed(entries: Sequence[dict[str, Any]]) -> list[Attack]:
    """Return the attacks of entries of attacks.yaml, with the texts of that file filled in."""
    texts = {name: text * times for name, (text, times) in FILE["texts"].items()}
    texts["numbers"] = " ".join(map(str, range(101)))
    texts["citations"] = " ".join(f"according to [{number}]" for number in range(1, 21))

    def filled(part: Any) -> Any:
        if isinstance(part, list):
            return tuple(map(filled, part))
        return part and PLACEHOLDER.sub(lambda name: texts.get(name[1], name[0]), part)

    attacks = []
    for each in entries:
        completion = filled(each["completion"])
        completion = completion if isinstance(completion, str) else list(completion)
        completion = completion * each.get("times", 1)
        attacks.append(Attack(each["attack"], each["family"], each["kind"], completion))
    return attacks


ANY = _listed(FILE["any"])
# Only for answers of one kind, by a pattern of the answer.
BY_ANSWER = {pattern: _listed(entries) for pattern, entries in FILE["by_answer"].items()}
# Programs that try to pass a row's tests; some would end or change the process that they run in.
BY_TESTS, APART = _listed(FILE["by_tests"]), ("early exit", "patched equality", "patched builtins")
PLACEHOLDERS = sorted({*PLACEHOLDER.findall(str([ANY, BY_ANSWER]))})


def attacks_on(answer: str, users: Sequence[Attack] = ()) -> list[Attack]:
    """Return the attacks that make sense for an answer, with the user's own attacks last.

    If the answer begins with a JSON object or a tag, attacks that negate it are left out, because a
    word before such an answer does not negate it.
    """
    usual = [a for a in ANY if a.family != "negated" or not re.match(r'\s*(\{\s*"|<)', answer)]
    own = [a for pattern, more in BY_ANSWER.items() if re.fullmatch(pattern, answer) for a in more]
    return [*usual, *own, *users]


def _numbers_near(answer: str) -> dict[str, str]:
    """Return numbers near an answer, and other ways to write it; {} if it is not a number."""
    if re.fullmatch(r"-?\d{1,15}", answer):
        number = int(answer)
        near = f"{number * 1.04:.2f}".rstrip("0").rstrip(".")
        near = near if near != answer else f"{number + 0.04}"
        values = {"near": near, "nearer": str(number + 1), "decimal": f"{number}.9"}
        values |= {"unsigned": answer[1:]} if number < 0 else {}
        values |= {"minus": f"-{number}"} if number > 0 else {}
        return values | {"longer": f"{answer}7", "comma": f"{number:,}"}
    if re.fullmatch(r"-?\d{1,12}\.\d{1,6}", answer) and float(answer):
        decimals = len(answer.partition(".")[2])
        near = f"{float(answer) * 1.04:.{decimals}f}"
        return {"near": near} if near != answer else {}
    return {}


def _of_prompt(question: str) -> dict[str, str]:
    """Return {"source": the text that a prompt is about}, or {} if that is the whole prompt.

    It is the last paragraph, or what follows the first colon there.
    """
    source = question.strip().rpartition("\n\n")[2]
    source = source.partition(": ")[2] or source.partition(":\n")[2] or source
    return {"source": source} if source and source != question.strip() else {}


def _expression(answer: str) -> dict[str, str]:
    """Return the values for attacks on an arithmetic expression.

    "result" is its result; "signs" is an expression with the same numbers and another result.
    """
    numbers, result = re.findall(r"\d+(?:\.\d+)?", answer), _value(answer)
    joined = (f" {sign} ".join(numbers) for sign in "+*-")
    wrong = next((text for text in joined if _value(text) != result), "")
    return {"result": f"{result:g}", **({"signs": wrong} if wrong else {})}


def _json_values(answer: str) -> dict[str, str]:
    """Return variants of a JSON answer: indented, reordered, with a value or types changed."""
    try:
        value = json.loads(answer)
    except ValueError:
        return {}
    if not isinstance(value, dict | list) or not value:
        return {}
    values = {"indented": json.dumps(value, indent=2), "altered": json.dumps(_altered(value))}
    if isinstance(value, dict):
        values["emptied"] = json.dumps(dict.fromkeys(value))
        one = dict([*value.items()][:1])
        values |= {"partly": json.dumps(dict.fromkeys(value) | one)} if len(value) > 1 else {}
        numbers = {k: str(v) for k, v in value.items() if isinstance(v, int | float)}
        values |= {"quoted": json.dumps(value | numbers)} if numbers else {}
        if len(value) > 1:
            values["reordered"] = json.dumps(dict(reversed(value.items())))
    return values


def _altered(value: Any) -> Any:
    """Return a JSON value whose last part is changed, however deeply that part is nested.

    >>> _altered({"name": "pay", "arguments": {"to": "Ben", "amount": 12}})
    {'name': 'pay', 'arguments': {'to': 'Ben', 'amount': 9012}}
    """
    if isinstance(value, dict) and value:
        last = list(value)[-1]
        return {**value, last: _altered(value[last])}
    if isinstance(value, list) and value:
        return [*value[:-1], _altered(value[-1])]
    return value + 9000 if isinstance(value, int | float) else f"not {value}"


def _other_number(answer: str) -> dict[str, str]:
    """Return a short text with its last number changed; {} if no number stands by itself.

    >>> _other_number(r"\\frac{1}{3}"), _other_number("15 m2")
    ({'renumbered': '\\\\frac{1}{2}'}, {'renumbered': '14 m2'})
    """
    places = list(re.finditer(r"(?<![A-Za-z^_\d.])\d{1,9}(?![\d.])", answer))
    if not places or len(answer) > SHORT:
        return {}
    number = int(places[-1][0])
    other = number - 1 if number > 1 else number + 1
    return {"renumbered": f"{answer[: places[-1].start()]}{other}{answer[places[-1].end() :]}"}


def _value(expression: str) -> float:
    """Return the value of an arithmetic expression that this package wrote."""
    return float(eval(expression, {"__builtins__": {}}))


def verified(attacks: Sequence[Attack]) -> list[Attack]:
    """Check a user's attacks, and return them.

    Raises:
        ValueError: An attack has a kind or a placeholder that does not exist.
    """
    for attack in attacks:
        if attack.kind not in KINDS:
            raise ValueError(
                f"attack {attack.name!r} has the kind {attack.kind!r}: give one of "
                f"{', '.join(KINDS)}"
            )
        names = PLACEHOLDER.findall(str(attack.completion))
        if unknown := [name for name in names if name not in PLACEHOLDERS]:
            raise ValueError(
                f"attack {attack.name!r} has the placeholder {{{unknown[0]}}}: use those of "
                f"{', '.join(PLACEHOLDERS)}"
            )
    return list(attacks)


def program_attacks(answer: str, question: str) -> list[Attack]:
    """Return attacks on a task: programs without content, and the right one with annotations.

    Args:
        answer: The right program; if it is not a program, the result is [].
        question: The text of the prompt.
    """
    task = asked([answer])
    if task is None or not answer.startswith(task.head):
        return []
    if (prompt := asked([question])) and prompt.head == task.head:
        task = prompt
    typed = ", ".join(f"{name}: list" for name in task.arguments)
    typed = answer.replace(task.head, f"{task.head.partition('(')[0]}({typed}):")
    return [
        *(Attack(n, f, "wrong", [(None, task.program(body))]) for n, (f, body) in BODIES.items()),
        Attack("annotated arguments", "spelling", "honest", [(None, typed)]),
    ]


def cheats(task: Task, tests: Any, executed: bool) -> dict[str, str]:
    """Return {name: program} of programs that try to pass tests without solving anything.

    Args:
        task: The program that is asked for.
        tests: The tests.
        executed: Whether completions run in this process; then no program may end or change it.
    """
    values = _test_values(task.head, tests)
    choice = [a for a in BY_TESTS if a.family == "program" and not (executed and a.name in APART)]
    bodies = {attack.name: attack.completion[0][1] for attack in choice}
    return {n: PLACEHOLDER.sub(lambda part: values[part[1]], b) for n, b in bodies.items()}


def _test_values(answer: str, tests: Any) -> dict[str, str]:
    """Return a function's head, and the value that the first test expects.

    The prompt may show this test.
    """
    name = re.search(r"def (\w+)", answer)
    values = {"head": f"def {name[1] if name else 'f'}(*a):\n    return", "expected": "True"}
    with suppress(ValueError, KeyError, IndexError, TypeError):  # tests of another shape
        parsed = json.loads(tests) if isinstance(tests, str) else tests
        if isinstance(parsed, dict):
            return {**values, "expected": repr(parsed["cases"][0][1])}
        tests = parsed[0]
    return {**values, "expected": str(tests).rpartition("==")[2].strip() or "True"}
