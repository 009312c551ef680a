"""Does plain TRL raise data/vision_base on data/tasks/charts?

    python benchmarks/charts_trl.py                    # about two minutes a seed on one core
    python benchmarks/charts_trl.py --seeds 3 --steps 40 --learning-rate 5e-4

Of grpo_nb only the rewards (preset `math`), the prompt and, on a CPU, the LM head in place of TRL's
Triton kernel are used. A line says what share of held-out charts is answered rightly, and how many
completions are well-formed, before and after: greedy, sampled, and sampled with another chart in
place of the right one, which shows what guessing earns. Seconds are the training's processor time.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import prepare_multimodal_messages

from grpo_nb.files import project_path
from grpo_nb.models import cuda_available, use_torch_head
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt

sys.path.append(str(project_path("data")))
from make_vision_base import IMAGE, VIDEO, VISION_END, VISION_START, load_processor

HELD_OUT = 150
GENERATIONS = 8
MAX_COMPLETION_LENGTH = 32
LANGUAGE_PART = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
BASE = project_path("data/vision_base")


def read_rows(seed: int) -> list[dict[str, Any]]:
    """Return the rows of the task in an order that depends on the seed, with their images."""
    file = project_path("data/tasks/charts.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(rows)
    return [
        {
            "prompt": build_prompt(row["question"]),
            "images": [Image.open(file.parent / row["image"]).convert("RGB")],
            "answer": row["answer"],
        }
        for row in rows
    ]


def load_base() -> tuple[Any, PreTrainedModel]:
    """Return the base's processor and the base, which never samples a token of an image."""
    processor = load_processor(BASE)
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    tokens = [IMAGE, VIDEO, VISION_START, VISION_END]
    model.generation_config.suppress_tokens = processor.tokenizer.convert_tokens_to_ids(tokens)
    return processor, model


def complete(
    model: PreTrainedModel, processor: Any, rows: list[dict[str, Any]], **sampling: Any
) -> list[str]:
    """Return one completion a row."""
    chats = [prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
    inputs = processor(
        text=processor.apply_chat_template(chats, add_generation_prompt=True),
        images=[row["images"] for row in rows],
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=MAX_COMPLETION_LENGTH, **sampling)
    new_ids = ids[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(new_ids, skip_special_tokens=True)


def measure(model: PreTrainedModel, processor: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of right answers, and of well-formed ones."""
    model.eval()
    swapped = [
        row | {"images": other["images"]}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    correct, soft_format = load_preset("math").reward_funcs[:2]
    ways = {
        "greedy": (rows, {"do_sample": False}),
        "sampled": (rows * 4, {"do_sample": True, "top_k": 0}),
        "swapped": (swapped * 4, {"do_sample": True, "top_k": 0}),
    }
    shares = {}
    for way, (asked_rows, sampling) in ways.items():
        texts = complete(model, processor, asked_rows, **sampling)
        answers = [row["answer"] for row in asked_rows]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        prompts = [row["prompt"] for row in asked_rows]
        for name, reward in (("", correct), (" format", soft_format)):
            scores = reward(completions=completions, answer=answers, prompts=prompts)
            shares[way + name] = sum(score == reward.range[1] for score in scores) / len(scores)
    return shares


def train(seed: int, options: argparse.Namespace) -> None:
    processor, model = load_base()
    rows = read_rows(seed)
    held_out, train_rows = rows[:HELD_OUT], rows[HELD_OUT:]
    set_seed(seed)
    before = measure(model, processor, held_out)
    preset = load_preset("math")
    trainer = GRPOTrainer(
        model,
        reward_funcs=preset.reward_funcs,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            seed=seed,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            max_steps=options.steps,
            per_device_train_batch_size=64,
            num_generations=GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            reward_weights=preset.reward_weights,
            generation_kwargs={"suppress_tokens": model.generation_config.suppress_tokens},
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not cuda_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=10,
        ),
        train_dataset=Dataset.from_list(train_rows),
        processing_class=processor,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LANGUAGE_PART),
    )
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    after = measure(trainer.model, processor, held_out)
    changes = [f"{key} {before[key]:.3f} -> {after[key]:.3f}" for key in before]
    print(f"seed {seed}", *changes, f"{seconds:.0f} s", sep="  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    use_torch_head()
    for seed in range(options.seeds):
        train(seed, options)


if __name__ == "__main__":
    main()
