"""Faults in how a trainer samples: `fault(trainer, patch)`, by pytest's monkeypatch.

For tests/training/test_guard.py, and for the figures of benchmarks/guard.py.
"""

from trl.trainer import grpo_trainer

from grpo_nb.models import dense
from grpo_nb.stages.trainer import RunTrainer

RARER, LIKELIER = "rarer than the policy's own", "likelier than the policy's own"


def leaves_the_adapter_out(one, patch):
    renew = dense.DenseModel.renew
    patch.setattr(dense.DenseModel, "renew", lambda model: renew(model, adapter=False))


def keeps_the_weights_of_an_earlier_step(one, patch):
    earlier = dense.DenseModel(one.model).renew()
    patch.setattr(dense.DenseModel, "renew", lambda model: earlier)


def reads(change):
    """Prompts that are not the trainer's."""

    def fault(one, patch):
        sample = RunTrainer._generate_single_turn

        def other(self, prompts, *rest):
            return sample(self, [*map(change, prompts)], *rest)

        patch.setattr(RunTrainer, "_generate_single_turn", other)

    return fault


def is_at_another_temperature(factor):
    def fault(one, patch):
        sample = dense.sample

        def other(*args, temperature, **options):
            return sample(*args, temperature=factor * temperature, **options)

        patch.setattr(dense, "sample", other)

    return fault


def pads_on_the_right(one, patch):
    pad = grpo_trainer.pad

    def other(rows, padding_value, padding_side, **rest):
        return pad(rows, padding_value=padding_value, padding_side="right", **rest)

    one.samples_densely = False
    patch.setattr(grpo_trainer, "pad", other)


def leaves_tokens_out(**cut):
    """By transformers' own generate, whose settings say so and TRL's arguments do not."""

    def fault(one, patch):
        one.samples_densely = False
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
    "top_p": (leaves_tokens_out(top_p=0.8), LIKELIER),
    "top_k": (leaves_tokens_out(top_k=20), LIKELIER),
    "min_p": (leaves_tokens_out(min_p=0.1), LIKELIER),
}
