"""Find a model in a folder or on the hub, and load its config, tokenizer and processor."""

import contextlib
import copy
import io
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_nb.files import project_path, read_json, write_json
from grpo_nb.machine import skip_garbage_at_exit
from grpo_nb.models.template import add_defaults

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

# The files of a processor. A merged model gets them from its base.
FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# Names of settings for tokens that open or close an image, or represent a part of it.
IMAGE_TOKEN = re.compile(r"(image|video|audio|vision|bo[ia]|eo[ia])(_\w+)?_token_(id|index)")


def find_model(model_path: str) -> str:
    """Return the absolute path of a local model, or the unchanged name of a model on the hub.

    Raises:
        FileNotFoundError: The path is neither a folder with a config.json nor of the form org/name.
    """
    folder = project_path(Path(model_path).expanduser())
    if (folder / "config.json").is_file():
        return str(folder)
    is_local = folder.exists() or folder.parent.is_dir()  # data/tiny_bas is a mistyped path
    if is_local or model_path.count("/") != 1 or model_path[0] in "/.~":
        raise FileNotFoundError(
            f"model_path {model_path!r}: {folder} holds no config.json. Give the folder of a "
            "saved model, or a hub name such as Qwen/Qwen2.5-1.5B-Instruct"
        )
    return model_path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide banners, progress bars and warnings of the libraries; see also `hide_bars`.

    After an exception other than ValueError and FileNotFoundError, what was hidden is printed.
    Our own errors have these types and explain themselves.
    """
    text = io.StringIO()
    text.fileno = lambda: 1  # vLLM calls sys.stdout.fileno() while it loads
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    except (ValueError, FileNotFoundError):
        raise
    except Exception:
        print(text.getvalue(), file=sys.stderr)
        raise


def hide_bars() -> None:
    """Hide the bars of loading models, which a notebook shows even within `quiet`.

    Downloads keep their bars.
    """
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda _, args, kwargs: logging.EmptyTqdm(*args, **kwargs))


def has_vision(config: "PretrainedConfig") -> bool:
    """Return whether transformers loads a model of this config with a vision tower."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as TYPES,
    )

    return hasattr(config, "vision_config") and config.model_type in TYPES


def may_have_vision(model_path: str) -> bool:
    """Return whether a model's config.json has a part for images, without importing transformers.

    Args:
        model_path: A folder, or the name of a model on the hub.
    """
    from huggingface_hub import hf_hub_download

    file = Path(model_path) / "config.json"
    file = file if file.is_file() else Path(hf_hub_download(model_path, "config.json"))
    return "vision_config" in read_json(file)


def read_config(model_path: str) -> "PretrainedConfig":
    """Read the config.json of a folder, or of a model on the hub."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path)


def auto_class(config: "PretrainedConfig") -> Any:
    """Return the auto class of transformers that loads, or builds, a model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def image_tokens(config: "PretrainedConfig") -> list[int]:
    """Return the ids of the tokens that represent images; [] for a text-only model.

    If a completion contained such a token, there would be no image for it, and the next forward
    pass would fail.
    """
    if not has_vision(config):
        return []
    ids = {value for name, value in config.to_dict().items() if IMAGE_TOKEN.fullmatch(name)}
    return sorted(ids - {None})


def load_processor(path: str, tokenizer: "PreTrainedTokenizerBase") -> "ProcessorMixin | None":
    """Load a model's processor with this tokenizer in it; return None if the model has none.

    transformers' own loader also loads the part for videos, which needs torchvision. That part is
    left out here.
    """
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = read_config(path)
    if not has_vision(config) or not files_of(path, *FILES):
        return None
    kind = PROCESSOR_MAPPING[type(config)]
    parts = [part for part in kind.get_attributes() if part != "video_processor"]
    # Checkpoints store the class's name, so it is kept. SmolVLM's template reads these two values.
    no_videos = SimpleNamespace(num_frames=None, fps=None)
    changes = {"get_attributes": classmethod(lambda cls: parts), "video_processor": no_videos}
    images_only = type(kind.__name__, (kind,), changes)
    settings, _ = kind.get_processor_dict(path)
    settings.pop("video_processor", None)
    places = {"image_processor": AutoImageProcessor.from_pretrained(path), "tokenizer": tokenizer}
    arguments = [places.get(part) for part in kind.get_attributes()]
    return images_only.from_args_and_dict(arguments, settings)


def files_of(path: str, *names: str) -> list[Path]:
    """Return the local paths of the named files that exist in a model's folder or on the hub."""
    from transformers.utils import cached_file

    missing_is_fine = {"_raise_exceptions_for_missing_entries": False}
    files = [cached_file(path, name, **missing_is_fine) for name in names]
    return [Path(file) for file in files if file]


def load_tokenizer(
    model_path: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    adapter: Path | None = None,
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer that pads on the left.

    The tokenizer of a vision-language model has an attribute `processor`, the model's processor.

    Args:
        model_path: Folder or hub name.
        chat_template_kwargs: The setting `grpo.chat_template_kwargs`. Its values become defaults
            in the template itself, so that every program that renders with the template uses them,
            including a server of the merged model.
        adapter: Folder of an adapter. The chat template that a trainer saved in it replaces that of
            the base, because a notebook may have set its own template.

    Raises:
        ValueError: The tokenizer has no chat template, so prompts cannot be rendered.
    """
    skip_garbage_at_exit()  # a process that loads a tokenizer also loads torch
    with quiet():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(find_model(model_path), padding_side="left")
        processor = load_processor(find_model(model_path), tokenizer)
    if processor is not None:
        tokenizer.processor = processor
        tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    if template := adapter and _own_template(adapter):
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {model_path!r} has no chat template: take an instruct model, or "
            "save one with tokenizer.chat_template = … and tokenizer.save_pretrained(folder)"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template_kwargs:
        template = tokenizer.get_chat_template()
        tokenizer.chat_template = add_defaults(template, chat_template_kwargs)
    if processor is not None:
        processor.chat_template = tokenizer.chat_template
    return tokenizer


def _own_template(folder: Path) -> str:
    """Return the chat template that a folder holds; "" if it holds none."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(config).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else ""


def tokenizer_of(processing_class: Any) -> "PreTrainedTokenizerBase":
    """Return a tokenizer as it is, or a processor's tokenizer with the attribute `processor`."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is processing_class or hasattr(tokenizer, "processor"):
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    tokenizer.processor = processing_class
    template = getattr(processing_class, "chat_template", None)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path, base: str = "") -> None:
    """Save a tokenizer, and a processor's files, so that all programs read them as the base's own.

    The class that transformers 5 names is missing from version 4 and programs built on it, so an
    older name replaces it. transformers 5 also leaves out the list of added tokens and the
    SentencePiece model. Both are added here, because llama.cpp's converter reads the vocabulary of
    Gemma, and of the first Llama and Mistral models, from them.

    Args:
        tokenizer: The tokenizer.
        folder: Where it is written.
        base: Folder or hub name of the model that it belongs to, if there is one.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    added = tokenizer.added_tokens_decoder.items()
    config["added_tokens_decoder"] = {str(number): token.__getstate__() for number, token in added}
    write_json(path, config)
    if base:
        for file in files_of(find_model(base), "tokenizer.model", *FILES):
            shutil.copy(file, folder / file.name)
