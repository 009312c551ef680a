"""Models that read images, as random tiny ones: processor, engine, template, what stays text."""

import pytest
import torch
import vision_families
from vision_families import FAMILIES, chat, disc

from grpo_nb import models
from grpo_nb.models import hub, template

RED, BLUE = disc("red"), disc("blue")
TWO_SIZES = [chat("Which color?", RED), chat("And this?", disc("blue", 84))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("vision")
    with vision_families.smolvlm_loads():
        yield {name: vision_families.build(name, parent) for name in FAMILIES}


@pytest.fixture
def qwen(folders):
    return folders["qwen2_5_vl"]


@pytest.fixture(scope="module")
def engines(folders):
    how = {"adapter": None, "quantization": "16bit"}
    return {name: models.open_engine(str(folder), **how) for name, folder in folders.items()}


def test_the_processor_has_the_tokenizer_and_no_part_for_videos(qwen):
    """A model of text has no processor."""
    tokenizer = hub.load_tokenizer(str(qwen), {"greeting": "hi"})
    processor = tokenizer.processor
    assert processor.tokenizer is tokenizer
    assert "video_processor" not in processor.to_dict()
    assert "greeting" in processor.chat_template == tokenizer.chat_template
    tokenizer = hub.load_tokenizer("data/tiny_base")
    assert not hasattr(tokenizer, "processor")
    with pytest.raises(ValueError, match=r"carry images, which .*tiny_base' does not read"):
        template.count_tokens(tokenizer, [chat("Which color?", RED)])


def test_tokens_of_images_are_counted(qwen):
    """An image of 56 x 56 pixels is 4 tokens of 28 x 28, and one of 84 x 84 is 9."""
    tokenizer = hub.load_tokenizer(str(qwen))
    plain = [chat("Which color?"), chat("And this?")]
    before = template.count_tokens(tokenizer, plain)
    after = template.count_tokens(tokenizer, TWO_SIZES)
    marks = 2  # <|vision_start|> and <|vision_end|>
    assert [a - b - marks for a, b in zip(after, before, strict=True)] == [4, 9]
    assert template.count_tokens(tokenizer, [*plain, *TWO_SIZES]) == before + after


@pytest.mark.parametrize("name", FAMILIES)
def test_a_question_cannot_forge_an_image(folders, name):
    tokenizer = hub.load_tokenizer(str(folders[name]))
    for token in hub.image_tokens(hub.read_config(str(folders[name]))):
        text = tokenizer.decode([token])
        for forged in (chat(f"{text} What?", RED), chat(f"{text} What?")):
            with pytest.raises(ValueError, match="content of a turn holds"):
                template.render(tokenizer, forged)


def test_a_template_without_a_system_role_gets_the_system_prompt_before_the_image(qwen):
    tokenizer = hub.load_tokenizer(str(qwen))
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    text = template.render(tokenizer, chat("Which color?", RED))
    assert text.index("Say it.") < text.index("<|image_pad|>") < text.index("Which color?")
    evidence = template.check_template(tokenizer, chat("Which color?", RED)).evidence
    assert "no system role" in evidence


@pytest.mark.parametrize("name", FAMILIES)
def test_completions_depend_on_the_image_and_not_on_the_batch(engines, name):
    engine = engines[name]
    alone = [engine.generate([one], max_completion_length=8)[0][0] for one in TWO_SIZES]
    pair = [group[0] for group in engine.generate(TWO_SIZES, max_completion_length=8)]
    inputs = [
        template.with_completion(engine.tokenizer, chat("Which color?", image), pair[0].ids)
        for image in (RED, BLUE)
    ]
    with torch.no_grad():
        logits = [engine.model(**each).logits[0, -1] for each in inputs]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    same = [a.ids[:2] == b.ids[:2] for a, b in zip(alone, pair, strict=True)]
    assert all(same), "bf16 rounds the rest in another way"


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_with_and_without_images_share_a_batch(engines, name):
    mixed = [chat("Which color?"), chat("Which?", RED, BLUE), chat("Which color?", RED)]
    how = {"max_completion_length": 4, "temperature": 1, "num_generations": 3}
    groups = engines[name].generate(mixed, **how)
    assert [len(group) for group in groups] == [3, 3, 3]
    assert all(sample.tokens for group in groups for sample in group)


def test_a_token_of_an_image_is_never_sampled(qwen):
    engine = models.open_engine(str(qwen), adapter=None, quantization="16bit")
    tokens = hub.image_tokens(engine.model.config)
    head = engine.model.lm_head.weight
    with torch.no_grad():
        head[tokens] = 50 * head[tokens]  # without it they would be nearly all that is sampled
    sampling = {"temperature": 1.0, "num_generations": 16, "max_completion_length": 16}
    [group] = engine.generate([chat("Which color?", RED)], **sampling)
    assert not {token for sample in group for token in sample.ids} & set(tokens)
    engine.model.generation_config.suppress_tokens = None
    with pytest.raises((ValueError, IndexError)):
        [group] = engine.generate([chat("Which color?", RED)], **sampling)
        if {token for sample in group for token in sample.ids} & set(tokens):
            raise ValueError


@pytest.mark.parametrize("tower", [False, True])
def test_an_adapter_is_on_the_language_part_or_also_on_the_tower(qwen, tower):
    from peft.tuners.lora import LoraLayer

    settings = {"policy.backend": "transformers", "lora.finetune_vision_layers": tower}
    base = models.load_policy(vision_families.settings_of(qwen, **settings)).model.get_base_model()
    adapted = [name for name, m in base.named_modules() if isinstance(m, LoraLayer)]
    assert any("language_model" in name for name in adapted)
    assert any("visual" in name for name in adapted) == tower


def test_an_impossible_tower_is_refused():
    config = vision_families.settings_of("data/tiny_base", **{"lora.finetune_vision_layers": True})
    with pytest.raises(ValueError, match="has no part that reads images"):
        models.load_policy(config)
    driven = {"model.fast_inference": "vllm", "policy.backend": "unsloth"}
    with pytest.raises(ValueError, match="and LoRA on the layers for text"):
        vision_families.settings_of(
            "data/tiny_base", **driven, **{"lora.finetune_vision_layers": True}
        )


def test_unsloth_without_a_gpu_names_the_other_backend(qwen):
    config = vision_families.settings_of(qwen, **{"policy.backend": "unsloth"})
    with pytest.raises(ValueError, match=r"on a GPU only: set policy.backend = 'transformers'"):
        models.load_policy(config)
