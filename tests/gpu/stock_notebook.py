"""Trains as a person's own notebook does, with our lines beside the trainer of Unsloth or TRL.

`python stock_notebook.py LOADER FOLDER [MODEL]` writes FOLDER/report.json. LOADER is "unsloth",
"unsloth-vllm" or "trl". Importing unsloth patches TRL for good, so each has a process of its own.
"""

import json
import random
import re
import sys
import time
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

MODEL = sys.argv[3] if len(sys.argv) > 3 else "data/tiny_base"
SYSTEM = "Reason inside <reasoning></reasoning>, then give the result inside <answer></answer>."
STEPS, LENGTH = 40, 48
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
    system = {"role": "system", "content": SYSTEM}
    ask = "What is {} + {}?".format
    prompts = [[system, {"role": "user", "content": ask(a, b)}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in pairs]})


def load():
    if LOADER == "trl":
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(MODEL), LoraConfig(**LORA)
    fast = {"fast_inference": True, "gpu_memory_utilization": 0.2}
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=MODEL,
        max_seq_length=256,
        load_in_4bit=True,
        max_lora_rank=LORA["r"],
        **fast if LOADER == "unsloth-vllm" else {},
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
        max_completion_length=LENGTH,
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
    began = time.monotonic()
    checks = grpo_nb.preflight(trainer)
    report = {"preflight seconds": time.monotonic() - began}
    report["preflight"] = [(one.name, one.state, one.evidence) for one in checks]
    guard = grpo_nb.Guard(trainer, every=20)
    monitor = grpo_nb.Monitor(trainer)
    began = time.monotonic()
    trainer.train()
    report["training seconds"] = time.monotonic() - began
    lines = [line for line in trainer.state.log_history if "reward" in line]
    report["right"] = [line["rewards/correct/mean"] for line in lines]
    report["step seconds"] = [line.get("step_time") for line in lines]
    report["alerts"] = [str(alert) for alert in monitor.alerts]
    report["scores"] = [look.score for look in guard.looks]
    report["trainer"], report["vLLM"] = type(trainer).__name__, hasattr(model, "vllm_engine")
    report["autopsy"] = str(grpo_nb.autopsy(trainer))
    return report


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    report = train()
    (FOLDER / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report, indent=1))
