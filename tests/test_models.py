import json
import shutil

import pytest

from grpo_nb import chat, models
from grpo_nb.config import ModelConfig
from grpo_nb.prompts import build_prompt
from grpo_nb.runs import project_path

TINY = "data/tiny_base"
PROMPTS = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9))]


@pytest.fixture(scope="module")
def base():
    return models.load_checkpoint(TINY, adapter=None, quantization="16bit")


@pytest.fixture(scope="module")
def tokenizer():
    return chat.load_tokenizer(TINY)


@pytest.mark.parametrize("path", ["nowhere", "/no/such/model", "../x/y", "data/arithmetic.jsonl"])
def test_a_model_path_that_does_not_exist_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"holds no config.json. Give the folder"):
        chat.find_model(path)


def test_a_hub_name_that_cannot_be_had_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"no local folder and could not be had"):
        chat.load_tokenizer("nobody/no-such-model")


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    shutil.copytree(project_path(TINY), tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        chat.load_tokenizer(str(tmp_path / "m"))


def test_vllm_where_it_cannot_be_is_refused():
    if models.cuda_available():
        pytest.skip("asks what happens on a machine without a GPU")
    with pytest.raises(RuntimeError, match="needs a CUDA GPU: set it to 'detect'"):
        models.use_vllm(ModelConfig(fast_inference="vllm"))
    assert models.use_vllm(ModelConfig()) is False


def test_the_prompt_ends_where_the_completion_begins(tokenizer):
    text = chat.render(tokenizer, PROMPTS[0])
    assert text.endswith("<|im_start|>assistant\n")
    tokenizer([text, "a"], padding=True)  # must not leave padding on
    assert chat.count_tokens(tokenizer, [*PROMPTS[:1], build_prompt("a")])[0] == len(
        tokenizer(text)["input_ids"]
    )
    assert chat.count_tokens(tokenizer, []) == []
    chat.check_generation_prompt(tokenizer, PROMPTS[0])
    shown = chat.show_tokens(tokenizer, PROMPTS[0])
    assert shown.startswith("⟦<|im_start|>⟧system|⏎\n|")
    assert shown.endswith("⟦<|im_start|>⟧assistant|⏎\n|")


def test_a_template_without_generation_prompt_is_refused(tmp_path):
    shutil.copytree(project_path(TINY), tmp_path / "m")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (tmp_path / "m/chat_template.jinja").write_text(template)
    tokenizer = chat.load_tokenizer(str(tmp_path / "m"))
    with pytest.raises(ValueError, match=r"ignores add_generation_prompt: .* 'What is 47"):
        chat.check_generation_prompt(tokenizer, [{"role": "user", "content": "What is 47?"}])


def test_generation_depends_on_the_seed_alone(base, tokenizer):
    import torch

    def sample(seed, batch_size=64):
        return models.generate(
            base,
            tokenizer,
            PROMPTS,
            max_completion_length=40,
            temperature=1.0,
            num_generations=4,
            seed=seed,
            batch_size=batch_size,
        )

    before = torch.random.get_rng_state()
    first = sample(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [len(group) for group in first] == [4, 4, 4]
    assert sample(seed=1) == first
    assert sample(seed=2) != first


def test_greedy_answers_do_not_depend_on_the_batch(base, tokenizer):
    def greedy(batch_size):
        return models.generate(
            base, tokenizer, PROMPTS, max_completion_length=40, batch_size=batch_size
        )

    assert greedy(1) == greedy(3)


def test_completions_are_cut_at_the_length(base, tokenizer):
    ((cut,),) = models.generate(base, tokenizer, PROMPTS[:1], max_completion_length=3)
    assert (cut.tokens, cut.truncated) == (3, True)
    assert len(tokenizer(cut.text)["input_ids"]) == 3
    ((whole,),) = models.generate(base, tokenizer, PROMPTS[:1], max_completion_length=60)
    assert not whole.truncated
    assert whole.tokens == len(tokenizer(whole.text)["input_ids"]) + 1  # the stop counts


def test_the_4bit_settings_are_those_unsloth_trains_with(demo_run):
    """The merge dequantises with ours, so they have to be the ones the adapter learnt on."""
    ours = models.quantization_config("4bit").to_dict()
    cell = json.loads((demo_run / "notebooks/03_train_grpo.ipynb").read_text())["cells"]
    assert any("parameters are trained" in str(c.get("outputs")) for c in cell)
    policy = models.load_policy(ModelConfig(), seed=0)
    theirs = policy.model.config.quantization_config.to_dict()
    for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"):
        assert ours[key] == theirs[key]
