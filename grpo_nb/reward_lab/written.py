"""Find how a right answer is written, so that rewards can be tested without a declared form.

A *form* is a text with {reasoning} and {answer} in it, such as
"<think>{reasoning}</think><answer>{answer}</answer>". Forms are built from the tags and markers
that stand in the prompts and in the rewards' code, and from those in common use. Each form is tried
with a row's own answer and with another row's (`columns`). The right form is the one in which the
own answer earns more than the other, and earns most.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

import numpy as np

from grpo_nb.answers.forms import FORMS, STEP, find_form
from grpo_nb.reward_lab.columns import (
    RECORDS,
    answers_to_try,
    columns_in_use,
    distinct_rows,
    joined,
    others_of,
    words_for,
)
from grpo_nb.reward_lab.programs import HEAD, program_in
from grpo_nb.reward_lab.scoring import TIE, Row, Scorer, clock, prompt_text
from grpo_nb.reward_lab.source import READ, forms_in, strings_of

MANY = 1000  # candidates, from which on fewer rows are scored
TRIED_ROWS = 4  # rows on which the best forms are compared
BEST, MOST = 6, 100  # forms that are compared on these rows: at least, and if rewards are quick
SECONDS = 0.6  # for the first comparison of forms; slow rewards try fewer
QUICK = 0.01  # seconds for one completion, below which at least SOME are scored
FEW, SOME = 12, 150  # how many completions the first comparison scores at least
ROUGH = 0.005  # share of the range of all totals below which they count as equal
AT_ONCE = 4  # candidates that are scored before the clock is read for the first time
PROGRAM = "a function in a block of code"
TAG = re.compile(r"</?[A-Za-z][\w-]*>|<\|[A-Za-z][\w-]*\|>|\[/?[A-Z][A-Z_]+\]")
MARK = re.compile(rf"{TAG.pattern}|\\boxed|####|```")
# What chat templates write, no completion.
OF_CHATS = re.compile(
    r"<\|(im_(start|end|sep)|endoftext|(begin|end)_of_text|eo[st]_id|(start|end)_header_id|end"
    r"|system|user|assistant)\|>|<(start|end)_of_turn>|\[/?INST\]|</?s>"
)
LANGUAGE = re.compile(r"```(\w+)")
MARKER = re.compile(
    r"(?:Final Answer|Answer|ANSWER|answer|The answer is|Result|Output):? ?(?=\S|$)"
)
THOUGHTS = re.compile(r"(?i)think|reason|thought|work|scratch|analysis|explanation|plan|step")
ANSWERS = re.compile(r"(?i)answer|solution|result|output|final|response|code|label|summary")
USUAL = (("<reasoning>", "</reasoning>"), ("<think>", "</think>"), ("<answer>", "</answer>"))
PIECE = re.compile(r"(?:\\[sn][*+?]?|[(^$?*+])+$")  # ends the first piece of a pattern
KEY, MOST_KEYS = re.compile(r"[A-Za-z]\w{1,19}"), 8  # words of the code, of which some are tried
LONG = 2000  # characters of a string that names no tags or markers
LONG_STEPS = (
    "Step 1: I read the question and note what is given.\n"
    "Step 2: First I write down what is known, then I work it out: 1+1=2.\n"
    "Step 3: Therefore the result follows, and I check it once more."
)
WORDS = "I think about it"  # for patterns that take words alone
REASONINGS = (f"{WORDS}.\n{STEP}", LONG_STEPS)


@dataclass(frozen=True)
class Written:
    """Describe how right answers are written.

    form: A text with {answer}, and with {reasoning} if completions have one.
    answers: {number of a row: the right answer}, for rows that have one.
    reasoning: A short reasoning.
    longer: The reasoning that earns most of those that were tried.
    source: Where the answers come from, for people to read.
    own: {number of a row: the completion that the user's function wrote}; {} without a function.
    """

    form: str
    answers: dict[int, str]
    reasoning: str = STEP
    longer: str = STEP
    source: str = ""
    own: dict[int, str] = field(default_factory=dict)

    def allows(self, name: str, family: str) -> bool:
        """Return whether an honest attack is another usual way to write an answer in this form.

        Line breaks are usual within tags and blocks of code, but not after "Answer:". In JSON, no
        other spelling and no line break is usual. The reasoning of a person's own texts is kept.
        """
        if name == "two lines of reasoning" and self.own:
            return False
        if self.form.startswith(('{"', '["')):
            return family not in ("spelling", "line breaks")
        after = self.form.partition("{answer}")[2].strip()
        return name != "line breaks around the answer" or not self.form or bool(MARK.match(after))

    @cached_property
    def others(self) -> dict[int, str]:
        """Return {number of a row: a wrong answer}."""
        return others_of(self.answers)

    def right(self, row: int) -> str:
        """Return the right completion of a row."""
        return self.own.get(row) or self.write(self.answers[row])

    def wrong(self, row: int, reasoning: str | None = None) -> str:
        """Return another row's answer as a completion."""
        return self.write(self.others[row], reasoning)

    def write(self, answer: str, reasoning: str | None = None) -> str:
        """Write a completion in the form.

        >>> Written("<answer>{answer}</answer>", {}).write("18")
        '<answer>18</answer>'
        """
        return fill(self.form, answer, self.reasoning if reasoning is None else reasoning)


def fill(form: str, answer: str, reasoning: str) -> str:
    """Return a form with its two parts filled in."""
    return "".join(
        {"{answer}": answer, "{reasoning}": reasoning}.get(part, part)
        for part in re.split(r"(\{answer\}|\{reasoning\})", form)
    )


# -- forms


def forms_of(
    texts: Sequence[str], prompts: Sequence[str] = (), own: Sequence[str] = ()
) -> list[str]:
    """Return forms to try, the likeliest first.

    Forms with marks that the prompts mention come first, then those with a reasoning, and then
    short ones.

    Args:
        texts: Strings of the rewards' code.
        prompts: The texts of some prompts.
        own: Forms that were read from the rewards' patterns.
    """
    plain = [re.sub(r"\\[ns]", "\n", text).replace("\\", "") for text in texts]
    context = "\n".join(prompts)
    mentioned = _pairs([*prompts, *plain])
    pairs = list(dict.fromkeys([*mentioned, *USUAL]))
    thoughts = [pair for pair in pairs if THOUGHTS.search(pair[0])]
    answers = [pair for pair in pairs if pair not in thoughts or ANSWERS.search(pair[0])]
    marks = _marks("\n".join([context, *plain]))
    own = [form for form in own if "```" not in form]  # these are among the marks
    marks = list(dict.fromkeys([*marks, *(f for f in own if "{reasoning}" not in f)]))
    forms = [*marks, *(f"{{reasoning}}\n{mark}" for mark in marks), *own]
    for word in words_before([*plain, *(PIECE.sub("", text) for text in texts)]):
        forms += [f"{{reasoning}}{gap}{word}{{answer}}" for gap in ("", "\n")]
    forms += _under_keys([*re.findall(r'"(\w+)" *:', context), *texts])
    for answer in [*answers, *[pair for pair in mentioned if pair not in answers]]:
        others = [pair for pair in mentioned if pair != answer]
        for thought in [None, *dict.fromkeys([*thoughts, *others])]:
            if thought != answer:
                forms += _layouts([thought, answer])
        if len(others) > 1:
            forms += _layouts([*others, answer])
    for begin, end in dict.fromkeys([*thoughts, *mentioned]):
        for mark in [each for each in marks if begin not in each]:
            forms += [f"{begin}{{reasoning}}{end}\n{mark}", f"{begin}{{reasoning}}{end}{mark}"]
            forms += [f"{begin}\n{{reasoning}}\n{end}\n{mark}", f"{{reasoning}}{end}\n{mark}"]
    opens = bool(prompts) and all(re.search(r"<[A-Za-z]\w*>\s*$", each) for each in prompts)
    inside = [mark for mark in marks if mark != "{answer}"]
    for thought, answer in [(t, a) for t in thoughts for a in answers if t != a]:
        forms += _in_both(thought, answer, inside)
    return sorted(
        dict.fromkeys(forms),
        key=lambda form: (
            opens and not _opened(form),
            -_told(form, context),
            -_count_told(form, context),
            _opened(form),
            "{reasoning}" not in form,
            len(form.replace('"', "")),
        ),
    )


def _in_both(
    thought: tuple[str, str], answer: tuple[str, str], marks: Sequence[str]
) -> Iterator[str]:
    """Yield forms with the reasoning and the answer each in tags.

    First come forms whose first tag the prompt opens, then forms with a mark in the answer's tags.
    """
    (begin, end), (first, last) = thought, answer
    for gap, inner in (("", ""), ("\n", ""), ("\n", "\n")):
        yield f"{{reasoning}}{inner}{end}{gap}{first}{inner}{{answer}}{inner}{last}"
    for mark in marks:
        yield f"{begin}\n{{reasoning}}\n{end}\n{first}\n{mark}\n{last}"
        yield f"{begin}{{reasoning}}{end}\n{first}{mark}{last}"


def asked_forms(prompts: Sequence[str]) -> list[str]:
    """Return forms with a mark before the answer, all of whose marks are in every prompt."""
    return [form for form in forms_of([], prompts) if is_asked(form, prompts)]


def is_asked(form: str, prompts: Sequence[str]) -> bool:
    """Return whether a form has a mark before the answer, and every prompt has all its marks.

    The marks of chat templates do not count, for no completion has them.
    """
    mark = answer_mark(form)
    if not mark or THOUGHTS.search(mark) or OF_CHATS.search(form):
        return False
    return all(_told(form, prompt) == 1 for prompt in prompts)


def answer_mark(form: str) -> str:
    """Return the mark before the answer of a form; "" if there is none.

    >>> answer_mark("<think>{reasoning}</think><answer>{answer}</answer>")
    '<answer>'
    >>> answer_mark("<think>{reasoning}</think>{answer}")
    ''
    """
    before, _, after = form.partition("{answer}")
    marks = MARK.findall(before.rpartition("{reasoning}")[2])
    is_closed = not marks or not TAG.fullmatch(marks[-1]) or TAG.search(after)
    is_next = marks and before.rstrip("{ \n").endswith(marks[-1])
    return marks[-1] if is_next and is_closed and "/" not in marks[-1] else ""


def _opened(form: str) -> bool:
    """Return whether a form closes a tag that the chat template has opened."""
    rest = form.removeprefix("{reasoning}")
    return rest != form and bool(TAG.match(rest.lstrip()))


def words_before(texts: Sequence[str]) -> list[str]:
    """Return short strings that may stand before an answer, such as "to=user"."""
    short = [text for text in texts if 1 < len(text.strip()) < 25 and "<" not in text]
    marked = [t for t in short if re.search(r"[=:>|]\s*$|\w[=:|]\w|^\W+$|^[A-Z][A-Z ]{2,}$", t)]
    return list(dict.fromkeys(marked))[:12]


def _under_keys(texts: Iterable[str]) -> list[str]:
    """Return forms in JSON or YAML, with the answer under a key or as the only entry of a list.

    Args:
        texts: Strings; those that are single words may be keys.
    """
    words = list(dict.fromkeys(t for t in texts if KEY.fullmatch(t) and t not in READ))[:MOST_KEYS]
    forms = ['["{answer}"]', "[{answer}]", *(f"{word}: {{answer}}" for word in words)]
    for word in words:
        thoughts = [each for each in words if each != word and THOUGHTS.search(each)]
        before = ["", *(f'"{thought}": "{{reasoning}}", ' for thought in thoughts)]
        values = ('"{answer}"', "{answer}")
        forms += [f'{{{first}"{word}": {value}}}' for first in before for value in values]
    return forms


def _told(form: str, prompts: str) -> float:
    """Return the share of a form's marks that the prompts contain; 0.5 if the form has none."""
    plain = fill(form, "1", "1")
    words = [word.strip() for word in MARKER.findall(plain)]
    marks = [*MARK.findall(plain), *(word for word in words if word.endswith(":"))]
    return sum(mark in prompts for mark in marks) / len(marks) if marks else 0.5


def _count_told(form: str, prompts: str) -> int:
    """Return how many marks a form has; 0 unless the prompts contain all of them."""
    marks = {*MARK.findall(fill(form, "1", "1"))}
    return len(marks) if all(mark in prompts for mark in marks) else 0


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (opening, closing) of each pair of tags in the texts, in order of appearance."""
    tags = dict.fromkeys(tag for text in texts for tag in TAG.findall(text))
    tags = [tag for tag in tags if not OF_CHATS.fullmatch(tag)]
    pairs = []
    for tag in tags:
        word = tag.strip("<>[]|/")
        bracket = tag[0]
        closing = {"<": f"</{word}>", "[": f"[/{word}]"}[bracket]
        for begin in ("start", "begin"):
            if begin in word:
                closing = tag.replace(begin, "end")
        if closing in tags and closing != tag and "/" not in tag:
            pairs.append((tag, closing))
        elif "</" in tag and tag.replace("/", "") not in tags:
            pairs.append((tag.replace("/", ""), tag))
        elif word.startswith("end_") and tag.replace("end_", "start_") not in tags:
            pairs.append((tag.replace("end_", "start_"), tag))
    return pairs


def _layouts(pairs: Sequence[tuple[str, str] | None]) -> list[str]:
    """Return a form in five layouts, which differ in the line breaks around and between tags."""
    parts = [pair for pair in pairs if pair is not None]
    names = ["{reasoning}"] * (len(parts) - 1) + ["{answer}"]
    around = zip(parts, names, strict=True)
    filled = [(f"{a}{name}{b}", f"{a}\n{name}\n{b}") for (a, b), name in around]
    dense, broken = (list(each) for each in zip(*filled, strict=True))
    return [
        "".join(dense),
        "\n".join(broken),
        "\n".join(broken) + "\n",
        "\n".join(dense),
        "\n".join([*broken[:-1], dense[-1]]),
    ]


def _marks(text: str) -> list[str]:
    """Return the forms of an answer without tags; those that the text mentions come first."""
    marks = {
        "\\boxed{{answer}}": "boxed",
        "#### {answer}": "####",
        **{f"```{name}\n{{answer}}\n```": "```" for name in sorted(set(LANGUAGE.findall(text)))},
        "```python\n{answer}\n```": "python",
        "```\n{answer}\n```": "```",
        **{
            f"{m.strip()} {{answer}}": m for m in sorted(set(MARKER.findall(text)))[:6] if m.strip()
        },
        "Answer: {answer}": "nswer:",
        "The answer is {answer}.": "answer is",
        "*{answer}*": "\\*(",
        "**{answer}**": "\\*\\*",
        "The final answer is $\\boxed{{answer}}$": "final answer",
        "{answer}": "",
    }
    return sorted(marks, key=lambda mark: marks[mark] not in text)


# -- the search


def find(
    scorer: Scorer,
    form: str = "",
    reference: Callable[[Row], str] | None = None,
    completions: Sequence[str] = (),
) -> tuple[Written | None, int]:
    """Return how right answers are written (None if unknown), and how many ways were tried.

    Args:
        scorer: The rewards with rows and weights.
        form: The form to use, a text with {answer} or a name in FORMS; "" to find it.
        reference: A function that writes a row's right completion; None to find the form.
        completions: Sampled completions, whose tags are tried too.
    """
    levels = answers_to_try(scorer)
    if reference is not None:
        first = {repr(row): number for number, row in reversed(list(enumerate(scorer.rows)))}
        texts = {number: str(reference(scorer.rows[number])) for number in sorted(first.values())}
        ways = {way: each for level in levels for way, each in level.items()}
        programs = {number: program_in(text) for number, text in texts.items()}
        ways = {PROGRAM: programs, **ways} if all(programs.values()) else ways
        source = f"{getattr(reference, '__name__', 'reference')}(row)"
        answers, form = _read(texts, ways)
        return Written(form, answers, source=source, own=texts), 1
    attempts, best = 0, None
    strings = [text for func in scorer.funcs for text in strings_of(func) if len(text) < LONG]
    forms = [as_text(form)] if form else []
    if not forms:
        levels, forms = _in_order(scorer, levels, strings, completions)
    for reasoning, ways in _rounds(scorer, levels, strings, forms):
        attempts += len(ways) * len(forms)
        if best := _best(scorer, reasoning, ways, forms):
            break
    if best is None or len(columns_in_use(scorer)) > 1:
        # A right answer may need what several columns say; it earns more than one of them.
        ways = joined(scorer)
        if best:  # by a reward of its own for each column
            ways = {way: each for way, each in ways.items() if way.endswith(RECORDS)}
        attempts += len(ways) * len(forms)
        both = filter(None, (best, _best(scorer, STEP, ways, forms)))
        best = max(both, key=lambda style: round(_earned(scorer, style), 4), default=None)
    for ways in levels if best is None else ():  # short completions may be refused
        attempts += len(ways) * len(forms)
        best = best or _best(scorer, LONG_STEPS, ways, forms)
    return best, attempts


def _best(
    scorer: Scorer, reasoning: str, ways: dict[str, dict[int, str]], forms: list[str]
) -> Written | None:
    """Return the way and form in which right answers earn most; None if wrong ones earn as much."""
    search = _Search(scorer, ways, reasoning)
    result = search.best([(way, each) for each in forms for way in ways])
    return result and search.reasoned(result)


def _earned(scorer: Scorer, written: Written) -> float:
    """Return the mean total of some right answers."""
    rows = distinct_rows(written.answers, TRIED_ROWS)
    return float(scorer.totals([(row, written.right(row)) for row in rows]).mean())


def _in_order(
    scorer: Scorer,
    levels: Sequence[dict[str, Any]],
    strings: Sequence[str],
    completions: Sequence[str],
) -> tuple[Sequence[dict[str, Any]], list[str]]:
    """Return the ways to read answers and the forms, in the order in which they are to be tried."""
    prompts = list(dict.fromkeys(prompt_text(row) for row in scorer.rows[:3]))
    forms = forms_of([*strings, *completions[:8]], prompts, forms_in(strings))
    if any(map(_are_programs, levels)):  # a program stands in a block of code
        forms.sort(key=lambda each: "```" not in each)
        levels = sorted(levels, key=lambda ways: not _are_programs(ways))
    return levels, forms


def _rounds(
    scorer: Scorer, levels: Sequence[dict[str, Any]], strings: Sequence[str], forms: Sequence[str]
) -> Iterator[tuple[str, dict[str, dict[int, str]]]]:
    """Yield (reasoning, ways to read answers); `words_for`, which calls the rewards, comes last."""
    yield from ((reasoning, ways) for reasoning in (STEP, WORDS) for ways in levels)
    yield STEP, words_for(scorer, columns_in_use(scorer), strings, forms)


def _are_programs(ways: Mapping[str, dict[int, str]]) -> bool:
    """Return whether the first row's answer is a program in one of these ways to read answers."""
    return any(HEAD.match(next(iter(answers.values()))) for answers in ways.values())


def as_text(form: str) -> str:
    """Return a form as a text with {answer}.

    Args:
        form: Such a text, or a name in FORMS, such as "boxed" or "tags:think,answer".

    Raises:
        ValueError: `form` is neither of these.
    """
    if "{answer}" in form:
        return form
    return find_form(form).write("{reasoning}", "{answer}") if form else FORMS["tags"].name


class _Search:
    """Try candidates, each a pair (way to read answers, form), and find the one that earns most."""

    def __init__(self, scorer: Scorer, ways: Mapping[str, dict[int, str]], reasoning: str) -> None:
        self.scorer, self.ways, self.reasoning = scorer, ways, reasoning
        self.others = {way: others_of(answers) for way, answers in ways.items()}
        self.sizes = {way: np.mean([len(a) for a in each.values()]) for way, each in ways.items()}

    def best(self, candidates: Sequence[tuple[str, str]]) -> Written | None:
        """Return the candidate that earns most among those whose right answers beat wrong ones."""
        if not candidates:
            return None
        for rows in (1, 3, 9) if len(candidates) < MANY else (1, 3):  # the first may be odd
            first = self._first(candidates, rows)
            is_slow = len(first) < len(candidates)
            earned = _rounded([own for own, _ in first])
            order = sorted(
                range(len(first)),
                key=lambda n: (-earned[n], self._is_long(candidates[n][0]), n),
            )
            order = [number for number in order if first[number][1] > TIE]
            if order or is_slow:
                break
        if not order:
            return None
        rows, few, most = (2, 2, 2) if is_slow else (TRIED_ROWS, BEST, MOST)
        gains, start, order = [], clock(), order[:most]
        while len(gains) < len(order) and (not gains or clock() - start < SECONDS / 2):
            some = order[len(gains) : len(gains) + few]
            gains += self._gains([candidates[number] for number in some], rows)
        earned = _rounded([own for own, _ in gains])
        for place in sorted(range(len(gains)), key=lambda place: (-earned[place], place)):
            way, form = candidates[order[place]]
            if gains[place][1] > TIE and self._is_read(way, form, rows):
                return Written(form, self.ways[way], self.reasoning, self.reasoning, way)
        return None

    def _first(self, candidates: Sequence[tuple[str, str]], rows: int) -> list[tuple[float, float]]:
        """Return the gains of as many candidates as SECONDS allows; stop early at a right program.

        Unless answers are programs, each batch of candidates is larger than the one before, so
        that few calls are made.
        """
        gains, size, before, start = [], AT_ONCE, self.scorer.seconds.sum(), clock()
        is_run = _are_programs(self.ways)
        while len(gains) < len(candidates):
            gains += self._gains(candidates[len(gains) : len(gains) + size], rows)
            spent, count = self.scorer.seconds.sum() - before, 2 * rows * len(gains)
            is_enough = count >= (SOME if spent < QUICK * count else FEW)
            is_found = is_run and any(gain > TIE for _, gain in gains)
            is_long = max(spent, (clock() - start) / 4) > SECONDS  # to write them takes time, too
            if (is_long and is_enough) or (is_found and spent > SECONDS / 10):
                break
            size *= 1 if is_run else 2
        return gains

    def _is_long(self, way: str) -> bool:
        """Return whether answers read in this way are much longer than the shortest."""
        return bool(self.sizes[way] > 4 * min(self.sizes.values()) + 20)

    def _gains(self, candidates: Sequence[tuple[str, str]], rows: int) -> list[tuple[float, float]]:
        """Return each candidate's mean total, and how much more that is than with wrong answers."""
        rows_of = {way: distinct_rows(each, rows) for way, each in self.ways.items()}
        groups = [
            [
                (number, fill(form, answers[number], self.reasoning))
                for number in rows_of[way]
                for answers in (self.ways[way], self.others[way])
            ]
            for way, form in candidates
        ]
        self.scorer.scores([pair for pairs in groups for pair in pairs])  # all in one call
        means = [self.scorer.totals(pairs).reshape(-1, 2).mean(axis=0) for pairs in groups]
        return [(float(own), float(own - other)) for own, other in means]

    def _is_read(self, way: str, form: str, count: int) -> bool:
        """Return whether right answers earn differently when put on another row.

        If they do not, no reward compares them with the row: right and wrong answers then differ
        only by something like their length.
        """
        answers = self.ways[way]
        rows = distinct_rows(answers, count)
        texts = [fill(form, answers[row], self.reasoning) for row in rows]
        pairs = [*zip(rows, texts, strict=True), *zip(rows[1:] + rows[:1], texts, strict=True)]
        own, other = self.scorer.totals_again(pairs).reshape(2, -1)
        beside = self.scorer.totals_again([*pairs[: len(rows)], (rows[0], "")])[:-1]
        if np.allclose(beside, own, rtol=0, atol=TIE):  # the completions of a call are not compared
            own = self.scorer.totals(pairs[: len(rows)])
        return len({*texts}) < 2 or bool((np.abs(own - other) > TIE).any())

    def reasoned(self, found: Written) -> Written:
        """Return `found`; its `longer` is the reasoning that earns most of those that are tried."""
        if "{reasoning}" not in found.form:
            return found
        numbers, totals = distinct_rows(found.answers, 2), []
        reasonings = (self.reasoning, *REASONINGS)
        for reasoning in reasonings:
            pairs = [(n, found.write(found.answers[n], reasoning)) for n in numbers]
            totals.append(self.scorer.totals(pairs).mean())
        best = next(i for i, total in enumerate(totals) if total > max(totals) - TIE)
        return replace(found, longer=reasonings[best])


def _rounded(totals: Sequence[float]) -> np.ndarray:
    """Return totals as whole multiples of a small part of their range.

    A reward that depends on the length a little would otherwise decide which form is right.
    """
    return np.round(np.array(totals) / max(ROUGH * np.ptp(totals), TIE))


def _read(
    texts: Mapping[int, str], ways: Mapping[str, dict[int, str]]
) -> tuple[dict[int, str], str]:
    """Return the answers in the texts that a user's function wrote, and the form of these texts.

    The part before the answer that differs from row to row is the reasoning. Whole texts count as
    answers if no column contains the answers, or if the text after the answers differs.
    """
    for answers in ways.values():
        own = {number: answers[number] for number in texts if number in answers}
        some = distinct_rows(own, 3)
        if some and all(own[n] in texts[n] for n in some):
            befores, afters = zip(*(texts[n].rsplit(own[n], 1) for n in some), strict=True)
            if len({*afters}) == 1:
                first = commonprefix(befores)  # noqa: RUF071 (by characters, as it is meant)
                rest = [text[len(first) :][::-1] for text in befores]
                last = commonprefix(rest)[::-1]  # noqa: RUF071
                differ = "{reasoning}" if len({*befores}) > 1 else ""
                return own, f"{first}{differ}{last}{{answer}}{afters[0]}"
    return dict(texts), "{answer}"
