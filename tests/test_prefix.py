"""A group's prompt is run once in the update: the same log-probabilities, loss and gradient."""

import pytest
import torch
from test_resume import MATH
from test_rollouts import FAMILIES, SIZES, move

from grpo_nb import models, training
from grpo_nb.models import Policy
from grpo_nb.models.lm_head import ChunkedLogProbs
from grpo_nb.models.policy import LORA_TARGETS
from grpo_nb.runs.config import resolve
from grpo_nb.training.prefix import can_share, pack

FP32 = {"trl.bf16": False}  # TRL's default is to compute in bf16
SETTINGS = {"train.per_device_train_batch_size": 16, "train.beta": 0.1}
PROMPTS = [[5, 9, 3, 44, 12], [7, 1, 4, 4, 8, 30, 51, 6, 9], [2]]
LENGTHS = [7, 1, 12, 3, 5, 12, 2, 9, 0, 4, 6, 11]  # a truncated completion may be masked out


@pytest.fixture(scope="module")
def batch():
    """Rows of three groups in any order, as TRL's shuffle leaves them, with both paddings."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), 12)
    prompt_ids, prompt_mask = torch.zeros(12, 9, dtype=torch.long), torch.zeros(12, 9)
    for row, group in enumerate([0, 1, 2, 0, 1, 1, 2, 0, 1, 0, 2, 0]):
        prompt_ids[row, 9 - len(PROMPTS[group]) :] = torch.tensor(PROMPTS[group])
        prompt_mask[row, 9 - len(PROMPTS[group]) :] = 1
    completion_mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": torch.randint(1, 61, shape, generator=generator) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(12, generator=generator),
        "ref_per_token_logps": -torch.rand(shape, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }


def make_trainer(policy, folder, settings=SETTINGS):
    row = {"prompt": [{"role": "user", "content": "1 + 2"}], "answer": "3"}
    trainer = training.build_trainer(policy, MATH, [row] * 8, resolve("tiny-cpu", settings), folder)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


@pytest.fixture(params=FAMILIES, ids=["qwen2", "llama"])
def dense(request, tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ChunkedLogProbs)
    torch.manual_seed(0)
    config, family = request.param
    model = get_peft_model(family(config(**SIZES)), LoraConfig(target_modules=list(LORA_TARGETS)))
    move(model, 0.3)
    tokenizer = models.load_tokenizer("data/tiny_base")
    return make_trainer(Policy(model, tokenizer, False, "transformers"), tmp_path, SETTINGS | FP32)


def update(trainer, batch, share):
    """Loss, gradient and how many tokens went through the model."""
    trainer.share_prompts = share
    trainer.model.zero_grad()
    tokens = []
    hook = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    loss = trainer.compute_loss(trainer.model, batch)
    trainer.accelerator.backward(loss)
    hook.remove()
    weights = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]
    return loss.item(), torch.cat(weights), sum(tokens)


def test_loss_and_gradient_are_the_same(dense, batch):
    loss, gradient, tokens = update(dense, batch, False)
    ours, shared, fewer = update(dense, batch, True)
    assert fewer < tokens
    assert ours == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(shared, gradient, atol=1e-5 * gradient.abs().max(), rtol=1e-5)


def test_log_probabilities_and_entropies_are_the_same(dense, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    results = []
    for dense.share_prompts in (False, True):
        for batch_size in (None, 5):
            with torch.no_grad():
                results.append(
                    dense._get_per_token_logps_and_entropies(
                        dense.model, ids, mask, 12, batch_size, compute_entropy=True
                    )
                )
    for log_p, entropies, _ in results[1:]:
        torch.testing.assert_close(log_p, results[0][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies, results[0][1], atol=1e-5, rtol=0)
    assert results[0][0].abs().sum() > 1


def test_of_the_4bit_policy_they_are_the_same_but_for_bf16(batch, tmp_path):
    policy = models.load_policy(resolve("tiny-cpu").model, seed=0)
    move(policy.model, 0.02)
    trainer = make_trainer(policy, tmp_path)
    trainer.beta = 0.0  # to the tiny base these tokens are e^-18: that KL would be all rounding
    assert trainer.share_prompts
    loss, gradient, tokens = update(trainer, batch, False)
    ours, shared, fewer = update(trainer, batch, True)
    assert fewer < tokens
    assert ours == pytest.approx(loss, rel=1e-2)
    again = update(trainer, {**batch, **_wider(batch)}, False)[1]
    rounding = (again - gradient).norm()
    assert rounding < 0.05 * gradient.norm()
    assert 0 < (shared - gradient).norm() < 3 * rounding


def _wider(batch):
    """One more column of padding: another order of summation, the same gradient but for it."""
    pad = torch.nn.functional.pad
    return {name: pad(batch[name], (1, 0)) for name in ("prompt_ids", "prompt_mask")}


def test_what_would_not_save_work_is_computed_plainly(dense, batch):
    """Where a prompt is short, what a token of a long row attends to costs more than it saves."""
    full = batch | {
        "prompt_ids": torch.full((12, 2), 3),
        "prompt_mask": torch.ones(12, 2, dtype=torch.long),
        "completion_mask": torch.ones(12, 12, dtype=torch.long),
    }
    assert update(dense, full, True)[2] == 12 * 14


def test_a_row_of_each_prompt():
    """Prompt 1 2 3 with completions 7 8 and 9; prompt 4 with 5 6."""
    ids = torch.tensor([[1, 2, 3, 7, 8], [0, 0, 4, 5, 6], [1, 2, 3, 9, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    packed = pack(ids, mask, 2)
    assert packed.tokens.tolist() == [[1, 2, 3, 7, 8, 3, 9], [4, 5, 6, 0, 0, 0, 0]]
    assert packed.positions.tolist()[0] == [0, 1, 2, 3, 4, 2, 3]
    assert packed.labels.tolist()[0] == [-100, -100, -100, 7, 8, -100, 9]
    assert packed.seen[0, 0, 6].int().tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert packed.seen[0, 0, 4].int().tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert packed.place.tolist() == [[2, 3], [6, 7], [5, 12]]


def test_models_with_windows_or_states_are_left_alone():
    from transformers import JambaConfig, JambaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = SIZES | {"num_hidden_layers": 2, "max_window_layers": 1}
    for family, config in (
        (Qwen2ForCausalLM, Qwen2Config(**sizes, use_sliding_window=True, sliding_window=8)),
        (JambaForCausalLM, JambaConfig(**sizes, num_experts=2, use_mamba_kernels=False)),
    ):
        assert not can_share(Policy(family(config), None, False, "transformers"))
    plain = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    assert can_share(Policy(plain, None, False, "transformers"))
    plain.set_attn_implementation("eager")
    assert not can_share(Policy(plain, None, False, "transformers"))
