"""The tokenizer, and the prompt as the model sees it."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import project_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_model(model_path: str) -> str:
    """A local folder as an absolute path, or a hub name as it is.

    Raises:
        FileNotFoundError: Neither a folder with a config.json nor of the form org/name.
    """
    folder = project_path(Path(model_path).expanduser())
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.exists() or model_path.count("/") != 1 or model_path[0] in "/.~":
        raise FileNotFoundError(
            f"model_path {model_path!r}: {folder} holds no config.json. Give the folder of a "
            "saved model, or a hub name such as Qwen/Qwen2.5-1.5B-Instruct"
        )
    return model_path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep banners and bars of the libraries back, unless loading fails."""
    text = io.StringIO()
    text.fileno = lambda: 1  # vLLM asks standard output for it while it loads
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
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


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer, padding on the left.

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
    return tokenizer


def render(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> str:
    """The prompt as the model sees it, ready for its completion.

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
    return _apply(tokenizer, prompt)


def _apply(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
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


def count_tokens(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[Message]]
) -> list[int]:
    """Tokens of each rendered prompt.

    Raises:
        ValueError: As `render` does.
    """
    texts = [render(tokenizer, prompt) for prompt in prompts]
    plain = {"add_special_tokens": False, "padding": False, "truncation": False}
    return list(map(len, tokenizer(texts, **plain)["input_ids"])) if texts else []


def check_generation_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> None:
    """Raise ValueError unless the chat template ends a prompt where the answer begins."""
    closed = tokenizer.apply_chat_template(prompt, tokenize=False)
    opened = render(tokenizer, prompt)
    if opened == closed or not opened.startswith(closed):
        raise ValueError(
            f"the chat template ignores add_generation_prompt: the prompt ends in {opened[-40:]!r} "
            "and does not open the assistant's turn. Take an instruct model, or correct the "
            "template"
        )


def show_tokens(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> str:
    """The rendered prompt token by token: ⟦special⟧, others between bars, ⏎ for a line's end."""
    ids = tokenizer(render(tokenizer, prompt), add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    shown = ""
    for token in ids:
        text = tokenizer.decode([token]).replace("\n", "⏎\n")
        shown += f"⟦{text}⟧" if token in special else f"{text}|"
    return shown
