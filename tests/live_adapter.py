"""Three training steps, each followed by answers by vLLM: `python live_adapter.py FOLDER`.

The policy is Unsloth's, and its vLLM is the build for CPUs, laid beside it by hand; what the
adapter passes through from there is what it passes through on a GPU. Writes FOLDER/report.json.
"""

import json
import sys
from functools import partial
from pathlib import Path

import short_trainings
import torch
from transformers import TrainerCallback

from grpo_nb.models.chat import find_model
from grpo_nb.rewards.prompts import build_prompt

PROMPTS = [build_prompt(f"What is {a} + {a + 7}?") for a in range(16)]


class AnswerEachStep(TrainerCallback):
    """What the policy answers by vLLM and by transformers, at the start and after each step."""

    def __init__(self, *policies):
        self.policies, self.seen = policies, []

    def on_train_begin(self, args, state, control, **kwargs):
        groups = [one.generate(PROMPTS, max_completion_length=32) for one in self.policies]
        self.seen.append([[group[0].text for group in of_policy] for of_policy in groups])

    on_step_end = on_train_begin


def main(folder):
    plain = short_trainings.policy("unsloth", "16bit")
    from unsloth_zoo import vllm_utils

    # What `load_vllm` and `FastLanguageModel` do on a GPU (unsloth/models/llama.py 2026.10.9).
    vllm_utils.patch_vllm(debug=False)
    from vllm import LLM

    sizes = {"gpu_memory_utilization": 0.1, "max_model_len": 512}
    plain.model.vllm_engine = LLM(
        find_model("data/tiny_base"),
        **{"dtype": torch.bfloat16, "enforce_eager": True, "enable_lora": True, **sizes},
    )
    plain.model.load_lora = partial(vllm_utils.load_lora, plain.model)
    live = plain._replace(vllm=True)
    answers = AnswerEachStep(live, plain)
    moved = short_trainings.train(plain, folder, callbacks=[answers])["moved"]
    # Closed, it holds nothing, though the engine itself is held here, as Unsloth holds it.
    engine = plain.model.vllm_engine
    live.close()
    left = [hasattr(engine, "llm_engine"), sum(p.nbytes for p in plain.model.parameters())]
    report = {"seen": answers.seen, "moved": moved, "left": left}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
