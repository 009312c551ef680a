"""Find the answer in a completion: in a tag, in a box, or after a marker."""

import re

READ = 20_000  # characters at a completion's end that are searched


def extract_tag(text: str, tag: str) -> str | None:
    """Return the content of the last complete `<tag>…</tag>`, stripped; None if there is none.

    The last one counts, so listing candidates ("<answer>1</answer><answer>2</answer>…")
    gains nothing; the format rewards refuse a repeated tag.

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
    r"""Return (start, end) of the content of each closed `\boxed{…}` outside other boxes."""
    boxes, open_braces = [], []
    if (first := text.find(r"\boxed")) < 0:
        return []
    for brace in re.compile(r"\\boxed\s*\{|\\[{}]|[{}]").finditer(text, first):
        if brace[0].endswith("{"):
            open_braces.append((brace[0].startswith(r"\boxed"), brace.end()))
        elif open_braces:
            boxed, start = open_braces.pop()
            while boxed and boxes and boxes[-1][0] > start:
                boxes.pop()
            boxes += [(start, brace.start())] if boxed else []
    return boxes


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{…}`; None if there is none.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    boxes = boxes_of(text)
    return text[slice(*boxes[-1])].strip() if boxes else None


def extract_hash_answer(text: str) -> str | None:
    """Return the text after the last `####`, which marks answers in GSM8K; None if there is none.

    >>> extract_hash_answer("She earned 0.2 x 50 = $10.\\n#### 10")
    '10'
    """
    _, marker, answer = text.rpartition("####")
    return answer.strip() or None if marker else None


_HEADING = re.compile(r"(?i)(?:\*\*|^|(?<=[.\n]))[#* ]{0,9}\bfinal answer\b[*: ]{0,9}(?!\s*is\b)")
_MARKER = re.compile(r"(?i)####|\banswer\*{0,2}\s*(?:is\b\s*:?|:)\*{0,2}")
_CONCLUSION = re.compile(r"(?<!\S)(?:Therefore|Thus|Hence|So)\b,?")
NAME = (
    r"(?:(?:\\[A-Za-z]+|[A-Za-z]{1,20}|\\text\{[^{}]*\})(?:_(?:\{[^{}]*\}|\w))?'*(?:\^\{-1\})?"
    r"(?:\s?\(\s?[A-Za-z](?:\s?,\s?[A-Za-z])*\s?\))?|\(\s?[A-Za-z](?:\s?,\s?[A-Za-z])*\s?\))"
)
PLAIN_WORD = (
    r"(?:(?!(?:pi|sin|cos|tan|log|exp|mod)\b)[A-Za-z]{2}[A-Za-z'’-]*|[aAI])(?![A-Za-z])"  # a word
)
_LONE_NUMBER = re.compile(
    rf"\s*(?:{PLAIN_WORD}[,:;]?\s+)*(-?\d(?:[\d,./]*\d)?%?)(?:\s+{PLAIN_WORD}[,:;]?)*[\s.]*"
)
_SENTENCE_END = re.compile(r"[.!?]\s")
_GOES_ON = re.compile(r"(?i)[\s.!?]*(?:or|wait|no|not|but|actually|maybe|perhaps|however|unless)\b")
HEDGE = re.compile(
    r"(?i)(?<![\\\w])(?:not?|nor|never|neither|either|isn|aren|wasn|don|doesn|cannot|can't|if"
    r"|unless|maybe|perhaps|possibly|probably|might|wrong|incorrect|false|instead|except|but|wait"
    r"|guess|unknown"
    r"|(?:at|the) (?:least|most)\b(?! \w+ \w)|(?:more|less|fewer|greater|smaller|other) than"
    r"|between|twice|double|half|minus|plus|times|over|squared|cubed|hundred|thousand|[mb]illion"
    r"|dozen|factorial|choose)\b"
)


def find_answer(text: str) -> str | None:
    r"""Return the part of a completion that states its answer; None if there is none.

    If the completion has answer tags, the answer is the content of the last closed tag, or None if
    no tag is closed. Without such tags, only the text after the last `</think>` and after the last
    heading "**Final answer**" is read. The answer is then the first of these that exists:

    1. The text after `####`, if that is the last marker.
    2. The sentence after the last marker, if that is "the answer is" or "Answer:", unless boxes
       stand only after that sentence.
    3. The contents of all boxes, or, if there is a marker, of the boxes after the last one.
    4. The last sentence that begins with "Therefore", "Thus", "Hence" or "So", if there is no
       heading.
    5. The first sentence after the heading, or the whole text if there is no heading.

    >>> texts = "<answer>18</answer>", r"so \boxed{18}.", "The answer is 18. I hope so"
    >>> [find_answer(text) for text in texts]
    ['18', '18', '18']
    """
    if (tag_content := extract_tag(text, "answer")) is not None:
        return tag_content
    if "<answer>" in text:
        return None
    text, heading = text.rpartition("</think>")[2][-READ:], None
    has_marker = "nswer" in text or "NSWER" in text or "####" in text  # quicker than the searches
    for heading in list(_HEADING.finditer(text))[-1:] if has_marker else []:
        text = text[heading.end() :]
    for marker in list(_MARKER.finditer(text))[-1:] if has_marker else []:
        text = text[marker.end() :]
        if marker[0] == "####":
            return text.strip() or None
        sentence = _sentence(text)
        if r"\boxed" in sentence or r"\boxed" not in text:
            return sentence.strip() or None
    if boxes := boxes_of(text):
        contents = list(dict.fromkeys(text[start:end] for start, end in boxes))
        if len(contents) == 1:
            return contents[0].strip()
        hedge = HEDGE.search(text[boxes[0][1] : boxes[-1][0]])  # a hedge rules out all boxes
        return text if hedge else ", ".join(rf"\boxed{{{content}}}" for content in contents)
    for conclusion in list(_CONCLUSION.finditer(text))[-1:] if heading is None else []:
        return _sentence(text[conclusion.end() :]).strip()
    return (_sentence(text) if heading else text).strip() or None


def _sentence(text: str) -> str:
    """Return the first sentence, or its only number.

    If the next sentence hedges, the whole text is returned, so that the answer is refused.
    """
    end = _SENTENCE_END.search(text)
    if end and _GOES_ON.match(text, end.end()):
        return text
    text = text[: end.start()] if end else text
    words = re.sub(rf"\$\s*(?:{NAME}|(-?\d[\d.,/]*%?))\s*\$|[$€£](?=\d)", r" \1", text)
    lone = _LONE_NUMBER.fullmatch(words)
    return lone[1] if lone and not HEDGE.search(words) else text
