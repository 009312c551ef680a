"""Build prompts, which are chats (`[{"role": "user", …}, …]`), and read the text of completions."""

import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_nb.answers.forms import TAGS

Message = dict[str, Any]
Completion = str | Sequence[Message]


def build_prompt(question: str, system_prompt: str = TAGS.system_prompt) -> list[Message]:
    """Return chat messages that ask one question.

    Args:
        question: What the user asks.
        system_prompt: The system prompt; "" leaves it out, as some templates refuse the role.

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


def loggable(messages: Completion) -> Completion:
    """Return an episode's messages with their calls as text: arguments may be of any type.

    Calls may be text already, since TRL logs completions again if several steps learn from them.
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
    """Return a completion for people to read; in an episode each call and result has its own line.

    Calls may be text, as `loggable` leaves them.

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
