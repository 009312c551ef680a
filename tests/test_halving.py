"""Out of memory in training: the step is done in halves, and the gradient is the same."""

from typing import get_args

import pytest
import torch
from test_resume import MATH, session  # noqa: F401 (a fixture)

from grpo_nb import models, training
from grpo_nb.config import resolve
from grpo_nb.settings import LossType

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(scope="module")
def policy():
    return models.load_policy(resolve("tiny-cpu").model, seed=0)


def gradient(trainer, inputs, rows_at_once):
    """Of the LoRA weights, after what transformers' training_step does with the loss."""
    trainer.rows_at_once = rows_at_once
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=None)
    trainer.accelerator.backward(loss / trainer._divisor(None))
    weights = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]
    return loss.item(), torch.cat(weights)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_halves_give_the_loss_and_the_gradient_of_the_whole(policy, tmp_path, loss_type):
    settings = {
        "train.loss_type": loss_type,
        "train.per_device_train_batch_size": 8,
        "train.gradient_accumulation_steps": 2,
        "train.beta": 0.1,
    }
    if loss_type == "luspo":
        settings["trl.importance_sampling_level"] = "sequence"
    row = {"prompt": [{"role": "user", "content": "1 + 2"}], "answer": "3"}
    config = resolve("tiny-cpu", settings)
    trainer = training.build_trainer(policy, MATH, [row] * 8, config, tmp_path)
    trainer.current_gradient_accumulation_steps = 2
    generator = torch.Generator().manual_seed(0)
    completion_mask = torch.ones(8, 12, dtype=torch.long)
    completion_mask[3, 5:] = completion_mask[6, 1:] = 0  # completions of unlike lengths
    whole = {
        "prompt_ids": torch.randint(5, 250, (8, 20), generator=generator),
        "prompt_mask": torch.ones(8, 20, dtype=torch.long),
        "completion_ids": torch.randint(5, 250, (8, 12), generator=generator),
        "completion_mask": completion_mask,
        "advantages": torch.randn(8, generator=generator),
        "ref_per_token_logps": -torch.rand(8, 12, generator=generator),
        "num_items_in_batch": completion_mask.sum() * 2,
    }
    trainer.model.train()
    loss, expected = gradient(trainer, whole, 0)
    for rows_at_once in (4, 3, 1):
        parts_loss, parts = gradient(trainer, whole, rows_at_once)
        assert parts_loss == pytest.approx(loss, abs=1e-3, rel=1e-2)  # bf16 activations
        torch.testing.assert_close(parts, expected, atol=2e-2 * expected.abs().max(), rtol=0)


def test_a_training_goes_on_in_halves_and_generates_once(session, capsys):  # noqa: F811
    small = session(**{"train.max_steps": 3, "policy.share_prompts": False})
    trainer, model = small.trainer(), small.policy.model
    generated, generate = [], trainer._generate

    def counted(*args, **kwargs):
        generated.append(trainer.state.global_step)
        return generate(*args, **kwargs)

    def full(module, args, kwargs):
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    trainer._generate = counted
    hook = model.register_forward_pre_hook(full, with_kwargs=True)
    metrics = small.run()
    hook.remove()
    assert generated == [0, 1, 2]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert trainer.rows_at_once == 2
    said = capsys.readouterr().out
    assert "step 1: out of memory with 8 completions in a pass; it goes on with 4" in said
    assert "step 1: out of memory with 4 completions in a pass; it goes on with 2" in said
    assert "step 2" not in said
    assert metrics[0]["rows_at_once"] == 3  # the mean of 4 and 2


def test_where_one_row_does_not_fit_the_message_says_what_to_lower(session):  # noqa: F811
    lost = session(**{"train.max_steps": 3})
    trainer = lost.trainer()

    def full(module, args, kwargs):
        if torch.is_grad_enabled() and trainer.state.global_step == 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    hook = lost.policy.model.register_forward_pre_hook(full, with_kwargs=True)
    with pytest.raises(MemoryError, match=r"lower train\.max_completion_length") as caught:
        lost.run()
    hook.remove()
    assert "kept up to step 2" in caught.value.__notes__[0]


def test_an_out_of_memory_in_the_backward_leaves_no_half_gradient(session):  # noqa: F811
    """Three steps, the second of which fails once on its way back, equal three that do not."""
    plain = session(**{"train.max_steps": 2, "train.resume": "never"})
    plain.run()
    expected = [p.detach().clone() for p in plain.policy.model.parameters() if p.requires_grad]
    failing = session(**{"train.max_steps": 2, "train.resume": "never"})
    trainer, failed = failing.trainer(), []
    weights = [p for p in failing.policy.model.parameters() if p.requires_grad]

    def full(gradient):
        if trainer.state.global_step == 1 and trainer._step % 2 and not failed:
            failed.append(trainer._step)
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    weights[len(weights) // 2].register_hook(full)
    failing.run()
    assert failed == [3]
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=2e-4, rtol=0)
