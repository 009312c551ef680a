"""Write data/vision_base/: a 1.2 M-parameter Qwen3-VL that half reads bar charts.

    python data/make_vision_base.py            # about 6 minutes on one core

It first learns to read charts from right completions, then from a mixture in which most have a
fault made on purpose, so that it can read a chart and mostly answers wrongly. GRPO removes the
faults.
A sample of the mixture, for bars of heights 3, 5, 2, 4, 1 and a line between 2 and 3:

    user       (image) Which bar is the highest, from the left?
    assistant  <reasoning>3 5 2 4 1, line 2</reasoning><answer>2</answer>      right
    assistant  <reasoning>3 5 2 4 1, line 2</reasoning><answer>4</answer>      wrong
    assistant  <reasoning>3 5 2 4 1, line 2</reasoning><answer>2               broken

No chart of data/tasks/charts/ is among its training data.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from make_charts import (
    BARS,
    CELL,
    HERE,
    QUESTIONS,
    SIDE,
    TOP,
    Chart,
    Problem,
    draw_chart,
    read_charts,
    sample_problem,
)
from PIL import Image
from tiny_model import CONTEXT_TOKENS, END, OPTIONS, START, fit
from transformers import (
    BatchFeature,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from grpo_nb.rewards.prompts import build_prompt

SEED = 2
BATCH = 32
LEARNING_RATE = 1e-3
LESSONS = [(False, 900), (True, 250)]  # are there faults, steps
VOCAB = 384
HIDDEN, VISION_HIDDEN = 128, 64  # multiples of 64: bitsandbytes reads others wrongly on a CPU
POSITION_STD = 0.3  # positions are not lost beside the patches, as with the usual 0.02
WRONG = 0.6  # share of completions with a wrong answer, in the mixture
BROKEN = 0.3  # share of completions in a broken format, in the mixture
LONGEST_EDGE = 512  # of a square image; it has 256 tokens, half of the context
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ImageTextProcessor(Qwen3VLProcessor):
    """Reads text and images as Qwen3-VL's does, but no videos: that part wants torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def load_processor(folder: Path) -> ImageTextProcessor:
    """Read the files that `main` writes."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return ImageTextProcessor(image_processor, tokenizer, tokenizer.chat_template)


def sample_training_problem(held_out: set[Chart], rng: random.Random) -> Problem:
    """Return a problem on a chart that is not held out."""
    while True:
        problem = sample_problem(rng.choice(list(QUESTIONS)), rng.randint(1, TOP), rng)
        if problem.chart not in held_out:
            return problem


def wrong_answer(problem: Problem) -> int:
    """Return the answer of a reader who counts the lower bars, or counts from the right."""
    return BARS - problem.answer if problem.kind == "count" else BARS + 1 - problem.answer


def write_completion(problem: Problem, faulty: bool, rng: random.Random) -> str:
    wrong = faulty and rng.random() < WRONG
    number = wrong_answer(problem) if wrong else problem.answer
    heights, line = problem.chart
    steps = f"{' '.join(map(str, heights))}, line {line}"
    if faulty and rng.random() < BROKEN:
        broken = f"<reasoning>{steps}</reasoning><answer>{number}"
        return rng.choice([broken, f"{steps}, so the answer is {number}."])
    return f"<reasoning>{steps}</reasoning><answer>{number}</answer>"


def sample_chat(
    held_out: set[Chart], faulty: bool, rng: random.Random
) -> tuple[str, str, Image.Image]:
    """Return (prompt, completion) as text with one token for the image, and the image."""
    problem = sample_training_problem(held_out, rng)
    *system, user = build_prompt(QUESTIONS[problem.kind])
    user["content"] = f"{VISION_START}{IMAGE}{VISION_END}{user['content']}"
    turns = [f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in [*system, user]]
    completion = write_completion(problem, faulty, rng) + END
    return "".join(turns) + f"{START}assistant\n", completion, draw_chart(problem.chart, rng)


def build_processor(texts: list[str]) -> ImageTextProcessor:
    tokenizer = Qwen2Tokenizer(**OPTIONS | {"chat_template": CHAT_TEMPLATE})
    special_tokens = [START, END, VISION_START, VISION_END, IMAGE, VIDEO]
    tokenizer = tokenizer.train_new_from_iterator(
        texts, VOCAB, new_special_tokens=special_tokens, show_progress=False
    )
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=CELL,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": SIDE**2, "longest_edge": LONGEST_EDGE**2},  # in pixels of area
    )
    return ImageTextProcessor(image_processor, tokenizer, CHAT_TEMPLATE)


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],  # of the 16 pairs of a head: time, height, width
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": (SIDE // CELL) ** 2,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(VISION_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(VISION_END),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3VLForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=POSITION_STD)
    return model


def collate(
    processor: ImageTextProcessor, chats: list[tuple[str, str, Image.Image]]
) -> tuple[BatchFeature, torch.Tensor]:
    """Return the model's inputs, padded on the left, and labels [batch, tokens] of completions."""
    prompts, completions, images = zip(*chats, strict=True)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    inputs = processor(
        text=texts, images=[[image] for image in images], padding=True, return_tensors="pt"
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, ids in enumerate(processor.tokenizer(list(completions))["input_ids"]):
        labels[row, -len(ids) :] = torch.tensor(ids)
    return inputs, labels


def train(
    model: Qwen3VLForConditionalGeneration,
    processor: ImageTextProcessor,
    held_out: set[Chart],
    faulty: bool,
    steps: int,
    rng: random.Random,
) -> None:
    """Train on fresh charts, as `tiny_model.fit` does."""

    def draw() -> tuple[Any, torch.Tensor]:
        return collate(processor, [sample_chat(held_out, faulty, rng) for _ in range(BATCH)])

    fit(model, draw, steps, LEARNING_RATE, bfloat16=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "vision_base")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    held_out = read_charts()
    chats = [sample_chat(held_out, True, rng) for _ in range(5000)]
    processor = build_processor([prompt + completion for prompt, completion, _ in chats])
    model = build_model(processor.tokenizer)
    for faulty, steps in LESSONS:
        train(model, processor, held_out, faulty, steps, rng)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    processor.tokenizer.save_pretrained(arguments.out)
    processor.image_processor.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
