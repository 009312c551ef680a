r"""Forms: how a completion is written, so that a program finds the answer in it.

All follow the form of a reward set: its system prompt asks for it, rewards of format check it, the
other rewards read answer and reasoning by it, reference answers, warm-up rows and attacks are
written in it.

    tags         <reasoning>1+1=2</reasoning><answer>2</answer>   with your names: tags:think,answer
    think+boxed  <think>1+1=2</think> \boxed{2}
    boxed        1+1=2 \boxed{2}
    hash         1+1=2 #### 2
    json         {"reasoning": "1+1=2", "answer": "2"}            with your names: json:why,result
    code         the answer in a block of ```python               another language: code:sql
    plain        2

All reading takes time linear in the text.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from grpo_nb.runs import refuse_unknown

STEP = "1+1=2"  # an honest line of reasoning, true everywhere
LACKING = {"plain": ("marks", "reasoning"), "code": ("reasoning",)}  # what a form has not
OTHERS_MARKS = re.compile(r"</\w+>|\\boxed\{|####|```")
NAME = re.compile(r"[A-Za-z]\w*")


# -- reading texts


def extract_tag(text: str, tag: str) -> str | None:
    """What stands in the last complete `<tag>…</tag>`, stripped; None where there is none.

    The last one counts, so listing candidates ("<answer>1</answer><answer>2</answer>…")
    gains nothing; rewards of format refuse a repeated tag.

    >>> extract_tag("<answer>84</answer> no: <answer> 85 </answer>", "answer")
    '85'
    >>> extract_tag("<answer>85", "answer") is None
    True
    """
    last = text.rfind(f"</{tag}>")
    opening = text.rfind(f"<{tag}>", 0, max(last, 0))
    if opening < 0:
        return None
    return text[opening + len(tag) + 2 :].partition(f"</{tag}>")[0].strip()


def boxes_of(text: str) -> list[tuple[int, int]]:
    r"""(start, end) of what stands in each closed `\boxed{…}` that is in no other, in one pass."""
    found, open_braces = [], []
    if (first := text.find(r"\boxed")) < 0:
        return []
    for brace in re.compile(r"\\boxed\s*\{|\\[{}]|[{}]").finditer(text, first):
        if brace[0].endswith("{"):
            open_braces.append((brace[0].startswith(r"\boxed"), brace.end()))
        elif open_braces:
            boxed, start = open_braces.pop()
            while boxed and found and found[-1][0] > start:
                found.pop()
            found += [(start, brace.start())] if boxed else []
    return found


def extract_boxed(text: str) -> str | None:
    r"""What stands in the last closed `\boxed{…}`, braces balanced; None where there is none.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    boxes = boxes_of(text)
    return text[slice(*boxes[-1])].strip() if boxes else None


def extract_hash_answer(text: str) -> str | None:
    """What follows the last `####`, as GSM8K marks its answers.

    >>> extract_hash_answer("She earned 0.2 x 50 = $10.\\n#### 10")
    '10'
    """
    _, marker, answer = text.rpartition("####")
    return answer.strip() or None if marker else None


def free_answer(text: str) -> str | None:
    """The answer of a text in any form: of its answer tag, else boxed, else after `####`, else all.

    One that opens an answer tag and never closes it has none.

    >>> [free_answer(t) for t in ("<answer>18</answer>", "#### 18", "18", "<answer>18")]
    ['18', '18', '18', None]
    """
    tagged = extract_tag(text, "answer")
    if tagged is not None or "<answer>" in text:
        return tagged
    return extract_boxed(text) or extract_hash_answer(text) or text.strip() or None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each closed Markdown fence, in one pass over the lines.

    >>> fenced_blocks("```python\\nx = 1\\n```")
    [('python', 'x = 1')]
    """
    blocks: list[tuple[str, str]] = []
    language, code = None, []
    for line in text.splitlines():
        fence = line.startswith("```")
        if fence and language is None:
            language, code = line[3:].strip(), []
        elif fence and not line[3:].strip():
            blocks.append((language, "\n".join(code)))
            language = None
        elif language is not None:
            code.append(line)
    return blocks


def parse_json(text: str) -> Any:
    """The JSON value a whole text holds, a Markdown fence around it allowed.

    Raises:
        ValueError: It is not JSON, or holds NaN or Infinity, which JSON does not know.
    """
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text.strip(), flags=re.DOTALL)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(fenced[1] if fenced else text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# -- forms


class Form(NamedTuple):
    r"""How a completion is written.

    name: As `rewards.form` names it.
    system_prompt: Asks a model for it.
    marks: What is written before and after the reasoning, then before and after the answer; of
        JSON the names of the two fields.
    opened: What the chat template writes at the end of every prompt, as "<think>\n": the
        completion begins inside it.
    """

    name: str
    system_prompt: str
    marks: tuple[str, str, str, str]
    opened: str = ""

    @property
    def kind(self) -> str:
        """Its name without the names of tags, fields or language."""
        return self.name.partition(":")[0]

    def has(self, part: str) -> bool:
        """Whether it has "marks", by which it can be told; whether it has "reasoning"."""
        return part not in LACKING.get(self.kind, ())

    @property
    def _continues(self) -> bool:
        """Whether what the template opens is this form's own reasoning."""
        return bool(self.opened) and self.opened.strip() == self.marks[0].strip()

    @property
    def _end_of_thought(self) -> str:
        return self.opened.strip()[:1] + "/" + self.opened.strip()[1:]

    # -- writing

    def write(self, reasoning: str | None, answer: str, answer_first: bool = False) -> str:
        """A completion in this form.

        Args:
            reasoning: None leaves it out with its marks; a form without reasoning always does.
            answer: The final answer.
            answer_first: In the wrong order.

        >>> find("tags").write("1+1=2", "2")
        '<reasoning>1+1=2</reasoning><answer>2</answer>'
        """
        before, between, opening, closing = self.marks
        thought, steps = "", "" if reasoning is None else f"{before}{reasoning}{between}"
        if self._continues:
            steps = f"{reasoning or ''}{between}"
        elif self.opened:
            thought = f"{STEP if reasoning is None else reasoning}\n{self._end_of_thought}\n\n"
        parts = [steps if self.has("reasoning") else "", f"{opening}{answer}{closing}"]
        if self.kind == "json":
            fields = {before: reasoning, opening: answer}
            kept = {json.loads(k): v for k, v in fields.items() if v is not None}
            pairs = reversed(kept.items()) if answer_first else kept.items()
            parts = [json.dumps(dict(pairs), ensure_ascii=False)]
        return thought + "".join(reversed(parts) if answer_first else parts)

    def reference(self, row: Mapping[str, Any]) -> str:
        """A completion that ought to earn every reward: any true step, then the row's answer."""
        return self.write(STEP, str(row["answer"]))

    # -- reading

    def _whole(self, text: str) -> str:
        """The completion with what it continues; behind the thought, where the form has none."""
        if self._continues:
            return self.opened + text
        return text.partition(self._end_of_thought)[2] if self.opened else text

    def _last_part(self, text: str) -> str:
        """Where the answer may stand: behind the `<think>` of its form; "" while that is open."""
        text = self._whole(text)
        if self.kind != "think+boxed":
            return text
        _, ended, behind = text.rpartition("</think>")
        return behind if ended or "<think>" not in text else ""

    def marked(self, text: str) -> str | None:
        """What stands in the marks of the answer, the last of several; None where it is none."""
        text = self._last_part(text)
        match self.kind:
            case "tags":
                return extract_tag(text, self.marks[2][1:-1])
            case "hash":
                return extract_hash_answer(text)
            case "code":
                blocks = fenced_blocks(text)
                return blocks[-1][1] if blocks else None
            case "json":
                return _object(text).get(json.loads(self.marks[2]))
            case "plain":
                return text.strip() or None
        return extract_boxed(text)

    def extract(self, text: str, free: Callable[[str], str | None] | None = None) -> str | None:
        r"""The final answer; None where there is none, or where it is begun and not ended.

        Args:
            text: A completion.
            free: Reads several boxes, and what is in another form or in none, as `answers.find`
                does for mathematics. By default a box around the whole answer is taken off as well.

        >>> find("think+boxed").extract(r"<think>\boxed{3}?</think> It is \boxed{4}.")
        '4'
        """
        said, last = self.marked(text), self._last_part(text)
        if said is None and self.marks[2] and self.marks[2].strip() in last:
            return None
        if said is None or self.kind == "plain" or (free and self.marks[3] == "}"):
            said = (free or free_answer)(last)
        return said if free or said is None or self.kind == "code" else extract_boxed(said) or said

    def reasoning(self, text: str) -> str:
        """The reasoning; "" where there is none, or no mark of where it ends."""
        text, (before, _, opening, _) = self._whole(text), self.marks
        if self.kind == "json":
            return _object(text).get(json.loads(before), "")
        if before:
            return extract_tag(text, before.strip()[1:-1]) or ""
        return text.rpartition(opening.strip())[0] if self.has("reasoning") else ""

    # -- checking

    def is_well_formed(self, text: str) -> bool:
        """Whether a completion is in this form: every mark once, in order, and filled.

        Between tags and around JSON nothing else may stand; around a box or a block of code
        prose may, without the marks of other forms.
        """
        text = self._whole(text)
        if self.kind == "json":
            found, (before, _, opening, _) = _object(text), self.marks
            named = list(found) == [json.loads(before), json.loads(opening)]
            return named and all(map(str.strip, found.values()))
        if self.kind == "plain":
            return bool(text.strip()) and not OTHERS_MARKS.search(text)
        if self.kind == "code":
            blocks, language = fenced_blocks(text), self.marks[2][3:].strip()
            return len(blocks) == 1 and blocks[0][0] == language and bool(blocks[0][1].strip())
        parts = _in_order(text, self._single)
        if parts is None:
            return False
        if self.kind == "tags":
            lead, reasoning, between, answer, rest = parts
            return (
                bool(reasoning.strip() and answer.strip()) and not (lead + between + rest).strip()
            )
        return self._is_well_formed_prose(*parts)

    def _is_well_formed_prose(self, *parts: str) -> bool:
        """The same for one box or one `####`, with words around it."""
        *thought, words, rest = parts
        if thought and (thought[0].strip() or not thought[1].strip()):
            return False
        answer, _, behind = rest.partition("\n")
        if self.kind == "hash" and behind.strip():
            return False
        if self.kind != "hash":
            rest = self.marks[2] + rest
            if len(boxes := boxes_of(rest)) != 1:
                return False
            answer, behind = rest[slice(*boxes[0])], rest[boxes[0][1] :]
        filled = bool(answer.strip()) and bool(thought or words.strip())
        return filled and not OTHERS_MARKS.search(words + behind)

    @property
    def _single(self) -> tuple[str, ...]:
        """The marks that have to stand once each, in this order."""
        marks = [mark.strip() for mark in self.marks]
        return tuple(filter(None, marks if self.kind == "tags" else marks[:3]))

    def progress(self, text: str) -> float:
        """The share of the form's marks that stand once, each after the ones before it.

        It gives a model that does not know the form a first step. But for tags, the whole form
        counts as one mark more.
        """
        whole, kept = self._whole(text), [] if self.kind == "tags" else [self.is_well_formed(text)]
        if self.kind == "json":
            return sum([bool(_object(whole)), *kept]) / 2
        steps, position = [], len(self.opened) * self._continues
        for mark in self._single[self._continues :]:
            found = whole.find(mark, position)
            steps.append(found >= 0 and whole.count(mark, 0 if mark[0] == "<" else position) == 1)
            position = found + len(mark) if steps[-1] else position
        steps += kept
        return sum(steps) / len(steps)


def _object(text: str) -> dict[str, str]:
    """The fields of a JSON object as text; {} where the text is no object."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    return {k: v if isinstance(v, str) else _as_text(v) for k, v in value.items()}


def _as_text(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _in_order(text: str, marks: tuple[str, ...]) -> list[str] | None:
    """What stands before, between and after marks that each stand once, in order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def _tags(reasoning: str = "reasoning", answer: str = "answer") -> Form:
    marks = f"<{reasoning}>", f"</{reasoning}>", f"<{answer}>", f"</{answer}>"
    asks = "Reason inside {}{}, then give the result inside {}{}.".format(*marks)
    return Form("tags", asks, marks)


def _json(reasoning: str = "reasoning", answer: str = "answer") -> Form:
    asks = f'Answer with one JSON object and no more: {{"{reasoning}": "…", "{answer}": "…"}}.'
    return Form("json", asks, (f'"{reasoning}"', "", f'"{answer}"', ""))


def _code(language: str = "python") -> Form:
    title = "Python" if language == "python" else language
    asks = f"Answer with one fenced block of {title} code, marked ```{language}, and no more."
    return Form("code", asks, ("", "", f"```{language}\n", "\n```"))


MADE = {"tags": (_tags, 2), "json": (_json, 2), "code": (_code, 1)}  # with your names, so many
FORMS = {
    "tags": _tags(),
    "think+boxed": Form(
        "think+boxed",
        r"Reason inside <think></think>, then give the result inside \boxed{}.",
        ("<think>\n", "\n</think>\n\n", r"\boxed{", "}"),
    ),
    "boxed": Form(
        "boxed",
        r"Please reason step by step, and put your final answer within \boxed{}.",
        ("", "\n", r"\boxed{", "}"),
    ),
    "hash": Form(
        "hash",
        "Reason step by step, then give the result after #### on the last line.",
        ("", "\n", "#### ", ""),
    ),
    "json": _json(),
    "code": _code(),
    "plain": Form("plain", "Answer with the result and no more.", ("", "", "", "")),
}
TAGS = FORMS["tags"]


@cache
def find(name: str) -> Form:
    """The form of that name.

    Raises:
        ValueError: No such form, or names that it cannot take.

    >>> find("tags:think,answer").write("1+1=2", "2")
    '<think>1+1=2</think><answer>2</answer>'
    """
    kind, colon, detail = name.partition(":")
    refuse_unknown("rewards.form", kind, [*FORMS])
    if not colon:
        return FORMS[kind]
    make, count = MADE.get(kind, (None, 0))
    names = detail.split(",")
    if len(names) != count or len({*names}) != count or not all(map(NAME.fullmatch, names)):
        raise ValueError(
            f"rewards.form = {name!r}: write {kind}, or names as in tags:REASONING,ANSWER, "
            "json:REASONING,ANSWER, code:LANGUAGE"
        )
    return make(*names)._replace(name=name)
