"""What does a merge cost, what is it made of, and what does the gate see?

    python benchmarks/merging.py                        # data/task_base; 1 minute on 2 cores
    python benchmarks/merging.py .venv/smollm2          # 15 minutes

Adapters of SFT warm-ups on the JSON task, small and large. First table: the KL per token between
the policy in fp32 (4-bit base, adapter, nothing rounded) and the same with one thing changed, on
greedy completions of held-out prompts. Second: each fault's figures, for the least and the most
conspicuous of the weights that the adapter changes.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from grpo_nb import data, models, rewards
from grpo_nb.export import gate, merging
from grpo_nb.models import TransformersEngine, hub, template
from grpo_nb.models import weights as dtypes
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.stages.warm_start import warm_up

CASES = ((16, 2e-5, 12), (16, 3e-4, 12), (8, 3e-4, 40), (16, 2e-3, 40))  # rank, rate, steps
PROMPTS = 8
SETTINGS = {
    **{"task": "json_extraction", "data.max_rows": 200, "data.eval_rows": 48, "data.sft_rows": 64},
    **{"data.max_prompt_tokens": 400, "grpo.per_device_train_batch_size": 16},
}


def train(base: str, rank: int, rate: float, steps: int) -> Run:
    """Prepare a run and save the adapter of its warm-up."""
    own = {"model.model_name": base, "lora.r": rank, "lora.lora_alpha": rank}
    own |= {"model.max_seq_length": 512, "grpo.max_completion_length": 64}
    config = resolve(
        "tiny-cpu", SETTINGS | own | {"train.sft_steps": steps, "train.sft_learning_rate": rate}
    )
    run, tokenizer = Run(f"{Path(base).name}-{rank}-{rate:g}-{steps}"), hub.load_tokenizer(base)
    chosen = rewards.load_rewards(config.rewards)
    data.prepare_run(
        run, config.data, 0, lambda chats: template.count_tokens(tokenizer, chats), chosen
    )
    policy = models.load_policy(config)
    warm_up(policy, Stage(run, "03", config))
    policy.close()
    return run


def changed(base: str, adapter: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Give (name, weight of the dequantised base, the adapter's change), both in fp32."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    tuned = PeftModel.from_pretrained(models.load_dequantized(base, "4bit"), adapter)
    for name, layer in tuned.named_modules():
        if isinstance(layer, LoraLayer):
            with torch.no_grad():
                weight, change = layer.get_base_layer().weight, layer.get_delta_weight("default")
                yield f"{gate.plain_name(name)}.weight", weight.detach().float(), change.detach()


def nearest(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).float()


def costs(base: str, run: Run, adapter: Path) -> dict[str, float]:
    """Return the KL of each change to the policy in fp32."""
    tokenizer = models.load_tokenizer(base)
    tuned = models.load_checkpoint(base, adapter=adapter, quantization="4bit")
    prompts = [row["prompt"] for row in data.load(run, "eval")[:PROMPTS]]
    answers = TransformersEngine(tuned, tokenizer).generate(prompts, max_completion_length=64)
    texts = [template.render(tokenizer, prompt) for prompt in prompts]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    pairs = [(before, list(one.ids)) for before, [one] in zip(ids, answers, strict=True)]

    def logs(model: torch.nn.Module) -> Tensor:
        each = [({"input_ids": torch.tensor([a + b])}, len(b)) for a, b in pairs]
        return torch.cat([gate.log_probs(model, *inputs) for inputs in each])

    outputs = {"forward in bf16": logs(tuned)}
    with tuned.disable_adapter():
        outputs["without the adapter, bf16"] = logs(tuned)
    for name, weight in tuned.named_parameters():
        weight.data = weight.data.bfloat16() if ".lora_" in name else weight.data
    outputs["forward and LoRA in bf16"] = logs(tuned)
    merged = merging._merged(base, adapter, "4bit").eval()
    outputs["merged, forward in bf16"] = logs(merged)
    outputs["merged: rounded by chance"] = logs(merged.float())
    parts = list(changed(base, adapter))
    with torch.no_grad():
        for name, weight, change in parts:
            merged.get_parameter(name).copy_(nearest(weight + change))
        outputs["rounded to nearest (peft)"] = logs(merged)
        for name, weight, change in parts:
            merged.get_parameter(name).copy_(weight + change)
        exact = logs(merged)
        dense = dtypes.load_base(base, "4bit", dtype=torch.float32).dequantize()
        for name, _, change in parts:
            merged.get_parameter(name).copy_(dense.get_parameter(name) + change)
        outputs["base dequantised to fp32"] = logs(merged)
    return {
        name: (exact.exp() * (exact - other)).sum(-1).mean().item()
        for name, other in outputs.items()
    }


def figures(weight: Tensor, change: Tensor, held: Tensor) -> list[float]:
    """Return what is kept of the change, its standard errors from 1, far share, distance."""
    error = held - weight - change
    allowed = gate.RELATIVE * (weight + change).abs().maximum(weight.abs()) + gate.ABSOLUTE
    products = (error * change).double()
    kept = 1 + float(products.sum() / change.double().square().sum())
    sure = abs(float(products.sum() / products.norm()))
    far = float((error.abs() > allowed).float().mean())
    return [kept, sure, far, float(error.norm() / weight.norm())]


def faults(base: str, adapter: Path) -> Iterator[str]:
    """Print for each fault the range of the figures over the weights."""
    whole = {n: w.float() for n, w in models.load_dequantized(base, "16bit").named_parameters()}
    merged = dict(merging._merged(base, adapter, "4bit").named_parameters())
    plants: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
        "none": lambda name, weight, change: merged[name].detach().float(),
        "rounded to nearest": lambda name, weight, change: nearest(weight + change),
        "16-bit base": lambda name, weight, change: nearest(whole[name] + change),
        "layer left out": lambda name, weight, change: weight,
        "half the scale": lambda name, weight, change: nearest(weight + change / 2),
    }
    parts = list(changed(base, adapter))
    for plant, held in plants.items():
        rows = torch.tensor([figures(w, d, held(n, w, d)) for n, w, d in parts])
        low, high = rows.amin(0).tolist(), rows.amax(0).tolist()
        yield f"{plant} | " + " | ".join(
            f"{a:.4g} … {b:.4g}" for a, b in zip(low, high, strict=True)
        )


def main(base: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.environ["GRPO_NB_RUNS"] = parent
        for case in CASES:
            run = train(base, *case)
            rank, rate, steps = case
            print(f"\nrank {rank}, {steps} steps at {rate:g}", flush=True)
            for name, kl in costs(base, run, run / "warm_up").items():
                print(f"| {name} | {kl:.1e} |", flush=True)
            for line in faults(base, run / "warm_up"):
                print(f"| {line} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data/task_base")
