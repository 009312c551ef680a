"""Merging, the parity gate, and the model card."""

import json
import os
import shutil

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from grpo_nb import export, models
from grpo_nb.__main__ import main
from grpo_nb.export import merging, parity
from grpo_nb.models import weights
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, Stage, project_path, write_json
from grpo_nb.runs.config import resolve

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


def merge(run, settings=None, *, force=False):
    config = resolve("tiny-cpu", settings) if settings else run.config()
    return export.merge(Stage(run, "04", config), force=force)


def change_adapter(run, change):
    path = run / "train/adapter/adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_adapter_config(run, **settings):
    path = run / "train/adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def dequantized(quantization="4bit"):
    """The weights of the base, tied ones once, as files hold them."""
    model = models.load_dequantized(TINY, quantization)
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}


def test_the_files_are_the_dequantised_base_and_the_adapter_bit_for_bit(run, monkeypatch):
    """Whatever the processor computes in: the weights are merged, and kept, in bf16."""
    monkeypatch.setattr(weights, "weights_dtype", lambda: torch.float32)
    folder, check = merge(run)
    assert check.state == "ok"
    adapter, expected = load_file(run / "train/adapter/adapter_model.safetensors"), dequantized()
    scale = run.config().model.lora_alpha / run.config().model.lora_rank
    names = merging.changed_weights(run / "train/adapter")
    assert len(names) == 28
    for name in names:
        part = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        down, up = (adapter[f"{part}{side}.weight"].float() for side in "AB")
        expected[name] = (expected[name].float() + scale * (up @ down)).to(torch.bfloat16)
    held = load_file(folder / "model.safetensors")
    assert set(held) == set(expected)
    assert [name for name in held if not torch.equal(held[name], expected[name])] == []
    assert not torch.equal(dequantized("16bit")[LAYER], dequantized("4bit")[LAYER])
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] and config["architectures"] == ["Qwen2ForCausalLM"]
    report = json.loads((run / "model/parity.json").read_text())
    assert report["passed"] and report["prompts"] == len(LIKE) < report["tokens"]
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
    assert json.loads((run / "model/parity.json").read_text())["base"] == packed
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_model_that_lacks_a_shard_is_incomplete(tmp_path):
    model = models.load_checkpoint(TINY, adapter=None, quantization="16bit")
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    models.load_tokenizer(TINY).save_pretrained(tmp_path)
    assert export.check_complete(tmp_path) == tmp_path
    shard = sorted(tmp_path.glob("model-0*"))[2]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shard.name}: the model is incomplete"):
        export.check_complete(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "change", "free"),
    [
        (psutil, "virtual_memory", {"available": 10**6}, "0.001 GB in memory and .* Stop other"),
        (shutil, "disk_usage", {"free": 10**6}, ".* and 0.001 GB in the disk of .*/model"),
    ],
)
def test_too_little_room_is_said_before_it_is_taken(
    run, monkeypatch, capsys, module, name, change, free
):
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: real(*given)._replace(**change))
    takes = "the merge takes 0.0017 GB in memory and on the disk: 16-bit weights"
    with pytest.raises(RuntimeError, match=f"{takes}; free: {free}"):
        merge(run)
    assert takes in capsys.readouterr().out
    assert not any((run / "model").iterdir())


def damage(change):
    """Put a fault into what a merge writes."""
    write = merging._write

    def faulty(model, config, folder):
        write(model, config, folder)
        change(folder / "model.safetensors")

    return "_write", faulty


def drop_a_delta(path):
    save_file(load_file(path) | {LAYER: dequantized()[LAYER]}, path, {"format": "pt"})


def drop_a_tensor(path):
    tensors = load_file(path)
    del tensors[LAYER]
    save_file(tensors, path, {"format": "pt"})


def onto_another_base():
    merged = merging._merged
    return "_merged", lambda policy, adapter, _: merged(policy, adapter, "16bit")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (damage(drop_a_delta), r"fails the parity gate \(KL .* is not put in place"),
        (damage(drop_a_tensor), r"fails the parity gate \(KL "),
        (onto_another_base(), r"check that model.model_path is the base of the training"),
        (damage(lambda path: os.truncate(path, 9**5)), r"the weights in .*merged.* are damaged"),
    ],
)
def test_a_merge_gone_wrong_is_caught_and_not_put_in_place(run, monkeypatch, fault, message):
    shutil.copytree(project_path(TINY), run / "model/merged")
    before = run.files("model/merged")
    monkeypatch.setattr(merging, *fault)
    with pytest.raises(ValueError, match=message):
        merge(run)
    assert run.files("model/merged") == before
    assert {p.name for p in (run / "model").iterdir()} <= {"merged", "parity.json"}


def test_a_merge_that_fails_the_gate_is_put_in_place_by_force_alone(run, monkeypatch):
    monkeypatch.setattr(merging, *damage(drop_a_delta))
    with pytest.raises(ValueError, match="force = True exports it anyway"):
        merge(run)
    (check,) = run.manifest()["04"]["checks"]
    assert check["state"] == "stop" and check["evidence"].startswith("KL adapter to merged ")
    folder, forced = merge(run, force=True)
    assert forced.state == "stop"
    assert export.check_complete(folder).exists()


NOISE = {"kl": 1e-4, "token_agreement": 1.0}
SEEN = {"kl": 0.5, "token_agreement": 0.8, "prompts": 8, "tokens": 3000, "noise": NOISE, "gap": 1.2}
UNLIKE_NOISE = {"kl": 2.1e-3, "token_agreement": 0.99}  # on questions unlike the training's
SOUND = {"kl": 3.9e-3, "token_agreement": 0.985}
# As of random models, and of experts among which rounding chooses another.
TIED = {"kl": 2e-6, "token_agreement": 0.9, "gap": 0.004, "noise": NOISE | {"kl": 1e-6}}


@pytest.mark.parametrize(
    ("figures", "state", "said"),
    [
        (SEEN, "stop", "KL adapter to merged 0.5 per token (at most 0.001;"),
        (SEEN, "stop", "80.00% (at least 99.4%)"),
        (SEEN | {"kl": float("nan"), "token_agreement": 1.0}, "stop", "model.model_path is the"),
        (SEEN | SOUND | {"noise": UNLIKE_NOISE}, "ok", ""),
        (SEEN | SOUND, "stop", ""),
        ({}, "ok", "every weight was trained"),
        (SEEN | TIED, "ok", "near ties for the adapter, 0.004 nats apart"),
        (SEEN | TIED | {"gap": 2.0}, "stop", "the weights are the trained ones"),
        (SEEN | TIED | {"kl": 0.1}, "stop", "check that model.model_path is the base"),
        (SEEN | {"tokens": 0, "kl": float("nan")}, "stop", "no completion holds text"),
    ],
)
def test_the_verdict_is_about_probabilities_and_greedy_tokens(figures, state, said):
    check = parity.verdict(figures)
    assert check.state == state
    assert said in f"{check.evidence} {check.fix}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gate_tells_rounding_from_another_base_on_any_questions(
    run, tmp_path, monkeypatch, dtype
):
    """bf16 and the fp16 of older GPUs; an adapter that changes much, and strange questions."""
    monkeypatch.setattr(weights, "weights_dtype", lambda: getattr(torch, dtype))
    folder, tokenizer = run / "train/adapter", models.load_tokenizer(TINY)
    tuned = models.load_checkpoint(TINY, adapter=folder, quantization="4bit")

    def seen(base):
        merging._write(merging._merged(TINY, folder, base), run.config(), tmp_path / base)
        merged = models.load_checkpoint(str(tmp_path / base), adapter=None, quantization="16bit")
        sampling = {"max_completion_length": 48}
        names = merging.changed_weights(folder)
        return parity.behaviour(tuned, merged, tokenizer, UNLIKE * 2, sampling, names)

    sound = seen("4bit")
    assert parity.verdict(sound).state == "ok"
    assert sound["noise"]["kl"] > 0
    if dtype == "bfloat16":
        assert sound["kl"] > 1e-3, "a mark for all would fail it"
    assert parity.verdict(seen("16bit")).state == "stop"


def test_leftovers_of_a_killed_merge_are_removed(run):
    left = run / "model/.merged.99999.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    merge(run)
    assert not left.exists()


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
            r"NaN or inf in base_model.*layers\.2\.mlp\.down_proj",
        ),
        (other_name, r"changes model.layers.9.mlp.down_proj.weight, which .* lacks"),
        (None, r"the weights in .*adapter are damaged"),
        ("Qwen/Qwen3-4B", r"was trained on Qwen/Qwen3-4B, not on data/tiny_base"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_and_nothing_overwritten(run, change, message):
    if callable(change):
        change_adapter(run, change)
    elif change:
        change_adapter_config(run, base_model_name_or_path=change)
    else:
        os.truncate(run / "train/adapter/adapter_model.safetensors", 9**5)
    with pytest.raises(ValueError, match=message):
        merge(run)
    assert not (run / "model").exists() or not any((run / "model").iterdir())


def test_a_base_without_safetensors_is_refused(run, tmp_path):
    shutil.copytree(project_path(TINY), tmp_path / "tiny_base")
    (tmp_path / "tiny_base/model.safetensors").rename(tmp_path / "tiny_base/pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no file named model.safetensors"):
        merge(run, {"model.model_path": str(tmp_path / "tiny_base")})


@pytest.fixture
def finished(run):
    """A run of which stage 04 has written a model, in name."""
    shutil.copytree(project_path(TINY), run / "model/merged")
    (run / "model/merged/README.md").unlink()
    sentence = "base → merged: better: greedy accuracy 20 % → 90 %"
    write_json(run / "eval/report.json", {"prompts": 32, "comparisons": [{"sentence": sentence}]})
    check = {"name": "merge", "state": "ok", "evidence": "KL 1e-6", "fix": ""}
    entry = {"status": "done", "outputs": {}, "versions": {"trl": "1.15.0"}, "git_commit": "abc"}
    manifest = {stage: dict(entry) for stage in ("01", "02", "03", "04")}
    manifest["01"]["outputs"] = {"data/train.parquet": "0" * 64}
    manifest["04"] |= {"outputs": run.files("model/merged"), "checks": [check]}
    write_json(run / "manifest.json", manifest)
    return run


def test_the_card_says_what_the_run_recorded(finished):
    card = export.model_card(finished)
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    said = ("0" * 64, "trl: 1.15.0", "train.max_steps: 100", "numeric_correctness_reward: 1.0")
    for one in (*said, "# demo", "- base → merged: better", "- merge: ok, KL 1e-6"):
        assert one in body
    assert "## Limits" in body
    assert str(finished.path.parent) not in card
    (finished / "eval/report.json").unlink()
    assert "## Evaluation" not in export.model_card(finished)


def test_the_card_is_written_beside_the_model_and_the_upload_is_said(finished, capsys):
    assert main(["card", str(finished.path)]) == main(["card", "demo"]) == 0
    folder = finished / "model/merged"
    assert f"hf upload OWNER/NAME {folder}" in capsys.readouterr().out
    assert (folder / "README.md").read_text() == export.model_card(finished)


def test_a_model_that_was_cut_short_gets_no_card(finished, capsys):
    path = finished / "model/merged/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert main(["card", str(finished.path)]) == 2
    assert f"{path} is not as 04_merge_and_infer wrote it" in capsys.readouterr().err
    assert not (path.parent / "README.md").exists()
