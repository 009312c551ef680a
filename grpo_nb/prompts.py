"""Tags, the system prompt, chat building, and answer extraction in linear time.

A prompt is a chat: `[{"role": "system", …}, {"role": "user", …}]`. A well-formed
completion is `<reasoning>…</reasoning><answer>…</answer>`. Extraction uses
`str.find`/`str.partition` alone, so that a megabyte of tags costs milliseconds.
"""

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


def extract_tag(text: str, tag: str) -> str | None:
    """What stands between the only `<tag>` and the only `</tag>`, stripped.

    Several opening or closing tags give None: which one is meant would be a guess, and
    a guess can be farmed ("<answer>1</answer><answer>2</answer>…").

    >>> extract_tag("<answer> 85 </answer>", "answer")
    '85'
    >>> extract_tag("<answer>85", "answer") is None
    True
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    inner, closed, _ = text.partition(opening)[2].partition(closing)
    return inner.strip() if closed else None


def extract_answer(text: str) -> str | None:
    """The answer of a completion, or None where there is not exactly one."""
    return extract_tag(text, ANSWER)


def extract_hash_answer(text: str) -> str | None:
    """What follows the last `####`, as GSM8K marks its golds.

    >>> extract_hash_answer("She earned 0.2 x 50 = $10.\\n#### 10")
    '10'
    """
    _, marker, answer = text.rpartition("####")
    return answer.strip() or None if marker else None
