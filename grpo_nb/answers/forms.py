r"""Describe how completions are written, so that a program can find the answers in them.

A reward set has one form. Its system prompt asks for the form, and its format rewards check it. The
other rewards use the form to find the answer and the reasoning. Reference answers, warm-up
rows and attacks are written in it.

    tags         <reasoning>1+1=2</reasoning><answer>2</answer>   other tag names: tags:think,answer
    think+boxed  <think>1+1=2</think> \boxed{2}
    boxed        1+1=2 \boxed{2}
    hash         1+1=2 #### 2
    code         the answer in a block of ```python
    plain        2

Reading takes time linear in the length of the text.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.answers.find import (
    boxes_of,
    extract_boxed,
    extract_hash_answer,
    extract_tag,
    find_answer,
)
from grpo_nb.files import read_yaml
from grpo_nb.names import refuse_unknown

STEP = "1+1=2"  # an honest line of reasoning, true for every question
LACKING = {"plain": ("marks", "reasoning"), "code": ("reasoning",)}  # the parts that a form lacks
ANSWERS_MARKS = r"</\w+>|\\boxed\{|####"
OTHERS_MARKS = re.compile(rf"{ANSWERS_MARKS}|```")
OWN_TAGS = re.compile(r"tags:([A-Za-z]\w*),(?!\1$)([A-Za-z]\w*)")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, code) of each closed Markdown fence.

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


class Form(NamedTuple):
    r"""Describe how a completion is written.

    name: A value of `rewards.form`.
    system_prompt: The text that asks a model for this form.
    marks: The text before and after the reasoning, then before and after the answer.
    opened: The tag that the chat template writes at the end of every prompt, such as "<think>\n";
        the completion then begins inside this tag.
    """

    name: str
    system_prompt: str
    marks: tuple[str, str, str, str]
    opened: str = ""

    @property
    def kind(self) -> str:
        """Return the form's name without the names of its tags."""
        return self.name.partition(":")[0]

    def has(self, part: str) -> bool:
        """Return whether the form has this part: "reasoning", or "marks" that identify the form."""
        return part not in LACKING.get(self.kind, ())

    @property
    def _continues(self) -> bool:
        """Return whether the block that the template opens is this form's own reasoning."""
        return bool(self.opened) and self.opened.strip() == self.marks[0].strip()

    @property
    def _end_of_thought(self) -> str:
        return self.opened.strip()[:1] + "/" + self.opened.strip()[1:]

    @property
    def _single(self) -> list[str]:
        """Return the marks that have to occur once each, in this order."""
        marks = self.marks if self.kind == "tags" else self.marks[:3]
        return [mark.strip() for mark in marks if mark.strip()]

    # -- writing

    def write(self, reasoning: str | None, answer: str) -> str:
        """Write a completion in this form.

        Args:
            reasoning: The reasoning; None omits it and its marks, but still closes a tag that the
                template opened. Some forms always omit them.
            answer: The final answer.

        >>> find_form("tags").write("1+1=2", "2")
        '<reasoning>1+1=2</reasoning><answer>2</answer>'
        """
        before, between, opening, closing = self.marks
        thought, steps = "", "" if reasoning is None else f"{before}{reasoning}{between}"
        if self._continues:
            steps = f"{reasoning or ''}{between}"
        elif self.opened:
            thought = f"{reasoning or ''}\n{self._end_of_thought}\n\n"
        steps = steps if self.has("reasoning") else ""
        return f"{thought}{steps}{opening}{answer}{closing}"

    def reference(self, row: Mapping[str, Any]) -> str:
        """Write the row's reference completion: a correct step as reasoning, then the answer."""
        return self.write(STEP, str(row["answer"]))

    # -- reading

    def _whole(self, text: str) -> str:
        """Add the tag that the prompt opened, or remove a thinking block that is not the form's."""
        if self._continues:
            return self.opened + text
        return text.partition(self._end_of_thought)[2] if self.opened else text

    def _last_part(self, text: str) -> str:
        """Return the text where the answer may be: in "think+boxed", only after `</think>`."""
        text = self._whole(text)
        if self.kind != "think+boxed":
            return text
        _, end, rest = text.rpartition("</think>")
        return rest if end or "<think>" not in text else ""

    def marked(self, text: str) -> str | None:
        """Return the content of the last pair of marks around an answer; None if there is none."""
        text = self._last_part(text)
        match self.kind:
            case "tags":
                return extract_tag(text, self.marks[2][1:-1])
            case "hash":
                return extract_hash_answer(text)
            case "code":
                blocks = fenced_blocks(text)
                return blocks[-1][1] if blocks else None
            case "plain":
                return text.strip() or None
        return extract_boxed(text)

    def extract(self, text: str) -> str | None:
        r"""Return the final answer; None if there is none, or if its closing mark is missing.

        `find_answer` finds an answer that is in several boxes, in another form, or in no form. A
        box around the whole answer is removed.

        >>> find_form("think+boxed").extract(r"<think>\boxed{3}?</think> It is \boxed{4}.")
        '4'
        """
        answer, last = self.marked(text), self._last_part(text)
        if answer is not None and self.kind == "code":
            return answer
        if answer is None and self.marks[2] and self.marks[2].strip() in last:
            return None
        foreign = self.kind == "plain" and re.search(ANSWERS_MARKS, last)
        if answer is None or foreign or self.marks[3] == "}":
            answer = find_answer(last)
        in_box = answer is not None and boxes_of(answer) == [(len(r"\boxed{"), len(answer) - 1)]
        return extract_boxed(answer) if in_box else answer

    def reasoning(self, text: str) -> str:
        """Return the reasoning; "" if there is none, or if no mark shows where it ends."""
        text, (before, _, opening, _) = self._whole(text), self.marks
        if before:
            return extract_tag(text, before.strip()[1:-1]) or ""
        return text.rpartition(opening.strip())[0] if self.has("reasoning") else ""

    # -- checking

    def is_well_formed(self, text: str) -> bool:
        """Return whether a completion is in this form: every mark once, in order, with content.

        The form "tags" allows no text outside its two pairs of tags. Prose may surround a box or a
        block of code, but must not contain the marks of other forms.
        """
        text = self._whole(text)
        if self.kind == "plain":
            return bool(text.strip()) and not OTHERS_MARKS.search(text)
        if self.kind == "code":
            blocks = fenced_blocks(text)
            return len(blocks) == 1 and blocks[0][0] == "python" and bool(blocks[0][1].strip())
        parts = _in_order(text, self._single)
        if self.kind == "tags":
            return [*map(bool, parts)] == [False, True, False, True, False]
        if not parts:
            return False
        *thought, words, rest = parts
        if self.kind == "hash":
            answer, several, behind = rest.partition("\n")
        else:
            rest = self.marks[2] + rest
            (start, end), *several = boxes_of(rest) or [(0, 0)]
            answer, behind = rest[start:end].strip(), rest[end:]
        is_filled = answer and (thought[1] and not thought[0] if thought else words)
        return bool(is_filled) and not several and not OTHERS_MARKS.search(words + behind)

    def progress(self, text: str) -> float:
        """Return the share of the form's marks that occur exactly once and in the form's order.

        A model that does not know the form is thus rewarded mark by mark. In every form except
        "tags", a well-formed completion counts as one more mark.
        """
        whole, steps = self._whole(text), []
        position = len(self.opened) * self._continues
        for mark in self._single[self._continues :]:
            place = whole.find(mark, position)
            steps.append(place >= 0 and whole.count(mark, 0 if mark[0] == "<" else position) == 1)
            position = place + len(mark) if steps[-1] else position
        if self.kind != "tags":
            steps.append(self.is_well_formed(text))
        return sum(steps) / len(steps)


def _in_order(text: str, marks: Sequence[str]) -> list[str]:
    """Return the texts around and between the marks; [] unless each occurs once, in this order."""
    parts = []
    for mark in marks:
        before, match, text = text.partition(mark)
        if not match or mark in text:
            return []
        parts.append(before.strip())
    return [*parts, text.strip()]


def _tags(reasoning: str = "reasoning", answer: str = "answer") -> Form:
    marks = f"<{reasoning}>", f"</{reasoning}>", f"<{answer}>", f"</{answer}>"
    system_prompt = "Reason inside {}{}, then give the result inside {}{}.".format(*marks)
    return Form("tags", system_prompt, marks)


TAGS = _tags()
FORMS = {"tags": TAGS} | {
    name: Form(name, about["system_prompt"], tuple(about["marks"]))
    for name, about in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}


@cache
def find_form(name: str) -> Form:
    """Return the form of this name.

    Raises:
        ValueError: There is no such form, or the names of its tags are not allowed.

    >>> find_form("tags:think,answer").write("1+1=2", "2")
    '<think>1+1=2</think><answer>2</answer>'
    """
    if ":" not in name:
        refuse_unknown("rewards.form", name, [*FORMS])
        return FORMS[name]
    names = OWN_TAGS.fullmatch(name)
    if not names:
        raise ValueError(f"rewards.form = {name!r}: write tags of your own as tags:think,answer")
    return _tags(*names.groups())._replace(name=name)
