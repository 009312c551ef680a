"""Completions from the dense copy: the policy's own distribution, by a decode loop of ours."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_resume import MATH, session  # noqa: F401 (a fixture)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, generation

from grpo_nb import models, training
from grpo_nb.models.chat import render
from grpo_nb.models.policy import LORA_TARGETS
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs.config import resolve
from grpo_nb.training import decode
from grpo_nb.training.probe import worst_step
from grpo_nb.training.rollouts import DenseCopy

PROMPTS = [build_prompt(f"What is {a} + {b}?") for a in (3, 27, 58, 99) for b in range(1, 97, 6)]
FAMILIES = [(Qwen2Config, Qwen2ForCausalLM), (LlamaConfig, LlamaForCausalLM)]
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
    policy = models.load_policy(resolve("tiny-cpu").model, seed=0)
    move(policy.model, 0.02)
    return policy


@pytest.fixture(scope="module")
def prompt_ids(policy):
    texts = [render(policy.tokenizer, prompt) for prompt in PROMPTS]
    return policy.tokenizer(texts, add_special_tokens=False)["input_ids"]


def greedy():
    return generation.LogitsProcessorList([generation.TopKLogitsWarper(1)])


@pytest.fixture(params=FAMILIES, ids=["qwen2", "llama"])
def dense(request):
    """An fp32 model of another family, with an adapter that does something."""
    torch.manual_seed(0)
    config, family = request.param
    model = get_peft_model(family(config(**SIZES)), LoraConfig(target_modules=list(LORA_TARGETS)))
    move(model, 0.3)
    return model.eval()


def test_the_copy_is_the_policy_before_and_after_an_update(dense):
    copy = DenseCopy(dense)
    ids = torch.randint(1, 61, (3, 12))
    for seed in (0, 1):
        move(dense, 0.3, seed)
        with torch.no_grad():
            ours, theirs = copy.renewed()(input_ids=ids).logits, dense(input_ids=ids).logits
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_building_the_copy_leaves_the_random_state(dense):
    before = torch.get_rng_state()
    DenseCopy(dense)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_tokens_are_those_of_generate(dense, penalty):
    """Unequal prompts, a group each, two stops: as transformers' own loop on the adapter."""
    prompts = [[5, 9, 3], [7, 1, 4, 4, 8, 30], [2]]
    stops = list(range(11, 30))
    processors = greedy()
    processors.insert(0, generation.RepetitionPenaltyLogitsProcessor(penalty))
    with torch.no_grad():
        ours, log_p = decode.sample(
            DenseCopy(dense).renewed(),
            [ids for ids in prompts for _ in range(4)],
            max_completion_length=24,
            stops=stops,
            pad=0,
            processors=processors,
        )
    padded = torch.tensor([[0] * (6 - len(ids)) + ids for ids in prompts])
    settings = generation.GenerationConfig(
        do_sample=False, repetition_penalty=penalty, max_new_tokens=24, eos_token_id=stops
    )
    mask = torch.tensor([[0] * (6 - len(ids)) + [1] * len(ids) for ids in prompts])
    theirs = dense.generate(input_ids=padded, attention_mask=mask, generation_config=settings)
    expected = []
    for row in theirs[:, 6:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        expected += [row[:end]] * 4
    assert ours == expected
    assert len({len(ids) for ids in ours}) > 1  # some ended early
    assert [len(values) for values in log_p] == [len(ids) for ids in ours]


def test_log_probabilities_are_those_of_a_plain_forward(dense):
    prompts = [[5, 9, 3], [7, 1, 4, 4, 8, 30]] * 2
    with torch.no_grad():
        ours, log_p = decode.sample(
            DenseCopy(dense).renewed(),
            prompts,
            max_completion_length=10,
            stops=[11],
            pad=0,
            temperature=0.7,
        )
        for prompt, ids, values in zip(prompts, ours, log_p, strict=True):
            logits = dense(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / 0.7).log_softmax(-1)[range(len(ids)), ids]
            torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def test_greedy_answers_equal_the_4bit_adapters(policy, prompt_ids):
    theirs = policy.generate(PROMPTS, max_completion_length=48)
    with torch.no_grad():
        copy = DenseCopy(policy.model).renewed()
        ours, _ = decode.sample(
            copy, prompt_ids, max_completion_length=48, stops=[2], pad=0, processors=greedy()
        )
    texts = policy.tokenizer.batch_decode(ours, skip_special_tokens=True)
    equal = sum(text == group[0].text for text, group in zip(texts, theirs, strict=True))
    assert equal >= 0.97 * len(PROMPTS)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_frequencies_are_the_probabilities_of_a_plain_forward(policy, prompt_ids, temperature):
    """Of each token after a fixed prompt and the commonest tokens before it, by chi-square."""
    torch.manual_seed(0)
    with torch.no_grad():
        copy = DenseCopy(policy.model).renewed()
        ours, _ = decode.sample(
            copy,
            [prompt_ids[0]] * 4000,
            max_completion_length=12,
            stops=[2],
            pad=0,
            temperature=temperature,
        )
        tokens = torch.tensor([ids + [0] * (12 - len(ids)) for ids in ours])
        tested = 0
        for place in range(12):
            common = tokens[:, :place].mode(dim=0).values
            after = tokens[(tokens[:, :place] == common).all(1), place]
            if len(after) < 500:
                break
            asked = torch.tensor([prompt_ids[0] + common.tolist()])
            p = (copy(input_ids=asked).logits[0, -1].float() / temperature).softmax(-1)
            counts, expected = torch.bincount(after, minlength=len(p)), p * len(after)
            often = expected > expected[expected >= 5].min()  # the rest of them are one bin
            seen = torch.cat([counts[often], counts[~often].sum()[None]])
            wanted = torch.cat([expected[often], expected[~often].sum()[None]])
            chi_square = ((seen - wanted) ** 2 / wanted).sum()
            freedom = torch.tensor(len(seen) - 1.0)
            tested += freedom
            assert not freedom or torch.special.gammaincc(freedom / 2, chi_square / 2) > 1e-3
    assert tested >= 3


def test_a_training_logs_how_far_the_copy_is_from_the_policy(session):  # noqa: F811
    lines = session(**{"train.max_steps": 4}).run()
    assert all(0 < line["sampling/logp_difference"] < 0.03 for line in lines)
    lines = session(**{"policy.rollouts": "model", "train.resume": "never"}).run()
    assert not any("sampling/logp_difference" in line for line in lines)


def test_a_copy_that_is_not_renewed_is_seen(session, monkeypatch):  # noqa: F811
    stale = session(**{"train.max_steps": 12})
    monkeypatch.setattr(DenseCopy, "renewed", lambda copy: copy.model)
    lines = stale.run()
    assert lines[-1]["sampling/logp_difference"] > 3 * lines[0]["sampling/logp_difference"]


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({"trl.generation_kwargs": {"typical_p": 0.9}}, "no trl.generation_kwargs"),
        ({"policy.finetuning": "full", "model.quantization": "16bit"}, "finetuning = 'lora'"),
        ({}, ""),
    ],
)
def test_where_it_is_not_possible_trl_generates(settings, lacking, tmp_path):
    def build(rollouts):
        config = resolve("tiny-cpu", settings | {"policy.rollouts": rollouts})
        policy = models.load_policy(config.model, 0, config.policy)
        row = {"prompt": PROMPTS[0], "answer": "4"}
        return training.build_trainer(policy, MATH, [row] * 8, config, tmp_path)

    assert build("auto").from_copy == (not lacking)
    assert build("model").from_copy is False
    if lacking:
        with pytest.raises(ValueError, match=f"policy.rollouts = 'copy' needs .*{lacking}"):
            build("copy")


BATCHING = {
    "policy.backend": "transformers",
    "trl.use_transformers_continuous_batching": True,
    # By default it takes half of the memory.
    "trl.transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 256},
    "train.per_device_train_batch_size": 8,
    "train.max_completion_length": 8,
    "train.temperature": 2.0,  # else the first tokens of all completions are the same
    "train.max_steps": 1,
    "train.warmup_steps": 0,
}


def ranked(completions, **columns):
    return [float(rank) for rank in range(len(completions))]


def test_continuous_batching_trains_a_4bit_policy_and_leaves_its_adapter_in_fp32(tmp_path):
    config = resolve("tiny-cpu", BATCHING)
    policy = models.load_policy(config.model, 0, config.policy)
    move(policy.model, 0.02)
    rows = [{"prompt": PROMPTS[0], "answer": "4"}]
    rewards = RewardSet([ranked], [1.0])
    trainer = training.build_trainer(policy, rewards, rows, config, tmp_path)
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in trained]
    probe = worst_step(trainer, policy, PROMPTS[0])
    assert (probe.failed, probe.generation > 0) == ("", True)
    assert all(map(torch.equal, trained, before))  # TRL alone rounds them to bf16
    trainer.train()
    line = next(line for line in trainer.state.log_history if "reward" in line)
    assert line["grad_norm"] > 0
    assert 0 < line["completions/mean_length"] <= 8
    assert {weight.dtype for weight in trained} == {torch.float32}
    assert not all(map(torch.equal, trained, before))


def test_continuous_batching_is_refused_for_unsloths_policy(tmp_path):
    config = resolve("tiny-cpu", BATCHING | {"policy.backend": "unsloth"})
    with pytest.raises(ValueError, match=r"needs policy\.backend = 'transformers'"):
        training.grpo_arguments(config, tmp_path, vllm=False)
