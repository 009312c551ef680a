"""Build prompts, which are chats (`[{"role": "user", …}, …]`), and read the text of completions.

In a task with images, the content of the last turn is a list of parts: the images, then the text.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_nb.answers.forms import TAGS

if TYPE_CHECKING:
    from PIL.Image import Image

Message = dict[str, Any]
Completion = str | Sequence[Message]


def build_prompt(question: str, system_prompt: str = TAGS.system_prompt) -> list[Message]:
    """Return chat messages that ask one question.

    Args:
        question: The user's question.
        system_prompt: The system prompt; "" leaves it out, since some chat templates refuse it.

    Returns:
        One or two messages, ready for a chat template.

    >>> [m["role"] for m in build_prompt("What is 2 + 2?")]
    ['system', 'user']
    """
    user = {"role": "user", "content": question}
    return [{"role": "system", "content": system_prompt}, user] if system_prompt else [user]


def images_of(prompt: Sequence[Message]) -> list[Any]:
    """Return the images of a prompt, in the order of its parts."""
    contents = [turn["content"] for turn in prompt if isinstance(turn.get("content"), list)]
    return [part["image"] for parts in contents for part in parts if part["type"] == "image"]


def completion_text(completion: Completion) -> str:
    """Return the text of a completion, in any shape that TRL or a chat server returns.

    Args:
        completion: A string, or messages whose content is a string, None, or parts
            (`{"type": "text", "text": …}`; parts that are not text are skipped).

    Returns:
        The text of the last message; "" for no message or no content.

    >>> completion_text([{"role": "assistant", "content": [{"type": "text", "text": "4"}]}])
    '4'
    >>> completion_text([]), completion_text([{"role": "assistant", "content": None}])
    ('', '')
    """
    if isinstance(completion, str):
        return completion
    return message_text(completion[-1]) if completion else ""


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; parts that are not text are left out."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def with_images(prompt: list[Message], images: "Sequence[Image]") -> list[Message]:
    """Return the prompt with the images before the text of its last turn."""
    *before, last = prompt
    parts = [{"type": "image", "image": image} for image in images]
    text = {"type": "text", "text": message_text(last)}
    return [*before, last | {"content": [*parts, text]}]


def as_text(prompt: Completion) -> Completion:
    """Return the prompt without its images, with text as the content of each turn.

    >>> as_text([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}])
    [{'role': 'user', 'content': '?'}]
    """
    if isinstance(prompt, str):
        return prompt
    return [
        {**turn, "content": message_text(turn)} if isinstance(turn.get("content"), list) else turn
        for turn in prompt
    ]


def in_parts(prompt: Completion) -> Completion:
    """Return a prompt as TRL passes it to rewards: if it has images, each content is a list."""
    if isinstance(prompt, str) or all(isinstance(turn.get("content"), str) for turn in prompt):
        return prompt
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else turn
        for turn in prompt
    ]


def digest(image: "Image") -> str:
    """Return the SHA-256 of an image's size and pixels."""
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()


def json_key(value: Any) -> str:
    """Return text for `json.dumps(default=…)`: the digest of an image, or else `str(value)`."""
    return digest(value) if hasattr(value, "getpixel") else str(value)


def question_key(row: Mapping[str, Any]) -> str:
    """Return a key that identifies a question: its text, and the digests of its images, if any."""
    return "\n".join([row["question"], *map(digest, row.get("images", ()))])


def loggable(messages: Completion) -> Completion:
    """Return an episode's messages with tool calls as text, because arguments may have any type.

    The calls may already be text, because TRL logs completions again if several steps use them.
    """
    if isinstance(messages, str):
        return messages
    return [
        turn | {"tool_calls": json.dumps(turn["tool_calls"], default=str)}
        if isinstance(turn.get("tool_calls"), list)
        else turn
        for turn in messages
    ]


def transcript(completion: Completion) -> str:
    """Return a completion as readable text; an episode has a line for each tool call and result.

    Tool calls may already be text, as `loggable` returns them.

    >>> call = {"function": {"name": "guess", "arguments": {"number": 4}}}
    >>> print(transcript([{"role": "assistant", "content": "", "tool_calls": [call]},
    ...                   {"role": "tool", "name": "guess", "content": "higher"}]))
    guess(number=4)
    → higher
    """
    if isinstance(completion, str):
        return completion
    lines = []
    for message in completion:
        text = completion_text([message])
        lines += ["→ " * (message["role"] == "tool") + text] if text else []
        calls = message.get("tool_calls") or ()
        for call in json.loads(calls) if isinstance(calls, str) else calls:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, dict):  # a model may write any JSON value
                arguments = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            lines.append(f"{call['function']['name']}({arguments})")
    return "\n".join(lines)


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation.

    >>> split_words("It's 18, so…")
    ['it', 's', '18', 'so']
    """
    return re.findall(r"[^\W_]+", text.casefold())
