"""Faults in how vLLM samples for Unsloth's trainer: `plant(trainer, patch)`.

The patch is pytest's MonkeyPatch. For vllm_scenarios.py, and for the figures of
benchmarks/vllm_sampling.py.
"""

import sys

import torch


def leaves_the_adapter_out(trainer, _):
    """As in unslothai/unsloth, issue 8701."""
    trainer.vllm_generation._unsloth_load_lora = None


def keeps_an_earlier_adapter(trainer, _):
    request = trainer.policy.live_adapter()
    request.lora_tensors = {name: w.detach().clone() for name, w in request.lora_tensors.items()}
    trainer.vllm_generation._unsloth_load_lora = lambda *_, **__: request


def loses_weights(trainer, patch):
    """As sleep mode did in huggingface/trl, issues 5312 and 5313: here the last norm's."""
    zoo = sys.modules["unsloth_zoo.vllm_utils"]
    runner = zoo._get_vllm_model_runner(trainer.policy.model)
    norm = zoo._get_vllm_lora_model(trainer.policy.model, runner).model.norm
    patch.setattr(norm.weight, "data", torch.ones_like(norm.weight))


def reads_another_template(_, patch):
    """Without the generation prompt."""
    from trl.generation.vllm_generation import VLLMGeneration

    generate = VLLMGeneration.generate

    def other(self, prompts, *rest, **options):
        return generate(self, [ids[:-3] for ids in prompts], *rest, **options)

    other._unsloth_vllm_generation_lora_wrapped = True
    patch.setattr(VLLMGeneration, "generate", other)


def leaves_tokens_out(trainer, _):
    trainer.vllm_generation.top_p = 0.8


FAULTS = {
    "adapter left out": leaves_the_adapter_out,
    "stale adapter": keeps_an_earlier_adapter,
    "weights lost": loses_weights,
    "another template": reads_another_template,
    "top_p 0.8": leaves_tokens_out,
}
