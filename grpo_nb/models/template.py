"""Render chats with the chat template, as the model sees them, with images and tool calls."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_nb.checks import Check
from grpo_nb.rewards.prompts import Message, completion_text, images_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]  # JSON schemas of the tools that a model may call
# A default that `add_defaults` puts before a template, and its assignment.
DEFAULT = re.compile(r"{% if (\w+) is not defined %}({% set \1 = .*? %}){% endif %}")


def add_defaults(template: str, values: Mapping[str, Any]) -> str:
    """Put defaults for variables before the template, unless it already begins with them.

    >>> add_defaults("Hi", {"thinking": False})
    '{% if thinking is not defined %}{% set thinking = False %}{% endif %}Hi'
    """
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in values.items()
    )
    return template if template.startswith(defaults) else defaults + template


def without_conditions(template: str) -> str:
    """Return a template whose defaults, from `add_defaults`, no caller can override.

    >>> without_conditions(add_defaults("Hi", {"thinking": False}))
    '{% set thinking = False %}Hi'
    """
    defaults = _defaults(template)
    return DEFAULT.sub(r"\2", defaults) + template.removeprefix(defaults)


def _defaults(template: str) -> str:
    """Return the defaults that a template begins with."""
    return re.match(f"(?:{DEFAULT.pattern})*", template)[0]


def fold_system(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> list[Message]:
    """Move the system prompt to the start of the user's turn if the template has no system role.

    The templates of Gemma 2 and of the first Mistral models raise an error for a system role; some
    templates ignore it.
    """
    roles = [turn["role"] for turn in prompt[:2]]
    if roles != ["system", "user"] or _takes_system(tokenizer):
        return prompt
    system, user, *others = prompt
    before, content = f"{system['content']}\n\n", user["content"]
    if isinstance(content, str):
        return [user | {"content": before + content}, *others]
    return [user | {"content": [*_parts(before), *content]}, *others]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a turn's content as a list of parts, which vision-language templates expect."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
    """Return the text that opens a thinking block at a prompt's end; "" for most templates.

    Qwen3's Thinking models and DeepSeek's distilled ones end a prompt with "<think>\\n", so their
    completions begin inside the block.
    """
    prompt = _apply(tokenizer, [{"role": "user", "content": "1"}])
    tag = re.search(r"(<[\w:]+>|\[THINK\])\s*$", prompt)
    return tag[0] if tag else ""


def render(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], tools: Tools = ()) -> str:
    """Return a prompt as text, up to the point where its completion begins.

    Args:
        tokenizer: The policy's tokenizer.
        prompt: The turns of the chat.
        tools: JSON schemas of the tools that the model may call.

    Raises:
        ValueError: A turn contains a token that only the template may write and that could forge
            another turn, or the template refuses the turns.
    """
    for turn in prompt:
        for part, text in (("role", turn["role"]), ("content", completion_text([turn]))):
            if token := _reserved_tokens(tokenizer).search(text):
                raise ValueError(
                    f"the {part} of a turn holds {token[0]!r}, a special token or one that the "
                    "chat template puts around turns"
                )
    return _apply(tokenizer, fold_system(tokenizer, prompt), tools)


def _apply(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: list[Message],
    tools: Tools = (),
    add_generation_prompt: bool = True,
) -> str:
    """Render turns as text; for a processor, first convert contents to parts, as TRL does."""
    from jinja2 import TemplateError

    if hasattr(tokenizer, "processor"):
        prompt = [turn | {"content": _parts(turn.get("content", ""))} for turn in prompt]
    try:
        return tokenizer.apply_chat_template(
            prompt,
            tools=list(tools) or None,  # Llama's template would describe an empty list
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in prompt)
        raise ValueError(f"the chat template refuses the turns {roles}: {error}") from None


@lru_cache(maxsize=4)
def _reserved_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern:
    """Return a pattern of special tokens, and of other added tokens that the template writes."""
    empty_turn = _apply(tokenizer, [{"role": "user", "content": ""}])
    added = tokenizer.added_tokens_decoder.values()
    texts = [token.content for token in added if token.special or token.content in empty_turn]
    if hasattr(tokenizer, "processor"):  # it replaces this token with an image
        texts.append(tokenizer.processor.image_token)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def encode(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[Message]], tools: Tools = ()
) -> list[list[int]]:
    """Return the token ids of each rendered prompt, neither padded nor truncated.

    Raises:
        ValueError: `render` refuses a prompt.
    """
    if any(map(images_of, prompts)):  # one by one: all images at once may not fit into memory
        return [image_inputs(tokenizer, [one], tools)["input_ids"][0].tolist() for one in prompts]
    if not prompts:
        return []
    texts = [render(tokenizer, prompt, tools) for prompt in prompts]
    options = {"add_special_tokens": False, "padding": False, "truncation": False}
    return tokenizer(texts, **options)["input_ids"]


def image_inputs(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    tools: Tools = (),
    room: int = 0,
) -> "dict[str, Tensor]":
    """Return the inputs of a vision-language model for these prompts, padded on the left.

    Args:
        tokenizer: The policy's tokenizer.
        prompts: Chats, some of which contain images.
        tools: JSON schemas of the tools that the model may call.
        room: How many completion tokens will follow; token type ids include them.

    Returns:
        input_ids and attention_mask, [prompts, tokens], and the processor's tensors of the images.

    Raises:
        ValueError: `render` refuses a prompt, or the model cannot read images.
    """
    import torch

    if not hasattr(tokenizer, "processor"):
        why = f"the prompts carry images, which {tokenizer.name_or_path!r} does not read"
        raise ValueError(f"{why}: choose a vision-language model, with its processor's files")
    images = list(map(images_of, prompts))
    inputs = tokenizer.processor(
        images=images if any(images) else None,
        text=[render(tokenizer, prompt, tools) for prompt in prompts],
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    for name in {"token_type_ids", "mm_token_type_ids"} & set(inputs):
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, room))
    return dict(inputs)


def with_completion(
    tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], completion: Sequence[int]
) -> "dict[str, Tensor]":
    """Return a model's inputs: a prompt with its images, and then the tokens of a completion."""
    import torch

    [before] = encode(tokenizer, [prompt])
    inputs = {"input_ids": torch.tensor([[*before, *completion]])}
    if not images_of(prompt):
        return inputs
    images = image_inputs(tokenizer, [prompt], room=len(completion))
    del images["attention_mask"]
    return images | inputs


def count_tokens(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[Message]], tools: Tools = ()
) -> list[int]:
    """Return the length of each rendered prompt [tokens]; the errors are those of `render`."""
    return [len(ids) for ids in encode(tokenizer, prompts, tools)]


def turn_end(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text that the template writes after an answer."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "ANSWER"}]
    return _apply(tokenizer, chat, add_generation_prompt=False).rpartition("ANSWER")[2]


def check_template(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> Check:
    """Check whether the template accepts a system prompt, and where completions begin.

    Raises:
        ValueError: The rendered prompt does not end where the answer begins.
    """
    rendered, turns = render(tokenizer, prompt), fold_system(tokenizer, prompt)
    without_opening = _apply(tokenizer, turns, add_generation_prompt=False)
    answer = [*turns, {"role": "assistant", "content": "ANSWER"}]
    begin = _apply(tokenizer, answer, add_generation_prompt=False).partition("ANSWER")[0]
    opens_turn = rendered != without_opening and rendered.startswith(without_opening)
    if not opens_turn and not rendered.startswith(begin):
        raise ValueError(
            f"the chat template ignores add_generation_prompt: the prompt ends in "
            f"{rendered[-40:]!r} and does not open the assistant's turn. Take an instruct model, "
            "or correct the template"
        )
    evidence = f"a prompt ends in {rendered[-40:]!r}"
    if thinking := opens_thinking(tokenizer):
        evidence += f"; completions begin inside the block that {thinking.strip()} opens"
    if turns != prompt:
        evidence += "; it has no system role, so the system prompt begins the first user turn"
    return Check("chat template", "ok", evidence)


def show_tokens(
    tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], tools: Tools = ()
) -> str:
    """Return the rendered prompt token by token: ⟦special⟧, others ended by |, newlines as ⏎."""
    [ids] = encode(tokenizer, [prompt], tools)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    line = ""
    for token in ids:
        text = tokenizer.decode([token]).replace("\n", "⏎\n")
        line += f"⟦{text}⟧" if token in special else f"{text}|"
    return line


def with_tools(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Prepare the tokenizer's template in place for turns with tool calls and results.

    TRL has parsers for the calls of many templates, and variants of these templates that never
    rewrite earlier turns. Both are added to the tokenizer, so that rollouts and training render
    the same text.

    Raises:
        ValueError: TRL has no parser for this template's calls.
    """
    from trl import chat_template_utils

    defaults = _defaults(tokenizer.chat_template)
    # TRL recognizes a template by its text, so the defaults of `add_defaults` are removed first.
    tokenizer.chat_template = tokenizer.chat_template.removeprefix(defaults)
    if not getattr(tokenizer, "response_template", None):
        chat_template_utils.add_response_schema(tokenizer)
    if not chat_template_utils.is_chat_template_prefix_preserving(tokenizer):
        tokenizer.chat_template = chat_template_utils.get_training_chat_template(tokenizer)
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


def tool_turn(tokenizer: "PreTrainedTokenizerBase", results: list[Message]) -> list[int]:
    """Return the token ids after a call's stop token, up to the start of the model's next turn.

    The ids contain the results of the calls, as the template renders them. TRL builds the same ids.
    """
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns, options = [{"role": "user", "content": "1"}, answer], {"tokenize": True}
    options["return_dict"] = False
    before = tokenizer.apply_chat_template(turns, **options)
    after = tokenizer.apply_chat_template(turns + results, add_generation_prompt=True, **options)
    stops = [place for place, token in enumerate(before) if token == tokenizer.eos_token_id]
    return after[stops[-1] + 1 if stops else len(before) :]
