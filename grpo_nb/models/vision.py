"""Recognize vision-language models, and load the processor that prepares their images."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_nb.files import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

# The files of a processor. A merged model gets them from its base.
FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# Names of settings for tokens that open or close an image, or represent a part of it.
IMAGE_TOKEN = re.compile(r"(image|video|audio|vision|bo[ia]|eo[ia])(_\w+)?_token_(id|index)")


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
    """Return those of these files that a model has, in its folder or on the hub."""
    from transformers.utils import cached_file

    missing_is_fine = {"_raise_exceptions_for_missing_entries": False}
    files = [cached_file(path, name, **missing_is_fine) for name in names]
    return [Path(file) for file in files if file]
