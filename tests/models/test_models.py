import json
import os
import shutil
import subprocess
import sys
import weakref
from contextlib import nullcontext

import forked
import pytest
import short_trainings
import torch
from safetensors.torch import load_file, save_file

from grpo_nb import models
from grpo_nb.files import project_path
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import hub, template, weights
from grpo_nb.models import policy as policy_module
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs.config import resolve

TINY = "data/tiny_base"
PROMPTS = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9))]


@pytest.fixture(scope="module")
def engine():
    base = models.load_checkpoint(TINY, adapter=None, quantization="16bit")
    return models.TransformersEngine(base, hub.load_tokenizer(TINY))


@pytest.mark.parametrize("path", ["nowhere", "/no/such/model", "../x/y", "data/arithmetic.jsonl"])
def test_a_model_path_that_does_not_exist_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"holds no config.json. Give the folder"):
        hub.find_model(path)


def test_a_template_that_opens_no_answer_is_refused_and_so_is_none(tmp_path):
    folder = shutil.copytree(project_path(TINY), tmp_path / "m")
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)
    tokenizer = hub.load_tokenizer(str(folder))
    with pytest.raises(ValueError, match=r"ignores add_generation_prompt: .* 'user: What is"):
        template.check_template(tokenizer, [{"role": "user", "content": "What is 47?"}])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        hub.load_tokenizer(str(folder))


BOTH, VLLM, PLAIN = ("vllm", "vllm_bnb_plugin"), ("vllm",), {"policy.backend": "transformers"}
FULL = {"model.full_finetuning": True, "model.load_in_4bit": False}


def packages(monkeypatch, *names, gpu=True):
    monkeypatch.setattr("grpo_nb.models.engine.cuda_available", lambda: gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in names else None)


@pytest.mark.parametrize(
    ("asked", "present", "gpu", "expected"),
    [
        (("detect", "4bit"), BOTH, True, True),
        (("detect", "4bit"), BOTH, False, False),
        (("detect", "16bit"), VLLM, True, True),
        (("vllm", "4bit"), BOTH, False, "needs a CUDA GPU; otherwise set model.fast_inference"),
        (("vllm", "4bit"), VLLM, True, r"the package vllm-bnb-plugin \(pip inst"),
    ],
)
def test_vllm_is_used_or_refused_by_name(asked, present, gpu, expected, monkeypatch):
    packages(monkeypatch, *present, gpu=gpu)
    is_refused = isinstance(expected, str)
    with pytest.raises(RuntimeError, match=expected) if is_refused else nullcontext():
        assert models.use_vllm(*asked) is expected


def test_vllm_is_for_unsloth_with_lora_and_warns_of_a_missing_plugin(monkeypatch):
    packages(monkeypatch, *BOTH)
    vision = {"lora.finetune_vision_layers": True}
    wanted = [policy_module.wants_vllm(resolve("tiny-cpu", s)) for s in ({}, PLAIN, FULL, vision)]
    assert wanted == [True, False, False, False]
    packages(monkeypatch, *VLLM)
    with pytest.warns(UserWarning, match="transformers generates, since vLLM needs the package"):
        assert models.use_vllm("detect", "4bit") is False


def test_the_prompt_ends_where_the_completion_begins(engine):
    tokenizer = engine.tokenizer
    text = template.render(tokenizer, PROMPTS[0])
    assert text.endswith("<|im_start|>assistant\n")
    tokenizer([text, "a"], padding=True)  # must not leave padding on
    ids = tokenizer(text)["input_ids"]
    assert template.count_tokens(tokenizer, [PROMPTS[0], build_prompt("a")])[0] == len(ids)
    assert template.count_tokens(tokenizer, []) == []
    check = template.check_template(tokenizer, PROMPTS[0])
    assert check.state == "ok" and check.evidence.endswith(r"<|im_start|>assistant\n'")
    shown = template.show_tokens(tokenizer, PROMPTS[0])
    assert shown.startswith("⟦<|im_start|>⟧system|⏎\n|")
    assert shown.endswith("⟦<|im_start|>⟧assistant|⏎\n|")


def test_samples_depend_on_the_seed_alone_and_a_batch_counts_them(engine, monkeypatch):
    """A batch bounds the memory, also within the samples of one prompt."""
    sizes, generate = [], engine.model.generate

    def watched(**inputs):
        sizes.append(len(inputs["input_ids"]))
        return generate(**inputs)

    def sample(seed):
        how = {"temperature": 1.0, "num_generations": 3, "batch_size": 2, "seed": seed}
        return engine.generate(PROMPTS, max_completion_length=12, **how)

    monkeypatch.setattr(engine.model, "generate", watched)
    before = torch.random.get_rng_state()
    first = sample(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (sizes, [len(group) for group in first]) == ([2, 2, 2, 2, 1], [3, 3, 3])
    assert sample(seed=1) == first != sample(seed=2)


def test_greedy_answers_depend_neither_on_the_batch_nor_on_the_padding_side(engine, monkeypatch):
    """Unsloth's trainer pads on the right, where generation would give garbage."""
    uneven = [*PROMPTS, build_prompt("What is 1 + 2? " + "Think of it. " * 4)]
    alone = engine.generate(uneven, max_completion_length=40, batch_size=1)
    for side in ("left", "right"):
        monkeypatch.setattr(engine.tokenizer, "padding_side", side)
        assert engine.generate(uneven, max_completion_length=40, batch_size=4) == alone
        assert engine.tokenizer.padding_side == side, "it is the trainer's"
    assert engine.generate([], max_completion_length=4) == []


def test_completions_are_cut_at_the_length(engine):
    tokenizer = engine.tokenizer
    ((cut,),) = engine.generate(PROMPTS[:1], max_completion_length=3)
    assert (cut.tokens, cut.truncated) == (3, True)
    assert len(tokenizer(cut.text)["input_ids"]) == 3
    ((whole,),) = engine.generate(PROMPTS[:1], max_completion_length=60)
    assert not whole.truncated
    assert whole.tokens == len(tokenizer(whole.text)["input_ids"]) + 1  # the stop counts


def test_unsloth_trains_on_the_4_bit_weights_that_the_merge_dequantises():
    policy = models.load_policy(resolve("tiny-cpu"))
    theirs = policy.model.get_base_model().state_dict()
    for name, weight in weights.load_dequantized(TINY, "4bit").state_dict().items():
        layer, _, leaf = name.rpartition(".")
        other = theirs.get(f"{layer}.base_layer.{leaf}", theirs.get(name))
        torch.testing.assert_close(weight, other.to(weight.dtype), rtol=0, atol=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forks):
    """What tests/short_trainings.py reports of each backend, with the adapter's folder."""
    script, reports = PROJECT_ROOT / "tests/short_trainings.py", {}
    for backend in ("unsloth", "transformers"):
        folder = tmp_path_factory.mktemp(backend)
        given = {"OMP_NUM_THREADS": "1", "GRPO_NB_RUNS": str(folder)}
        given["PYTHONPATH"] = str(PROJECT_ROOT)
        python = forked.python() if backend == "transformers" else [sys.executable]
        subprocess.run([*python, str(script), backend], env=os.environ | given, check=True)
        reports[backend] = json.loads((folder / "report.json").read_text())
        reports[backend]["adapter"] = folder / "asked/train/adapter"
    return reports


@pytest.mark.parametrize("case", ["4bit", "16bit", "full"])
def test_both_backends_train_from_the_same_policy_each_without_the_other(trained, case):
    assert [trained[of]["unsloth imported"] for of in trained] == [True, False]
    ours, theirs = (trained[backend][case] for backend in ("transformers", "unsloth"))
    assert ours["moved"] > 1 and all(line["grad_norm"] > 0 for line in ours["metrics"])
    assert ours["texts"][0] == theirs["texts"][0]
    first, other = ours["metrics"][0], theirs["metrics"][0]
    for key in ("loss", "entropy", "grad_norm", "reward"):
        assert first[key] == pytest.approx(other[key], rel=0.01)


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_asking_the_policy_does_not_change_its_training(trained, backend):
    asked, alone = trained[backend]["asked"], trained[backend]["4bit"]
    assert len(alone["metrics"]) == 2 and asked["metrics"] == alone["metrics"]
    assert (asked["texts"], asked["moved"]) == (alone["texts"], alone["moved"])


def answers(engine):
    groups = engine.generate(short_trainings.PROMPTS, max_completion_length=48)
    return [group[0].text for group in groups]


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_the_policy_answers_as_its_saved_adapter(trained, backend):
    """Also in a training that checkpoints activations, with which generation gives garbage."""
    adapter, expected = trained[backend]["adapter"], trained[backend]["asked"]["answers"]
    assert answers(models.open_engine(TINY, adapter=adapter, quantization="4bit")) == expected
    assert answers(models.open_engine(TINY, adapter=None, quantization="4bit")) != expected


def plain_policy(**settings):
    return models.load_policy(resolve("tiny-cpu", settings | PLAIN))


@pytest.mark.parametrize("in_4bit", [True, False])
def test_a_closed_policy_holds_no_weights_whoever_holds_it(in_4bit):
    policy = plain_policy(**{"model.load_in_4bit": in_4bit})
    held = policy.model  # as a trainer, or a name in a kernel, does
    storages = [weakref.ref(one.untyped_storage()) for one in held.parameters()]
    assert sum(one.nbytes for one in held.parameters()) > 5e5
    policy.close()
    assert sum(one.nbytes for one in [*held.parameters(), *held.buffers()]) == 0
    assert all(ref() is None for ref in storages)
    states = [getattr(one, "quant_state", None) for one in [*held.modules(), *held.parameters()]]
    assert not any(states)


def test_a_closed_engine_lets_its_model_go():
    opened = models.open_engine(TINY, adapter=None, quantization="16bit")
    model = weakref.ref(opened.model)
    opened.close()
    assert model() is None


def test_saved_weights_go_into_a_policy_in_place(trained):
    policy = plain_policy()
    before, places = answers(policy), [*map(id, policy.model.parameters())]
    models.load_weights(policy, trained["transformers"]["adapter"])
    assert answers(policy) == trained["transformers"]["asked"]["answers"] != before
    assert [*map(id, policy.model.parameters())] == places


def test_weights_that_do_not_fit_are_refused(trained, tmp_path):
    adapter = trained["transformers"]["adapter"]
    policy = plain_policy(**{"lora.lora_alpha": 16})
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    other = shutil.copytree(adapter, tmp_path / "adapter") / "adapter_config.json"
    other.write_text(other.read_text().replace("tiny_base", "task_base"))
    for folder, message in {
        adapter: r"lora_alpha = 32, the policy 16 and 16: load",
        tmp_path: r"No such file .*adapter_config.json",
        other.parent: r"was trained on .*task_base, not on .*tiny_base",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            models.load_weights(policy, folder)
    assert all(map(torch.equal, before, policy.model.parameters()))
    fewer = plain_policy(**{"lora.lora_alpha": 32, "lora.target_modules": "q_proj"})
    with pytest.raises(ValueError, match=r"down_proj.lora_A.* is only in one of them"):
        models.load_weights(fewer, adapter)


def test_a_full_models_weights_go_into_a_policy(tmp_path):
    policy, other = plain_policy(**FULL), plain_policy(**FULL)
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    for parameter in policy.model.parameters():
        parameter.data += 0.01
    policy.model.save_pretrained(tmp_path)
    models.load_weights(other, tmp_path)
    assert all(map(torch.equal, policy.model.parameters(), other.model.parameters()))
    path = tmp_path / "model.safetensors"
    save_file({k: v.clone() for k, v in load_file(path).items() if "embed" not in k}, path)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is only in one of them"):
        models.load_weights(other, tmp_path)


@pytest.mark.parametrize(("error", "shown"), [(ValueError, ""), (RuntimeError, "library\n\n")])
def test_what_libraries_print_stands_only_above_errors_that_are_not_ours(capsys, error, shown):
    with pytest.raises(error), hub.quiet():
        print("library")
        raise error("a sentence")
    assert capsys.readouterr().err == shown
