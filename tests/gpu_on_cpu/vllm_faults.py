"""Faults in how vLLM samples for Unsloth's trainer: `undo = plant(trainer)`.

For vllm_scenarios.py, and for the figures of benchmarks/vllm_sampling.py.
"""

import sys

import torch


def leaves_the_adapter_out(trainer):
    """As in unslothai/unsloth, issue 8701."""
    trainer.vllm_generation._unsloth_load_lora = None
    return lambda: None


def keeps_an_earlier_adapter(trainer):
    request = trainer.policy.live_adapter()
    request.lora_tensors = {name: w.detach().clone() for name, w in request.lora_tensors.items()}
    trainer.vllm_generation._unsloth_load_lora = lambda *_, **__: request
    return lambda: None


def loses_weights(trainer):
    """As sleep mode did in huggingface/trl, issues 5312 and 5313: here the last norm's."""
    zoo = sys.modules["unsloth_zoo.vllm_utils"]
    runner = zoo._get_vllm_model_runner(trainer.policy.model)
    norm = zoo._get_vllm_lora_model(trainer.policy.model, runner).model.norm
    kept = norm.weight.data
    norm.weight.data = torch.ones_like(kept)

    def undo():
        norm.weight.data = kept

    return undo


def reads_another_template(_):
    """Without the generation prompt."""
    from trl.generation.vllm_generation import VLLMGeneration

    generate = VLLMGeneration.generate

    def other(self, prompts, *rest, **options):
        return generate(self, [ids[:-3] for ids in prompts], *rest, **options)

    other._unsloth_vllm_generation_lora_wrapped = True
    VLLMGeneration.generate = other

    def undo():
        VLLMGeneration.generate = generate

    return undo


def leaves_tokens_out(trainer):
    trainer.vllm_generation.top_p = 0.8
    return lambda: None


FAULTS = {
    "adapter left out": leaves_the_adapter_out,
    "stale adapter": keeps_an_earlier_adapter,
    "weights lost": loses_weights,
    "another template": reads_another_template,
    "top_p 0.8": leaves_tokens_out,
}
