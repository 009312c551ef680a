"""Current families, as random tiny models: loading, templates, adapters, two steps, the merge."""

import shutil

import families
import pytest
import torch
from families import FAMILIES
from peft.tuners.lora import LoraLayer

from grpo_nb import models
from grpo_nb.models import hub, template

ASKED = [{"role": "system", "content": "Say it."}, {"role": "user", "content": "2 + 2?"}]
BACKENDS = pytest.mark.parametrize("backend", ["transformers", "unsloth"])
# Linear layers that no adapter is put on.
LEFT = {"granite4": {"mamba.out_proj"}, "falcon_h1": {"mamba.out_proj"}}
LEFT["gemma3 vision"] = {f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")}
LEFT["gemma3 vision"] |= {"mlp.fc1", "mlp.fc2", "attention.out_proj"}  # of what reads images
NO_SYSTEM = {"mistral", "mistral window", "gemma2"}
THINKING = {"qwen3 thinking", "qwen3_5", "deepseek distill"}
# The architecture of another, with its own template; tiny_base, which most tests train, is a qwen2.
TWINS = {"qwen3 thinking", "deepseek distill", "qwen2"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("families")
    return {name: families.build(name, parent) for name in FAMILIES}


def policy_of(folder, backend, **settings):
    return models.load_policy(families.settings_of(folder, backend, **settings))


def assert_all_is_adapted(name, model):
    """Every linear layer of the decoder, and the experts."""
    base = model.get_base_model()
    adapted = {n for n, module in base.named_modules() if isinstance(module, LoraLayer)}
    linear = {n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
    linear = {n.removesuffix(".base_layer") for n in linear if ".lora_" not in n} - {"lm_head"}
    left = {".".join(n.split(".")[-2:]) for n in linear - adapted}
    assert left == LEFT.get(name, set()), name
    stacked = [n for n, weight in base.named_parameters() if weight.ndim == 3]
    experts = [n for n in stacked if n.endswith(("gate_up_proj", "down_proj"))]
    assert sum(hasattr(m, "parameter_name") for m in base.modules()) == len(experts), name


def test_an_adapter_of_transformers_reaches_every_linear_layer_and_the_experts(folders):
    for name, folder in folders.items():
        policy = policy_of(folder, "transformers", **{"model.load_in_4bit": False})
        assert_all_is_adapted(name, policy.model)


@BACKENDS
def test_which_layers_have_an_adapter_may_be_said(folders, backend):
    named = {"lora.target_modules": "q_proj, down_proj"}
    model = policy_of(folders["qwen3_moe"], backend, **named).model
    names = {name for name, _ in model.named_parameters() if "lora_B" in name}
    assert {name.split(".")[-4] for name in names} == {"q_proj", "experts"}
    assert len(names) == 4, "two layers' queries, and their experts' second weights"
    with pytest.raises(ValueError, match="target_modules 'q_projj': did you mean 'q_proj'"):
        policy_of(folders["qwen3_moe"], backend, **{"lora.target_modules": "q_projj"})


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "unsloth") for name in FAMILIES if name not in TWINS), ("qwen3_moe", "transformers")],
)
def test_a_family_learns_and_merges_as_it_was_trained(folders, name, backend, runs_dir):
    trainer = families.start(name, folders[name], backend)
    assert_all_is_adapted(name, trainer.policy.model)
    moved, how, checks, parity = families.outcome_of(trainer)
    assert moved[0] == moved[1] > 0
    assert {check.state for check in checks.values()} == {"ok"}, checks
    assert parity["kl"] < 1e-4
    paths = {
        "qwen3": "completions by the dense engine; the update runs a prompt once for its group",
        "qwen3_moe": "by the policy itself (the dense engine needs an adapter on linear layers",
        "lfm2": "a prompt for each completion (sharing needs full attention in every layer)",
        "gpt_oss": "a prompt for each completion (sharing needs attention by sdpa)",
    }
    assert paths.get(name, "") in how


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_does_is_known(folders, name):
    """It says what the system prompt says, and may open a block of thought."""
    tokenizer = hub.load_tokenizer(str(folders[name]))
    text, check = template.render(tokenizer, ASKED), template.check_template(tokenizer, ASKED)
    assert text.count("Say it.") == 1
    assert text.index("Say it.") < text.index("2 + 2?")
    assert check.state == "ok"
    assert ("has no system role" in check.evidence) == (name in NO_SYSTEM)
    folded = template.fold_system(tokenizer, ASKED)
    assert (len(folded) == 1) == (name in NO_SYSTEM)
    assert template.fold_system(tokenizer, folded) == folded
    opened = template.opens_thinking(tokenizer)
    assert opened == ("<think>\n" if name in THINKING else "")
    assert text.endswith(opened) and ("inside the block" in check.evidence) == bool(opened)


def test_settings_of_the_template_reach_whoever_renders(folders, tmp_path):
    """TRL and vLLM, too, and who is given the merged model."""
    folder, no_thoughts = folders["qwen3"], '{"enable_thinking": false}'
    config = families.settings_of(folder, "unsloth", **{"grpo.chat_template_kwargs": no_thoughts})
    assert config.grpo.chat_template_kwargs == {"enable_thinking": False}
    plain = hub.load_tokenizer(str(folder))
    quick = hub.load_tokenizer(str(folder), config.grpo.chat_template_kwargs)
    empty = "<think>\n\n</think>\n\n"
    assert template.render(quick, ASKED) == template.render(plain, ASKED) + empty
    how = {"tokenize": False, "add_generation_prompt": True}
    asked_for = quick.apply_chat_template(ASKED, enable_thinking=True, **how)
    assert asked_for == template.render(plain, ASKED)
    shutil.copy(folder / "config.json", tmp_path)
    quick.save_pretrained(tmp_path)
    saved = hub.load_tokenizer(str(tmp_path), config.grpo.chat_template_kwargs)
    assert saved.chat_template == quick.chat_template
    assert hub.load_tokenizer(str(tmp_path)).apply_chat_template(ASKED, **how).endswith(empty)
