"""Trains as a person's own notebook does, with our lines beside the trainer of Unsloth or TRL.

`python stock_notebook.py LOADER FOLDER` writes FOLDER/report.json. LOADER is "unsloth",
"unsloth-vllm" or "trl". Importing unsloth patches TRL for good, so each has a process of its own.
"""

import json
import random
import re
import sys
from pathlib import Path

LOADER, FOLDER = sys.argv[1], Path(sys.argv[2])
if LOADER != "trl":
    from unsloth import FastLanguageModel  # before trl, as its notebooks say

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

import grpo_nb  # noqa: E402
from grpo_nb.rewards.prompts import build_prompt  # noqa: E402

MODEL, STEPS = "data/tiny_base", 40
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 16, "lora_alpha": 32, "target_modules": MODULES}


def correct(completions, answer, **kwargs):
    found = [re.search(r"<answer>\s*(\d+)\s*</answer>", one[0]["content"]) for one in completions]
    pairs = zip(found, answer, strict=True)
    return [float(bool(one) and one.group(1) == target) for one, target in pairs]


def form(completions, **kwargs):
    texts = [one[0]["content"] for one in completions]
    pattern = r"<reasoning>.+?</reasoning>\s*<answer>.+?</answer>\s*$"
    return [0.2 * bool(re.match(pattern, text, re.DOTALL)) for text in texts]


def rows():
    draw = random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(512)]
    prompts = [build_prompt(f"What is {a} + {b}?") for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in pairs]})


def load():
    if LOADER == "trl":
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(MODEL), LoraConfig(**LORA)
    sizes = {"max_seq_length": 256, "load_in_4bit": True, "max_lora_rank": LORA["r"]}
    fast = {"fast_inference": True, "gpu_memory_utilization": 0.2}
    model, tokenizer = FastLanguageModel.from_pretrained(
        MODEL, **sizes, **fast if LOADER == "unsloth-vllm" else {}
    )
    model = FastLanguageModel.get_peft_model(model, **LORA, random_state=1)
    return model, tokenizer, None


def train():
    dataset, rewards = rows(), [correct, form]
    model, tokenizer, peft_config = load()
    args = GRPOConfig(
        output_dir=str(FOLDER / "outputs"),
        learning_rate=5e-4,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=48,
        max_steps=STEPS,
        save_steps=20,
        logging_steps=1,
        bf16=torch.cuda.is_bf16_supported(),
        gradient_checkpointing=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=args,
        train_dataset=dataset,
        **{"peft_config": peft_config} if peft_config else {},
    )
    checks = grpo_nb.preflight(trainer)
    guard, monitor = grpo_nb.Guard(trainer, every=20), grpo_nb.Monitor(trainer)
    trainer.train()
    print(checks, grpo_nb.autopsy(trainer))
    lines = [line for line in trainer.state.log_history if "reward" in line]
    return {
        "preflight": [check.state for check in checks],
        "right": [line["rewards/correct/mean"] for line in lines],
        "alerts": list(map(str, monitor.alerts)),
        "scores": [look.score for look in guard.looks],
        "vLLM": hasattr(model, "vllm_engine"),
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "report.json").write_text(json.dumps(train()), encoding="utf-8")
