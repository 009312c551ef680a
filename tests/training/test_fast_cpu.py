"""The fast paths of a CPU give what the slow ones give: samples, loss and gradient.

Completions come from a dense copy of the policy by a decode loop of ours; in the update a group's
prompt is run once.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_bnb_weight
from trainings import trainer_of
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config

from grpo_nb import models
from grpo_nb.models import Policy
from grpo_nb.models.dense import DenseEngine, DenseModel, draw, sample
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve
from grpo_nb.training import fast_cpu
from grpo_nb.training.fast_cpu import sharing_lacks

PROMPTS = [build_prompt(f"What is {a} + {b}?") for a in (3, 27, 58, 99) for b in range(1, 97, 6)]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 61}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def move(model, size, seed=0):
    """Give the adapter an effect; a fresh one has none."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * size


@pytest.fixture(scope="module")
def policy():
    policy = models.load_policy(resolve("tiny-cpu"))
    move(policy.model, 0.02)
    return policy


GREEDY = 1e-6  # a temperature at which only the likeliest token has a chance


new_model = AutoModelForCausalLM.from_config


@pytest.fixture(params=[Qwen2Config, LlamaConfig])
def dense(request):
    """An fp32 model of another family, with an adapter that does something."""
    torch.manual_seed(0)
    adapter = LoraConfig(target_modules="all-linear")
    model = get_peft_model(new_model(request.param(**SIZES)), adapter)
    move(model, 0.3)
    return model.eval()


def test_the_copy_is_the_policy_before_and_after_an_update(dense):
    before = torch.get_rng_state()
    copy = DenseModel(dense)
    assert torch.equal(torch.get_rng_state(), before)
    ids = torch.randint(1, 61, (3, 12))
    for seed in (0, 1):
        move(dense, 0.3, seed)
        with torch.no_grad():
            ours, theirs = copy.renew()(input_ids=ids).logits, dense(input_ids=ids).logits
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "prompts",
    [[[5, 9, 3], [7, 1, 4, 4, 8, 30], [2]], [[2, 2], [2, 2, 9], [2, 2, 4, 8, 30]]],
    ids=["apart", "begun alike"],
)
def test_greedy_tokens_are_those_of_generate(dense, prompts):
    """Unequal prompts, a group each, two stops: as transformers' own loop on the adapter."""
    stops = list(range(11, 30))
    with torch.no_grad():
        rows = [ids for ids in prompts for _ in range(4)]
        options = {"max_completion_length": 24, "stops": stops, "pad": 0, "temperature": GREEDY}
        ours = sample(DenseModel(dense).renew(), rows, **options)
    padded = torch.tensor([[0] * (6 - len(ids)) + ids for ids in prompts])
    settings = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=stops)
    mask = torch.tensor([[0] * (6 - len(ids)) + [1] * len(ids) for ids in prompts])
    theirs = dense.generate(input_ids=padded, attention_mask=mask, generation_config=settings)
    expected = []
    for row in theirs[:, 6:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        expected += [row[:end]] * 4
    assert ours == expected
    assert len({len(ids) for ids in ours}) > 1  # some ended early


def test_a_policys_engine_answers_as_transformers_does(policy):
    """With and without the adapter; in bf16 a near tie may fall otherwise."""
    engines = policy.engine, models.TransformersEngine(policy.model.eval(), policy.tokenizer)
    assert isinstance(engines[0], DenseEngine)
    for adapter in (True, False):
        options = {"max_completion_length": 48, "adapter": adapter}
        ours, theirs = (each.generate(PROMPTS, **options) for each in engines)
        same = [a.text == b.text for [a], [b] in zip(ours, theirs, strict=True)]
        assert sum(same) >= 0.95 * len(PROMPTS)


def test_a_4_bit_base_computes_the_same_once_it_is_dequantised():
    """bitsandbytes packs the weights anew for a processor with bf16, in the first forward pass."""
    packed = models.weights.load_base("data/tiny_base", "4bit")
    parameters = {n: p for n, p in packed.named_parameters() if hasattr(p, "quant_state")}
    values = {name: dequantize_bnb_weight(each).clone() for name, each in parameters.items()}
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        before = packed(input_ids=ids).logits
        plain = models.weights.unpacked(packed)
        after = plain(input_ids=ids).logits
    assert values
    for name, value in values.items():
        error = (plain.get_parameter(name) - value).abs().max()
        assert error <= value.abs().max() / 128, name
    assert (before - after).abs().mean() < 0.01 * before.abs().mean()
    assert not hasattr(plain.config, "quantization_config")


def test_a_token_is_drawn_as_often_as_it_is_likely():
    """By chi-square; that the likeliest one is a plain forward's is shown above."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(40)
    tokens = draw(logits.expand(20_000, -1))
    counts, expected = torch.bincount(tokens, minlength=40), logits.softmax(-1) * len(tokens)
    often = expected >= 5
    chi_square = ((counts - expected) ** 2 / expected)[often].sum()
    freedom = often.sum() - 1
    assert torch.special.gammaincc(freedom / 2, chi_square / 2) > 1e-3


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({"grpo.generation_kwargs": {"typical_p": 0.9}}, "temperature as the only setting"),
        ({"grpo.top_k": 20}, "temperature as the only setting"),
        ({"model.full_finetuning": True, "model.load_in_4bit": False}, "full_finetuning = False"),
        ({"policy.rollouts": "model"}, "policy.rollouts = 'auto'"),
        ({}, ""),
    ],
)
def test_where_it_is_not_possible_trl_generates(settings, lacking, policy, runs_dir):
    rows = [{"prompt": PROMPTS[0], "answer": "4"}] * 8
    policy = None if "model.full_finetuning" in settings else policy
    trainer = trainer_of(Run("a"), policy, rows=rows, **settings)
    assert lacking in fast_cpu.sampling_lacks(trainer)
    assert trainer.samples_densely == (not lacking)


FP32 = {"grpo.bf16": False}  # TRL's default is to compute in bf16
SETTINGS = {"grpo.per_device_train_batch_size": 16, "grpo.beta": 0.1}
GROUPS = [[5, 9, 3, 44, 12], [7, 1, 4, 4, 8, 30, 51, 6, 9], [2]]
LENGTHS = [7, 1, 12, 3, 5, 12, 2, 9, 0, 4, 6, 11]  # a truncated completion may be masked out


@pytest.fixture(scope="module")
def batch():
    """Rows of three groups in any order, as TRL's shuffle leaves them, with both paddings."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), 12)
    prompt_ids, prompt_mask = torch.zeros(12, 9, dtype=torch.long), torch.zeros(12, 9)
    for row, group in enumerate([0, 1, 2, 0, 1, 1, 2, 0, 1, 0, 2, 0]):
        prompt_ids[row, 9 - len(GROUPS[group]) :] = torch.tensor(GROUPS[group])
        prompt_mask[row, 9 - len(GROUPS[group]) :] = 1
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


def make_trainer(policy, settings=SETTINGS):
    row = {"prompt": [{"role": "user", "content": "1 + 2"}], "answer": "3"}
    trainer = trainer_of(Run("a"), policy, rows=[row] * 8, **settings)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


@pytest.fixture
def updated(dense, runs_dir):
    models.use_torch_head()
    tokenizer = models.load_tokenizer("data/tiny_base")
    return make_trainer(Policy(dense, tokenizer, False, "transformers"), SETTINGS | FP32)


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


def test_loss_and_gradient_are_the_same(updated, batch):
    loss, gradient, tokens = update(updated, batch, False)
    ours, shared, fewer = update(updated, batch, True)
    assert fewer < tokens
    assert ours == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(shared, gradient, atol=1e-5 * gradient.abs().max(), rtol=1e-5)


def test_log_probabilities_and_entropies_are_the_same(updated, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    results = []
    for updated.share_prompts, batch_size in ((False, None), (True, None), (True, 5)):
        given = (updated.model, ids, mask, 12, batch_size)
        with torch.no_grad():
            found = updated._get_per_token_logps_and_entropies(*given, compute_entropy=True)
        results.append(found[:2])
    for found in results[1:]:
        for ours, theirs in zip(found, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert results[0][0].abs().sum() > 1


def test_of_the_4bit_policy_they_are_the_same_but_for_bf16(batch, policy, runs_dir):
    trainer = make_trainer(policy)
    trainer.beta = 0.0  # to the tiny base these tokens are e^-18: that KL would be all rounding
    assert trainer.share_prompts
    loss, gradient, tokens = update(trainer, batch, False)
    ours, shared, fewer = update(trainer, batch, True)
    assert fewer < tokens
    assert ours == pytest.approx(loss, rel=1e-2)
    assert 0 < (shared - gradient).norm() < 0.1 * gradient.norm()


def test_a_prompt_of_two_tokens_is_shared_too(updated, batch):
    """What a token attends to does not grow with its group."""
    full = batch | {
        "prompt_ids": torch.full((12, 2), 3),
        "prompt_mask": torch.ones(12, 2, dtype=torch.long),
        "completion_mask": torch.ones(12, 12, dtype=torch.long),
    }
    assert update(updated, full, True)[2] == 1 + 12 * 13
    assert update(updated, full, True)[0] == pytest.approx(update(updated, full, False)[0])


def test_gradients_do_not_depend_on_how_threads_take_turns():
    """Else a training that was cut off would not go on bit for bit."""
    prompt, group, width = [5] * 64, 8, 40
    ids = torch.tensor([prompt + [7] * width] * group)
    inputs, _ = fast_cpu.pack(ids, torch.ones_like(ids), width)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, inputs["input_ids"].shape[1], 128)
    vectors = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    gradients, threads = [], torch.get_num_threads()
    torch.set_num_threads(2)
    for _ in range(20):
        mixed, _ = fast_cpu.attend(torch.nn.Module(), *vectors, inputs["attention_mask"])
        gradients.append(torch.autograd.grad(mixed.pow(2).sum(), vectors))
    torch.set_num_threads(threads)
    for gradient in gradients:
        assert all(map(torch.equal, gradient, gradients[0]))


def test_models_with_windows_or_states_are_left_alone():
    from transformers import JambaConfig

    def lacks(model):
        return sharing_lacks(Policy(model, None, False, "transformers"))

    sizes = SIZES | {"num_hidden_layers": 2, "max_window_layers": 1}
    windows = Qwen2Config(**sizes, use_sliding_window=True, sliding_window=8)
    states = JambaConfig(**sizes, num_experts=2, use_mamba_kernels=False)
    for config in (windows, states):
        assert lacks(new_model(config)) == "full attention in every layer"
    plain = new_model(Qwen2Config(**SIZES))
    assert lacks(plain) == ""
    plain.set_attn_implementation("eager")
    assert lacks(plain) == "attention by sdpa"
