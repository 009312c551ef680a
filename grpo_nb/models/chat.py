"""The tokenizer, and the prompt as the model sees it."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import Check, project_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NONE: Mapping[str, Any] = {}
_DEFAULTS = re.compile(r"(?:{% if (\w+) is not defined %}{% set \1 = .*?%}{% endif %})*")


def find_model(model_path: str) -> str:
    """A local folder as an absolute path, or a hub name as it is.

    Raises:
        FileNotFoundError: Neither a folder with a config.json nor of the form org/name.
    """
    folder = project_path(Path(model_path).expanduser())
    if (folder / "config.json").is_file():
        return str(folder)
    beside = folder.exists() or folder.parent.is_dir()  # data/tiny_bas is no hub name
    if beside or model_path.count("/") != 1 or model_path[0] in "/.~":
        raise FileNotFoundError(
            f"model_path {model_path!r}: {folder} holds no config.json. Give the folder of a "
            "saved model, or a hub name such as Qwen/Qwen2.5-1.5B-Instruct"
        )
    return model_path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep banners, bars and warnings of the libraries back.

    They are shown above an error that is not one of ours, whose sentence says what is wrong.
    """
    text = io.StringIO()
    text.fileno = lambda: 1  # vLLM asks standard output for it while it loads
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    except (ValueError, FileNotFoundError):
        raise
    except Exception:
        print(text.getvalue(), file=sys.stderr)
        raise


@contextlib.contextmanager
def hub_errors(model_path: str) -> Iterator[None]:
    """What a library raises while it loads a model, as a sentence that names the model."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {model_path} are damaged ({error}), as after a copy that was cut "
            "off: copy them again, or run the notebook that wrote them again"
        ) from None
    except OSError as error:
        raise FileNotFoundError(
            f"model_path {model_path!r} could not be loaded ({str(error).splitlines()[0]}). Give "
            "the folder of a model saved as safetensors with its tokenizer, or check the hub name "
            "and the network"
        ) from error


def load_tokenizer(
    model_path: str, chat_template_kwargs: Mapping[str, Any] = NONE
) -> "PreTrainedTokenizerBase":
    """The tokenizer, padding on the left.

    Args:
        model_path: Folder or hub name.
        chat_template_kwargs: `model.chat_template_kwargs`. The template itself gets them as its
            defaults, so that whoever renders with it, a merged model's server too, has them.

    Raises:
        ValueError: It has no chat template, so that prompts cannot be rendered.
    """
    with quiet(), hub_errors(model_path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(find_model(model_path), padding_side="left")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {model_path!r} has no chat template: take an instruct model, or "
            "save one with tokenizer.chat_template = … and tokenizer.save_pretrained(folder)"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    defaults = "".join(  # as _DEFAULTS finds them
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in chat_template_kwargs.items()
    )
    template = tokenizer.get_chat_template()
    if not template.startswith(defaults):  # as a saved policy's does
        tokenizer.chat_template = defaults + template
    return tokenizer


def fold_system(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> list[Message]:
    """The prompt as the template takes it: without a system role, the user's turn begins with it.

    Gemma 2 and the first Mistral models refuse the role; others pass over it.
    """
    roles = [turn["role"] for turn in prompt[:2]]
    if roles != ["system", "user"] or _takes_system(tokenizer):
        return prompt
    system, user, *others = prompt
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *others]


@lru_cache(maxsize=4)
def _takes_system(tokenizer: "PreTrainedTokenizerBase") -> bool:
    said = "What the system prompt says."
    turns = [{"role": "system", "content": said}, {"role": "user", "content": "1"}]
    try:
        return said in _apply(tokenizer, turns)
    except ValueError:
        return False


@lru_cache(maxsize=4)
def opens_thinking(tokenizer: "PreTrainedTokenizerBase") -> str:
    """What at the prompt's end opens a block of thought, so that completions begin inside it.

    Such as "<think>\\n", of Qwen3's Thinking models and DeepSeek's distills; "" for most.
    """
    prompt = _apply(tokenizer, [{"role": "user", "content": "1"}])
    found = re.search(r"(<[\w:]+>|\[THINK\])\s*$", prompt)
    return found[0] if found else ""


def render(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: list[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt as the model sees it, ready for its completion; `tools` as JSON schemas.

    Raises:
        ValueError: A turn holds a token that only the template may write, so that the model would
            see turns that nobody took; or the template refuses the turns.
    """
    for turn in prompt:
        for part in ("role", "content"):
            if found := _control_tokens(tokenizer).search(turn[part]):
                raise ValueError(
                    f"the {part} of a turn holds {found[0]!r}, a special token or one that the "
                    "chat template puts around turns"
                )
    return _apply(tokenizer, fold_system(tokenizer, prompt), tools)


def _apply(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: list[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    from jinja2 import TemplateError

    asked = {"tools": list(tools)} if tools else {}  # Llama's template writes of an empty list
    try:
        return tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, **asked
        )
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in prompt)
        raise ValueError(f"the chat template refuses the turns {roles}: {error}") from None


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern:
    """Finds special tokens, and others that the template writes, as DeepSeek's around turns."""
    around = _apply(tokenizer, [{"role": "user", "content": ""}])
    added = tokenizer.added_tokens_decoder.values()
    texts = [token.content for token in added if token.special or token.content in around]
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def with_tools(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """The same tokenizer, its template fit for turns with calls and results.

    TRL knows how the calls of many templates are read, and a form of them that keeps what was said
    before; both go into the tokenizer, so that whoever plays and whoever trains see the same.

    Raises:
        ValueError: The template does not render calls or results, or nobody knows how to read them.
    """
    from trl import chat_template_utils as trls

    defaults, template = _DEFAULTS.match(tokenizer.chat_template)[0], tokenizer.chat_template
    if not trls.supports_tool_calling(tokenizer):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not render calls of tools and "
            "their results: take a model that was tuned for tools, such as Qwen/Qwen3-1.7B"
        )
    tokenizer.chat_template = template.removeprefix(defaults)  # TRL knows templates by their text
    try:
        if not getattr(tokenizer, "response_template", None):
            trls.add_response_schema(tokenizer)
        if not trls.is_chat_template_prefix_preserving(tokenizer):
            tokenizer.chat_template = trls.get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(
            f"how {tokenizer.name_or_path!r} writes calls of tools is not known ({error}): set "
            "tokenizer.response_template and save the tokenizer with it, or take another model"
        ) from error
    finally:
        tokenizer.chat_template = defaults + tokenizer.chat_template
    return tokenizer


def parse(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], before: Sequence[int]
) -> Message:
    """What the model said, as a message; calls that cannot be read stay in its content."""
    from trl.chat_template_utils import parse_response

    return parse_response(tokenizer, list(ids), prefix=list(before))


def tool_turn(tokenizer: "PreTrainedTokenizerBase", results: list[Message]) -> list[int]:
    """Token ids of the results of calls, up to where the model speaks again; as TRL makes them.

    They are what the template adds to a turn with a call, from its stop token on.
    """
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns = [{"role": "user", "content": "dummy"}, called]
    ids = {"tokenize": True, "return_dict": False}
    before = tokenizer.apply_chat_template(turns, **ids)
    after = tokenizer.apply_chat_template(turns + results, add_generation_prompt=True, **ids)
    stops = [place for place, token in enumerate(before) if token == tokenizer.eos_token_id]
    return after[stops[-1] + 1 if stops else len(before) :]


def tool_fault(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: list[Message],
    called: Message,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """What is lost where a call is written and read back, or a result is written; "" if nothing.

    Args:
        tokenizer: Prepared by `with_tools`.
        prompt: Before the turn.
        called: A turn with calls.
        tools: As JSON schemas.
    """
    turns, before = fold_system(tokenizer, prompt), render(tokenizer, prompt, tools)
    closed, whole = (
        tokenizer.apply_chat_template(some, tools=list(tools), tokenize=False)
        for some in (turns, [*turns, called])
    )
    before = before if whole.startswith(before) else closed  # a block of thought may be left out
    said = whole.removeprefix(before)
    read = parse(tokenizer, *tokenizer([said, before], add_special_tokens=False)["input_ids"])
    functions = [call["function"] for call in called["tool_calls"]]
    if [call["function"] for call in read.get("tool_calls") or ()] != functions:
        return f"a call is written {said!r}, and read back as {read}"
    result = {"role": "tool", "name": functions[0]["name"], "content": "it is 17"}
    heard = tokenizer.decode(tool_turn(tokenizer, [result]))
    return "" if "it is 17" in heard else f"the result 'it is 17' is written {heard!r}"


def opens_call(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text that opens a call, such as "<tool_call>": in a content, it is a malformed call."""
    call = {"type": "function", "function": {"name": "NAME", "arguments": {}}}
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]
    plain = tokenizer.apply_chat_template(turns, tokenize=False)
    turns[1] |= {"tool_calls": [call]}
    called = tokenizer.apply_chat_template(turns, tokenize=False)
    start = next(i for i, pair in enumerate(zip(plain, called, strict=False)) if len({*pair}) > 1)
    return re.match(r"\s*([^\s{]*)", called[start:])[1].partition("NAME")[0]


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """Token ids of each rendered prompt, none of them padded or cut.

    Raises:
        ValueError: As `render` does.
    """
    texts = [render(tokenizer, prompt, tools) for prompt in prompts]
    plain = {"add_special_tokens": False, "padding": False, "truncation": False}
    return tokenizer(texts, **plain)["input_ids"] if texts else []


def count_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Tokens of each rendered prompt; errors as of `render`."""
    return list(map(len, encode(tokenizer, prompts, tools)))


def check_template(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> Check:
    """The check "chat template": what becomes of the system prompt, and where completions begin.

    Raises:
        ValueError: It does not end a prompt where the answer begins.
    """
    opened, folded = render(tokenizer, prompt), fold_system(tokenizer, prompt)
    answered = [*folded, {"role": "assistant", "content": "ANSWER"}]
    closed, whole = (
        tokenizer.apply_chat_template(turns, tokenize=False) for turns in (folded, answered)
    )
    opens = opened != closed and opened.startswith(closed)
    if not opens and not opened.startswith(whole.partition("ANSWER")[0]):
        raise ValueError(
            f"the chat template ignores add_generation_prompt: the prompt ends in {opened[-40:]!r} "
            "and does not open the assistant's turn. Take an instruct model, or correct the "
            "template"
        )
    seen = f"a prompt ends in {opened[-40:]!r}"
    if thinking := opens_thinking(tokenizer):
        seen += f"; completions begin inside the block that {thinking.strip()} opens"
    if folded == prompt:
        return Check("chat template", "ok", seen)
    seen += "; it takes no system role, so the system prompt begins the first user turn"
    return Check("chat template", "warning", seen, "leave it so, or take a model that has the role")


def show_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: list[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The rendered prompt token by token: ⟦special⟧, others between bars, ⏎ for a line's end."""
    [ids] = encode(tokenizer, [prompt], tools)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    shown = ""
    for token in ids:
        text = tokenizer.decode([token]).replace("\n", "⏎\n")
        shown += f"⟦{text}⟧" if token in special else f"{text}|"
    return shown
