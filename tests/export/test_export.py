"""Merging, and the parity gate."""

import json
import re
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from conftest import moved
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file, save_file

import grpo_nb
from grpo_nb import export, models
from grpo_nb.export import gate, merging
from grpo_nb.files import project_path
from grpo_nb.models import weights
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, Stage

TINY = "data/tiny_base"
KEY = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
LAYER = "model.layers.2.mlp.down_proj.weight"
LIKE = [build_prompt(f"What is {a} + {a + 7}?") for a in range(5)]
UNLIKE = [build_prompt(q) for q in ("Who wrote it?", "x * y = ?", "7 - 3", "hello", "12345 + 678")]


@pytest.fixture
def run(moved_run, tmp_path, monkeypatch):
    """A copy of a run with an adapter of noise, to write to."""
    shutil.copytree(moved_run.path, tmp_path / "runs/demo")
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path / "runs"))
    rows = [{"prompt": prompt} for prompt in LIKE]
    monkeypatch.setattr(merging.data, "load", lambda run, part: rows)
    return Run("demo")


def merge(run, *, force=False):
    return export.merge_run(Stage(run, "04", run.config()), force=force)


def change_adapter(adapter, change):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_adapter_config(run, **settings):
    path = run / "train/adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def adapted(adapter):
    """The names of the weights that an adapter changes."""
    names = load_file(adapter / "adapter_model.safetensors")
    return sorted(f"{gate.plain_name(name).partition('.lora_')[0]}.weight" for name in names)[::2]


def dequantized(quantization="4bit"):
    """The weights of the base, tied ones once, as files hold them."""
    model = models.load_dequantized(TINY, quantization)
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}


def test_the_files_are_the_dequantised_base_and_the_adapter_to_a_step_of_bf16(run, monkeypatch):
    """Whatever the processor computes in: the weights are merged, and kept, in bf16."""
    monkeypatch.setattr(weights, "weights_dtype", lambda: torch.float32)
    leftover = run / "model/.merged.99999.tmp"  # of a killed merge
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").touch()
    folder, check = merge(run)
    assert check.state == "ok" and not leftover.exists()
    adapter, expected = load_file(run / "train/adapter/adapter_model.safetensors"), dequantized()
    scale = run.config().lora.lora_alpha / run.config().lora.r
    names = adapted(run / "train/adapter")
    held = load_file(folder / "model.safetensors")
    assert len(names) == 28 and set(held) == set(expected)
    for name in names:
        part = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        down, up = (adapter[f"{part}{side}.weight"].float() for side in "AB")
        exact = expected.pop(name).float() + scale * (up @ down)
        bits = exact.view(torch.int32) & -(2**16)
        steps = [each.view(torch.float32).to(torch.bfloat16) for each in (bits, bits + 2**16)]
        assert ((held[name] == steps[0]) | (held[name] == steps[1])).all(), name
    assert all(torch.equal(held[name], weight) for name, weight in expected.items())
    merge(run)
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in held.items())
    assert not torch.equal(dequantized("16bit")[LAYER], dequantized("4bit")[LAYER])
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] and config["architectures"] == ["Qwen2ForCausalLM"]
    report = json.loads((run / "model/parity.json").read_text())
    assert report["passed"] and f"on {len(LIKE)} prompts" in report["text"]
    assert [one["name"] for one in run.manifest()["04"]["checks"]] == ["merge"]


def test_a_base_already_in_4bit_is_dequantised_from_its_own_states(run, tmp_path):
    """As Unsloth's copies on the hub are."""
    packed = str(tmp_path / "tiny_base-unsloth-bnb-4bit")
    models.weights.load_base(TINY, "4bit").save_pretrained(packed)
    for quantization in ("4bit", "16bit"):  # the checkpoint says of itself that it is in 4 bit
        seen = models.load_dequantized(packed, quantization).state_dict()
        assert all(torch.equal(seen[name].cpu(), w) for name, w in dequantized().items())
    adapter = run / "train/adapter"
    change_adapter_config(run, base_model_name_or_path="unsloth/Tiny_Base-bnb-4bit")
    assert models.trained_base(TINY, adapter) == "unsloth/Tiny_Base-bnb-4bit"
    models.load_tokenizer(TINY).save_pretrained(packed)
    change_adapter_config(run, base_model_name_or_path=packed)
    folder, check = merge(run)
    assert check.state == "ok"
    assert json.loads((run / "model/parity.json").read_text())["model_name"] == packed
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def damage(monkeypatch, change):
    """Put a fault into what a merge writes."""
    write = merging._write

    def faulty(model, base, template, folder):
        write(model, base, template, folder)
        change(folder / "model.safetensors")

    monkeypatch.setattr(merging, "_write", faulty)


def drop_a_delta(path):
    save_file(load_file(path) | {LAYER: dequantized()[LAYER]}, path, {"format": "pt"})


def drop_a_tensor(path):
    tensors = load_file(path)
    del tensors[LAYER]
    save_file(tensors, path, {"format": "pt"})


def change_the_config(path):
    config = path.parent / "config.json"
    changes = {"rope_theta": 10.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_a_tensor, rf"^merge: 1 weights \(.* in {LAYER}\) are"),
        (change_the_config, "every weight is right, .* compare .* config.json"),
    ],
)
def test_a_merge_gone_wrong_is_caught_and_not_put_in_place(run, monkeypatch, change, message):
    shutil.copytree(project_path(TINY), run / "model/merged")
    before = run.files("model/merged")
    damage(monkeypatch, change)
    with pytest.raises(ValueError, match=message):
        merge(run)
    assert [one["state"] for one in run.manifest()["04"]["checks"]] == ["stop"]
    assert run.files("model/merged") == before
    assert {p.name for p in (run / "model").iterdir()} <= {"merged", "parity.json"}
    _, forced = merge(run, force=True)
    assert forced.state == "stop" and run.files("model/merged") != before


@pytest.fixture(scope="module", params=[(0.1, torch.float16), (0.1, torch.float32), (1e-4, None)])
def merge_of(request, tmp_path_factory):
    """A sound merge of much, in the fp16 of older GPUs and in fp32, and of little.

    small: Whether the adapter's change is mostly below half a step of bf16, as a training's is.
    """
    (size, dtype), folder = request.param, tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        if dtype:
            patch.setattr(weights, "weights_dtype", lambda: dtype)
        adapter = moved(folder, size, {}) / "train/adapter"
        tuned = models.load_checkpoint(TINY, adapter=adapter, quantization="4bit")
        merging._write(
            merging._merged(TINY, adapter, "4bit"),
            TINY,
            models.load_tokenizer(TINY),
            folder / "merged",
        )
        merged = models.load_checkpoint(str(folder / "merged"), adapter=None, quantization="16bit")
    return SimpleNamespace(adapter=adapter, tuned=tuned, merged=merged, small=size == 1e-4)


@contextmanager
def other(merged, weights):
    """Put other weights into a merged model for as long as the block lasts."""
    before = {name: merged.get_parameter(name).data for name in weights}
    for name, weight in weights.items():
        merged.get_parameter(name).data = weight
    yield merged
    for name, weight in before.items():
        merged.get_parameter(name).data = weight


def test_a_sound_merge_passes(merge_of):
    """Also on questions unlike those of the training."""
    engine = models.engine_of(merge_of.tuned, models.load_tokenizer(TINY))
    figures = gate.merged(engine, merge_of.merged, gate.Questions(UNLIKE, 48))
    check = gate.verdict("merge", figures)
    assert check.state == "ok" and "(at most 0.05), on 5 prompts" in check.evidence, check
    check = gate.verdict("merge", figures | {"config": True, "kl": float("nan")})
    assert check.state == "stop" and "config.json" in check.fix


def layer_of(merge, name):
    """The LoRA layer of a weight, and the weight of its base."""
    layer = merge.tuned.get_submodule(f"base_model.model.{name.removesuffix('.weight')}")
    return layer, dequantize_module_weight(layer.get_base_layer())


def faults_of(tuned, merged):
    """{kind: (how many weights, the share of the first)} of the kinds that are there."""
    texts = {kind: text for kind, text in gate.weights(tuned, merged).items() if text}
    parts = {kind: re.match(r"(\d+) weights \((-?\d+)%", text) for kind, text in texts.items()}
    return {kind: (int(part[1]), int(part[2])) for kind, part in parts.items()}


@pytest.mark.parametrize("onto", [torch.bfloat16, torch.float32])
def test_a_small_change_is_lost_by_rounding_to_nearest_and_the_gate_says_how_much(merge_of, onto):
    """A large change survives it, and so does any that is added to a base between two bf16 numbers.

    The policy's base is a bf16 number where the processor computes in bf16; a merge's always is.
    """
    weights = {}
    for name in adapted(merge_of.adapter)[:4]:
        layer, base = layer_of(merge_of, name)
        exact = base.to(onto).float() + layer.get_delta_weight("default")
        weights[name] = exact.to(torch.bfloat16).data
    with other(merge_of.merged, weights) as merged:
        faults = faults_of(merge_of.tuned, merged)
    is_lost = merge_of.small and (onto == torch.bfloat16 or models.has_bf16())
    assert faults.keys() == ({"adapter"} if is_lost else set()), faults
    assert all(count == 4 and share < 90 for count, share in faults.values())


def step_back(tensors):
    """Make the adapter like that of a step before: 5 % smaller, and a little elsewhere."""
    torch.manual_seed(1)
    for name in [name for name in tensors if "lora_B" in name]:
        size = 0.03 * tensors[name].std()
        tensors[name] = 0.95 * tensors[name] + size * torch.randn_like(tensors[name])


def of_another_adapter(merge, folder):
    change_adapter(shutil.copytree(merge.adapter, folder / "adapter"), step_back)
    return dict(merging._merged(TINY, folder / "adapter", "4bit").named_parameters())


def of_another_base(merge, _):
    return dict(merging._merged(TINY, merge.adapter, "16bit").named_parameters())


def without_a_layer(merge, _):
    name = adapted(merge.adapter)[0]
    return {name: layer_of(merge, name)[1].to(torch.bfloat16).data}


def of_another_checkpoint(merge, _):
    name = "model.embed_tokens.weight"
    return {name: merge.merged.get_parameter(name).data * 1.05}


@pytest.mark.parametrize(
    ("weights_of", "kind", "one"),
    [
        (of_another_adapter, "adapter", False),
        (of_another_base, "base", False),
        (without_a_layer, "adapter", True),
        (of_another_checkpoint, "unadapted", True),
    ],
)
def test_a_wrong_merge_is_caught_and_named(merge_of, tmp_path, weights_of, kind, one):
    with other(merge_of.merged, weights_of(merge_of, tmp_path)) as merged:
        faults = faults_of(merge_of.tuned, merged)
    assert faults.keys() == {kind}
    count, share = faults[kind]
    assert count == (1 if one else 28) and (kind != "base" or share == 9)


def zero(tensors):
    for name in tensors:
        if "lora_B" in name:
            tensors[name].zero_()


def other_name(tensors):
    for side in "AB":
        tensors[KEY.format(side).replace("2", "9")] = tensors.pop(KEY.format(side))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (zero, "the adapter is all zero"),
        (
            lambda t: t[KEY.format("B")].fill_(float("nan")),
            r"NaN or inf in the adapter's base_model.*layers\.2\.mlp\.down_proj",
        ),
        (other_name, r"changes .*model.layers.9.mlp.down_proj.*, which .* lacks"),
        ("Qwen/Qwen3-4B", r"was trained on Qwen/Qwen3-4B, not on data/tiny_base"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_and_nothing_overwritten(run, change, message):
    if callable(change):
        change_adapter(run / "train/adapter", change)
    else:
        change_adapter_config(run, base_model_name_or_path=change)
    with pytest.raises(ValueError, match=message):
        merge(run)
    assert not (run / "model").exists() or not any((run / "model").iterdir())


def test_the_tool_merges_two_folders_and_puts_only_the_policy_in_place(run, tmp_path, monkeypatch):
    """`grpo_nb.merge` beside a notebook of one's own: no run, chats or texts as prompts."""
    adapter, rows = run / "train/adapter", [{"prompt": "What is 3 + 4?"}, {"prompt": LIKE[0]}]
    check = grpo_nb.merge(TINY, adapter, tmp_path / "merged", rows, load_in_4bit=True)
    assert check.state == "ok" and "on 2 prompts" in check.evidence
    before = (tmp_path / "merged/model.safetensors").read_bytes()
    damage(monkeypatch, drop_a_delta)
    why = rf"^merge: 1 weights \(0% in {LAYER}\) are the base's plus a change"
    with pytest.raises(ValueError, match=why):
        grpo_nb.merge(TINY, adapter, tmp_path / "merged", load_in_4bit=True)
    assert (tmp_path / "merged/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_each_program_gets_a_line_with_an_absolute_path(runs_dir):
    run = Run("r")
    with pytest.raises(FileNotFoundError, match="run 04_merge_and_infer first"):
        export.where(run)
    merged = run / "model/merged"
    (merged / "gguf").mkdir(parents=True)
    text = export.where(run)
    assert merged.is_absolute() and f"vllm serve '{merged}'" in text
    assert str(run / "train/adapter") in text
    assert "grpo_nb run --name r --only 04 --set export.gguf=q8_0" in text
    (merged / "gguf/r-q8_0.gguf").touch()
    text = export.where(run)
    assert f"llama-server -m '{merged}/gguf/r-q8_0.gguf'" in text
    assert f"ollama create r -f '{merged}/gguf/Modelfile'" in text


def test_a_base_without_safetensors_is_refused(tmp_path):
    folder = shutil.copytree(project_path(TINY), tmp_path / "tiny_base")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no file named model.safetensors"):
        models.load_dequantized(str(folder), "4bit")
