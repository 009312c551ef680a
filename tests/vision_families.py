"""Random tiny models that read images, of current families, as transformers builds them.

folder = vision_families.build("qwen2_5_vl", parent)    # in a second; nothing is downloaded
rows = vision_families.rows(24)    # discs, one in each image, red or blue
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import families
import torch
from families import Outcome
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText

from grpo_nb import stages
from grpo_nb.data.rows import pack, write_rows
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import RunConfig

TEXT = families.COMMON | {"vocab_size": 320}
TOWER = {"hidden_size": 32, "intermediate_size": 64}
QWEN_TOWER = {**TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": families.HIDDEN}
SIGLIP = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
SIGLIP |= {"image_size": 56}
MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}


@contextmanager
def smolvlm_loads() -> Iterator[None]:
    """Stand in for two packages that SmolVLM's processor asks for, and of which it needs nothing.

    They are num2words, which writes the numbers of a video's frames, and torchvision: without it
    transformers hides the class that reads images by PIL.
    """
    from transformers.models import smolvlm
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kind = SmolVLMImageProcessorPil
    with (
        patch.object(processing_smolvlm, "num2words", str),
        patch.object(smolvlm, "SmolVLMImageProcessorPil", kind),
    ):
        yield


def chat_template(image: str, before: str, after: str, answer: str = "assistant") -> str:
    """A template that takes a turn's content as parts, as those of vision models do."""
    role = f"{{{{ '{answer}' if m['role'] == 'assistant' else m['role'] }}}}"
    return (
        f"{{% for m in messages %}}{before}{role}\n{{% for part in m['content'] %}}"
        f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        f"{{% endfor %}}{after}\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{answer}\n{{% endif %}}"
    )


class Family(NamedTuple):
    """A model type of transformers, its template, tokens, configuration and image processor."""

    model_type: str
    template: str
    tokens: tuple[str, ...]  # the first ends a turn
    ids: Mapping[str, str]  # settings of the config that name a token
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    processor: Mapping[str, Any]
    images: Mapping[str, Any]
    named: Mapping[str, str] = MappingProxyType({})  # tokens that the processor looks up
    more: Mapping[str, Any] = MappingProxyType({})  # settings of the config


PARTS = {f"{part}_token_id": f"<|{part}|>" for part in ("vision_start", "vision_end")}
PARTS |= {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video")}
QWEN = (
    chat_template("<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>", "<|im_end|>"),
    *(("<|im_end|>", "<|im_start|>", *PARTS.values()), PARTS),
)
QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2}
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GEMMA |= {"image_token": "<image_soft_token>"}
SQUARE, SMALL = {"height": 56, "width": 56}, {"longest_edge": 56}
UTTERANCE = "<end_of_utterance>"
FAMILIES = {
    "qwen2_5_vl": Family(
        *("qwen2_5_vl", *QWEN),
        text={"rope_parameters": MROPE},
        tower=QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
        processor={"processor_class": "Qwen2_5_VLProcessor"},
        images=QWEN_IMAGES | {"patch_size": 14, "min_pixels": 28**2, "max_pixels": 112**2},
    ),
    "qwen3_vl": Family(
        *("qwen3_vl", *QWEN),
        text={"head_dim": 32, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        tower=QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        processor={"processor_class": "Qwen3VLProcessor"},
        images=QWEN_IMAGES
        | {"patch_size": 16, "size": {"shortest_edge": 32**2, "longest_edge": 128**2}},
    ),
    "gemma3 with images": Family(
        "gemma3",
        families.BOS
        + chat_template("<start_of_image>", "<start_of_turn>", "<end_of_turn>", "model"),
        ("<end_of_turn>", "<start_of_turn>", *GEMMA.values()),
        ids={f"{name}_index": token for name, token in GEMMA.items()},
        text=families.SLIDING | families.HALVES,
        tower=SIGLIP,
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        images={"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE},
        named=GEMMA,
        more={"mm_tokens_per_image": 4},
    ),
    "smolvlm": Family(
        "smolvlm",
        chat_template("<image>", "<|im_start|>", UTTERANCE),
        (UTTERANCE, "<|im_start|>", "<image>", "<fake_token_around_image>", "<global-img>"),
        ids={"image_token_id": "<image>"},
        text={"model_type": "llama"},
        tower=SIGLIP,
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        images={"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False}
        | {"size": SMALL, "max_image_size": SMALL},
        more={"scale_factor": 2},
    ),
}


def build(name: str, parent: Path) -> Path:
    """Save a random model of the family, its tokenizer and its processor, into a new folder."""
    family = FAMILIES[name]
    tokenizer = families.tokenizer_for(family.template, *family.tokens)
    tokenizer._set_model_specific_special_tokens(dict(family.named))
    ends = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in families.ENDS}
    number = tokenizer.convert_tokens_to_ids
    config = AutoConfig.for_model(
        family.model_type,
        text_config=TEXT | family.text | ends,
        vision_config=family.tower,
        **{key: number(token) for key, token in family.ids.items()},
        **{**family.more, **ends},
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    if name == "gemma3 with images":  # zeros, as transformers makes it, would hide the images
        model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
    folder = parent / name.replace(" ", "_")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.images | family.processor))
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    return folder


def disc(color: str, side: int = 56) -> Image.Image:
    """Draw a disc of this color."""
    image = Image.new("RGB", (side, side), "white")
    ImageDraw.Draw(image).ellipse((8, 8, side - 8, side - 8), fill=color)
    return image


def chat(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    """Build a prompt with images in the form that the data room hands on."""
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": text}] if images else text
    return [{"role": "system", "content": "Say it."}, {"role": "user", "content": content}]


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows with an image each, of two sizes."""
    result = []
    for place in range(count):
        color = ("red", "blue")[place % 2]
        images = [disc(color, (56, 84)[place % 3 == 0])]
        question = f"Color {place}?"
        row = {"question": question, "prompt": chat(question, *images), "images": images}
        result.append(row | {"answer": color})
    return result


def settings_of(folder: Path | str, **more: Any) -> RunConfig:
    return families.settings_of(folder, "transformers", **more)


def spread(completions: list, images: list, **columns: Any) -> list[float]:
    """A reward that differs within a group, and that needs the images."""
    pairs = zip(completions, images, strict=True)
    return [
        (sum(map(ord, one[0]["content"])) + sum(some[0].getpixel((28, 28)) if some else ())) % 7 / 7
        for one, some in pairs
    ]


def stage_of(name: str, config: RunConfig) -> Stage:
    """Start stage 03 of a new run."""
    run = Run(name.replace(" ", "-"))
    run.write_config(config)
    return Stage(run, "03", config)


def trainer_of(folder: Path, name: str, mixed: bool = False, **more: Any) -> stages.RunTrainer:
    """Build the trainer of a run whose rows have images; `mixed`: every other row."""
    train_rows = rows(24)
    for row in train_rows[1::2] if mixed else ():
        row |= {"prompt": chat(row["question"]), "images": []}
    config = settings_of(folder, **more)
    return families.trainer_of(Run(name.replace(" ", "-")), config, train_rows, spread)


def learn(name: str, folder: Path, **more: Any) -> Outcome:
    """Preflight, two steps and the merge with its parity gate, as the notebooks do them."""
    trainer = trainer_of(folder, name, **more)
    run = trainer.stage.run
    (run / "data").mkdir()
    write_rows(run / "data/eval.parquet", [pack(row | {"prompt_tokens": 0}) for row in rows(8)])
    return families.outcome_of(trainer)
