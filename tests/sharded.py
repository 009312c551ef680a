"""Two processes share the weights of a policy by FSDP2, as accelerate would do it on GPUs.

    python -m torch.distributed.run --nproc_per_node 2 tests/sharded.py FOLDER

accelerate shards on GPUs alone; torch does it over gloo. FOLDER/report.json gets the answers
before and after, and FOLDER/adapter the weights that were gathered.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_nb import models, ranks
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs.config import resolve
from grpo_nb.stages.trainer import unsharded_root

PROMPTS = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9))]


def main(folder):
    ranks.start(None)
    settings = {"model.load_in_4bit": False, "policy.backend": "transformers"}
    policy = models.load_policy(resolve("tiny-cpu", settings))
    for weights in policy.model.parameters():
        if weights.requires_grad:  # as the trainer has them: fp32 among bf16
            weights.data = weights.data.float()
    ask = lambda: [group[0].text for group in policy.generate(PROMPTS, max_completion_length=32)]  # noqa: E731
    report = {"whole": ask()}
    mesh = init_device_mesh("cpu", (2,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in policy.model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy.model, mesh=mesh, mp_policy=precision)
    for name in ("before the first step", "after it"):
        with unsharded_root(policy.model):
            report[name] = ask()
        ids = torch.arange(32).view(2, 16)
        policy.model(input_ids=ids).logits.float().square().mean().backward()
    gradients = [p.grad.full_tensor() for p in policy.model.parameters() if p.requires_grad]
    report["gradients"] = sum(bool(gradient.any()) for gradient in gradients)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(policy.model, options=whole)
    if ranks.is_main():
        policy.model.save_pretrained(folder / "adapter", state_dict=gathered)
        (folder / "report.json").write_text(json.dumps(report))
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
