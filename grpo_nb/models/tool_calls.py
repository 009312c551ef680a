"""Write and read tool calls with a tokenizer that is extended by TRL's parsers and templates."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from grpo_nb.models.template import DEFAULTS
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_tools(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Prepare the tokenizer's template in place for turns with tool calls and results.

    TRL has parsers for the calls of many templates, and variants of these templates that never
    rewrite earlier turns. Both are added to the tokenizer, so that rollouts and training render
    the same text.

    Raises:
        ValueError: The template does not render calls or results, or TRL cannot read its calls.
    """
    from trl import chat_template_utils

    if not chat_template_utils.supports_tool_calling(tokenizer):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not render tool calls and "
            "their results: take a model that was tuned for tools, such as Qwen/Qwen3-1.7B"
        )
    defaults = DEFAULTS.match(tokenizer.chat_template)[0]
    # TRL recognizes a template by its text, so the defaults of `add_defaults` are removed first.
    tokenizer.chat_template = tokenizer.chat_template.removeprefix(defaults)
    try:
        if not getattr(tokenizer, "response_template", None):
            chat_template_utils.add_response_schema(tokenizer)
        if not chat_template_utils.is_chat_template_prefix_preserving(tokenizer):
            tokenizer.chat_template = chat_template_utils.get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(
            f"TRL has no parser for the tool calls of {tokenizer.name_or_path!r} ({error}): set "
            "tokenizer.response_template and save the tokenizer with it, or take another model"
        ) from error
    finally:
        tokenizer.chat_template = defaults + tokenizer.chat_template
    return tokenizer


def parse(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], before: Sequence[int]
) -> Message:
    """Return a completion as a message; a call that cannot be parsed stays in its content.

    Args:
        tokenizer: A tokenizer prepared by `with_tools`.
        ids: Token ids of the completion.
        before: Token ids of its prompt.
    """
    from trl.chat_template_utils import parse_response

    return parse_response(tokenizer, list(ids), prefix=list(before))


def _turns_with_call(name: str) -> list[Message]:
    """Return a user's turn, and an assistant's turn that calls the tool of this name."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "1"}, answer]


def tool_turn(tokenizer: "PreTrainedTokenizerBase", results: list[Message]) -> list[int]:
    """Return the token ids after a call's stop token, up to the start of the model's next turn.

    These ids contain the results of the calls, as the template renders them. TRL builds the same.
    """
    turns, options = _turns_with_call(results[0]["name"]), {"tokenize": True, "return_dict": False}
    before = tokenizer.apply_chat_template(turns, **options)
    after = tokenizer.apply_chat_template(turns + results, add_generation_prompt=True, **options)
    stops = [place for place, token in enumerate(before) if token == tokenizer.eos_token_id]
    return after[stops[-1] + 1 if stops else len(before) :]


def opens_call(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text that opens a call, such as "<tool_call>".

    If a parsed message still has this text in its content, the call is malformed.
    """
    turns = _turns_with_call("NAME")
    with_call = tokenizer.apply_chat_template(turns, tokenize=False)
    turns[1].pop("tool_calls")
    without = tokenizer.apply_chat_template(turns, tokenize=False)
    pairs = zip(with_call, without, strict=False)
    start = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return re.match(r"\s*([^\s{]*)", with_call[start:])[1].partition("NAME")[0]
