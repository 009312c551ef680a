"""Tags, the system prompt, chat building, and answer extraction in linear time.

A prompt is a chat: `[{"role": "system", …}, {"role": "user", …}]`. A well-formed
completion is `<reasoning>…</reasoning><answer>…</answer>`. Extraction uses
`str.find`/`str.partition` alone, so that a megabyte of tags costs milliseconds.
"""

import re
from collections.abc import Sequence
from typing import Any

REASONING = "reasoning"
ANSWER = "answer"
SYSTEM_PROMPT = (
    "Reason inside <reasoning></reasoning>, then give the result inside <answer></answer>."
)

Message = dict[str, Any]
Completion = str | Sequence[Message]


def build_prompt(question: str, system_prompt: str = SYSTEM_PROMPT) -> list[Message]:
    """Chat messages that ask one question.

    Args:
        question: What the user asks.
        system_prompt: Left out of the chat when empty (some templates refuse the role).

    Returns:
        One or two messages, ready for a chat template.

    >>> [m["role"] for m in build_prompt("What is 2 + 2?")]
    ['system', 'user']
    """
    user = {"role": "user", "content": question}
    return [{"role": "system", "content": system_prompt}, user] if system_prompt else [user]


def tagged(reasoning: str, answer: str) -> str:
    """A well-formed completion.

    >>> tagged("1+1=2", "2")
    '<reasoning>1+1=2</reasoning><answer>2</answer>'
    """
    return f"<{REASONING}>{reasoning}</{REASONING}><{ANSWER}>{answer}</{ANSWER}>"


def completion_text(completion: Completion) -> str:
    """The text of a completion, in any shape TRL or a chat server hands over.

    Args:
        completion: A string, or messages whose content is a string, None, or parts
            (`{"type": "text", "text": …}`; parts that are not text are passed over).

    Returns:
        The text of the last message; "" for no message or no content.

    >>> completion_text([{"role": "assistant", "content": [{"type": "text", "text": "4"}]}])
    '4'
    >>> completion_text([]), completion_text([{"role": "assistant", "content": None}])
    ('', '')
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list | tuple):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def split_words(text: str) -> list[str]:
    """Its words in lower case, without punctuation.

    >>> split_words("It's 18, so…")
    ['it', 's', '18', 'so']
    """
    return re.findall(r"[^\W_]+", text.casefold())


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


def extract_answer(text: str) -> str | None:
    """The final answer of a completion: of its answer tag, else boxed, else after `####`.

    A completion that uses none of the three is its own answer. One that opens an answer
    tag and never closes it has none.

    >>> [extract_answer(t) for t in ("<answer>18</answer>", "#### 18", "18", "<answer>18")]
    ['18', '18', '18', None]
    """
    tagged = extract_tag(text, ANSWER)
    if tagged is not None:
        return extract_boxed(tagged) or tagged
    if f"<{ANSWER}>" in text:
        return None
    return extract_boxed(text) or extract_hash_answer(text) or text.strip() or None


def extract_hash_answer(text: str) -> str | None:
    """What follows the last `####`, as GSM8K marks its answers.

    >>> extract_hash_answer("She earned 0.2 x 50 = $10.\\n#### 10")
    '10'
    """
    _, marker, answer = text.rpartition("####")
    return answer.strip() or None if marker else None
