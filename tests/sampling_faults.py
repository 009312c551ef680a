"""Faults in how a trainer samples: `fault(trainer, patch)`, by pytest's monkeypatch.

For tests/test_guard.py, and for the figures of benchmarks/guard.py.
"""

from trl.trainer import grpo_trainer

from grpo_nb.training import fast_cpu
from grpo_nb.training.trainer import Trainer

RARER, LIKELIER = "rarer than the policy's own", "likelier than the policy's own"


def leaves_the_adapter_out(one, patch):
    patch.setattr(fast_cpu.DenseCopy, "renewed", lambda dense: dense.model)


def keeps_the_weights_of_an_earlier_step(one, patch):
    earlier = fast_cpu.DenseCopy(one.model).renewed()
    patch.setattr(fast_cpu.DenseCopy, "renewed", lambda dense: earlier)


def reads(change):
    """Prompts that are not the trainer's."""

    def fault(one, patch):
        sample = Trainer._generate_single_turn

        def other(self, prompts, *rest):
            return sample(self, [*map(change, prompts)], *rest)

        patch.setattr(Trainer, "_generate_single_turn", other)

    return fault


def is_at_another_temperature(factor):
    def fault(one, patch):
        sample = fast_cpu.sample

        def other(*args, temperature, **options):
            return sample(*args, temperature=factor * temperature, **options)

        patch.setattr(fast_cpu, "sample", other)

    return fault


def pads_on_the_right(one, patch):
    pad = grpo_trainer.pad

    def other(rows, padding_value, padding_side, **rest):
        return pad(rows, padding_value=padding_value, padding_side="right", **rest)

    one.samples_from_copy = False
    patch.setattr(grpo_trainer, "pad", other)


def leaves_tokens_out(**cut):
    """By transformers' own generate; TRL's arguments say so, or the engine's settings alone."""

    def fault(one, patch):
        one.samples_from_copy = False
        for name, value in cut.items():
            patch.setattr(one.generation_config, name, value)

    return fault


FAULTS = {
    "adapter": (leaves_the_adapter_out, RARER),
    "stale weights": (keeps_the_weights_of_an_earlier_step, RARER),
    "template": (reads(lambda ids: ids[:-3]), RARER),  # no generation prompt
    "tokenizer": (reads(lambda ids: [id_ % 250 + 3 for id_ in ids]), RARER),
    "colder": (is_at_another_temperature(0.7), LIKELIER),
    "hotter": (is_at_another_temperature(1.4), RARER),
    "padding": (pads_on_the_right, RARER),
    "top_p": (leaves_tokens_out(top_p=0.9), LIKELIER),
    "top_k": (leaves_tokens_out(top_k=20), LIKELIER),
    "min_p": (leaves_tokens_out(min_p=0.1), LIKELIER),
}
