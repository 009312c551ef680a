"""Render a prompt with the chat template, as the model sees it."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]  # JSON schemas of the tools that a model may call
# What `add_defaults` puts before a template.
DEFAULTS = re.compile(r"(?:{% if (\w+) is not defined %}{% set \1 = .*?%}{% endif %})*")


def add_defaults(template: str, values: Mapping[str, Any]) -> str:
    """Put defaults for variables before a template, unless they are there already.

    >>> add_defaults("Hi", {"thinking": False})
    '{% if thinking is not defined %}{% set thinking = False %}{% endif %}Hi'
    """
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in values.items()
    )
    return template if template.startswith(defaults) else defaults + template


def fold_system(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> list[Message]:
    """Move the system prompt to the start of the user's turn if the template has no system role.

    The templates of Gemma 2 and of the first Mistral models refuse that role; others ignore it.
    """
    roles = [turn["role"] for turn in prompt[:2]]
    if roles != ["system", "user"] or _takes_system(tokenizer):
        return prompt
    system, user, *others = prompt
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *others]


@lru_cache(maxsize=4)
def _takes_system(tokenizer: "PreTrainedTokenizerBase") -> bool:
    system = "What the system prompt says."
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "1"}]
    try:
        return system in _apply(tokenizer, turns)
    except ValueError:
        return False


@lru_cache(maxsize=4)
def opens_thinking(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text at a prompt's end that opens a block of thought; "" for most templates.

    Qwen3's Thinking models and DeepSeek's distilled ones end a prompt in "<think>\\n", so their
    completions begin inside the block.
    """
    prompt = _apply(tokenizer, [{"role": "user", "content": "1"}])
    tag = re.search(r"(<[\w:]+>|\[THINK\])\s*$", prompt)
    return tag[0] if tag else ""


def render(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], tools: Tools = ()) -> str:
    """Render a prompt up to where its completion begins.

    Args:
        tokenizer: The policy's tokenizer.
        prompt: The turns.
        tools: JSON schemas of the tools that the model may call.

    Raises:
        ValueError: A turn holds a token that only the template may write, with which it could
            forge another turn; or the template refuses the turns.
    """
    for turn in prompt:
        for part in ("role", "content"):
            if token := _reserved_tokens(tokenizer).search(turn[part]):
                raise ValueError(
                    f"the {part} of a turn holds {token[0]!r}, a special token or one that the "
                    "chat template puts around turns"
                )
    return _apply(tokenizer, fold_system(tokenizer, prompt), tools)


def _apply(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], tools: Tools = ()) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            prompt,
            tools=list(tools) or None,  # Llama's template would describe an empty list
            tokenize=False,
            add_generation_prompt=True,
        )
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in prompt)
        raise ValueError(f"the chat template refuses the turns {roles}: {error}") from None


@lru_cache(maxsize=4)
def _reserved_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern:
    """Match special tokens, and others that the template writes, such as DeepSeek's."""
    empty_turn = _apply(tokenizer, [{"role": "user", "content": ""}])
    added = tokenizer.added_tokens_decoder.values()
    texts = [token.content for token in added if token.special or token.content in empty_turn]
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def encode(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[Message]], tools: Tools = ()
) -> list[list[int]]:
    """Return the token ids of each rendered prompt, neither padded nor cut.

    Raises:
        ValueError: `render` refuses a prompt.
    """
    if not prompts:
        return []
    texts = [render(tokenizer, prompt, tools) for prompt in prompts]
    options = {"add_special_tokens": False, "padding": False, "truncation": False}
    return tokenizer(texts, **options)["input_ids"]


def count_tokens(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[Message]], tools: Tools = ()
) -> list[int]:
    """Return the length of each rendered prompt [tokens], or raise what `render` raises."""
    return [len(ids) for ids in encode(tokenizer, prompts, tools)]


def check_template(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> Check:
    """Check what becomes of the system prompt, and where completions begin.

    Raises:
        ValueError: The rendered prompt does not end where the answer begins.
    """
    rendered, turns = render(tokenizer, prompt), fold_system(tokenizer, prompt)
    without_opening = tokenizer.apply_chat_template(turns, tokenize=False)
    answer = {"role": "assistant", "content": "ANSWER"}
    with_answer = tokenizer.apply_chat_template([*turns, answer], tokenize=False)
    opens_turn = rendered != without_opening and rendered.startswith(without_opening)
    if not opens_turn and not rendered.startswith(with_answer.partition("ANSWER")[0]):
        raise ValueError(
            f"the chat template ignores add_generation_prompt: the prompt ends in "
            f"{rendered[-40:]!r} and does not open the assistant's turn. Take an instruct model, "
            "or correct the template"
        )
    evidence = f"a prompt ends in {rendered[-40:]!r}"
    if thinking := opens_thinking(tokenizer):
        evidence += f"; completions begin inside the block that {thinking.strip()} opens"
    if turns == prompt:
        return Check("chat template", "ok", evidence)
    evidence += "; it takes no system role, so the system prompt begins the first user turn"
    fix = "leave it so, or take a model that has the role"
    return Check("chat template", "warning", evidence, fix)


def show_tokens(
    tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], tools: Tools = ()
) -> str:
    """Write the rendered prompt token by token: ⟦special⟧, others between bars, ⏎ for a newline."""
    [ids] = encode(tokenizer, [prompt], tools)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    line = ""
    for token in ids:
        text = tokenizer.decode([token]).replace("\n", "⏎\n")
        line += f"⟦{text}⟧" if token in special else f"{text}|"
    return line
