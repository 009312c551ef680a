"""Merging, the parity gate, GGUF, the model card and the hub."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from grpo_nb import export, models, reward_lab
from grpo_nb.__main__ import main
from grpo_nb.export import adapter, merging, parity
from grpo_nb.models import checkpoint
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, project_path

TINY = "data/tiny_base"
KEY = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"
LAYER = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture
def run(demo_run, tmp_path, monkeypatch):
    """A copy of the finished run, to write to."""
    shutil.copytree(demo_run.path, tmp_path / "runs/demo")
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path / "runs"))
    return Run("demo")


def change_adapter(run, change):
    path = run / "train/adapter/adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def whole(model):
    """The weights of a model, tied ones once, as files hold them."""
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}


def expected(base, deltas, mode, quantization):
    weights = whole(merging.base_in_16bit(base, mode, quantization))
    return {n: deltas[n].added_to(w) if n in deltas else w for n, w in weights.items()}


@pytest.mark.parametrize("mode", ["merged_16bit", "merged_16bit_original_base"])
def test_the_files_are_the_base_and_the_adapter_bit_for_bit(demo_run, run, mode, monkeypatch):
    """Whatever the processor computes in: the weights are merged, and kept, in bf16."""
    monkeypatch.setattr(checkpoint, "weights_dtype", lambda: torch.float32)
    folder, report = export.merge(run, run.config(), mode)
    deltas = adapter.read_adapter(demo_run / "train/adapter")
    assert len(deltas) == 28 == report["adapter"]["layers"]
    held = load_file(folder / "model.safetensors")
    other = {"merged_16bit", "merged_16bit_original_base"} - {mode}
    same, another = (expected(TINY, deltas, m, "4bit") for m in (mode, *other))
    assert set(held) == set(same)
    assert [name for name in held if not torch.equal(held[name], same[name])] == []
    assert {t.dtype for t in held.values()} == {torch.bfloat16}
    assert not torch.equal(held[LAYER], another[LAYER])
    assert not torch.equal(held[LAYER], whole(merging.base_in_16bit(TINY, mode, "4bit"))[LAYER])
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] and config["architectures"] == ["Qwen2ForCausalLM"]


def test_a_base_trained_in_16bit_is_its_own_original(demo_run):
    modes = ("merged_16bit", "merged_16bit_original_base")
    first, second = (whole(merging.base_in_16bit(TINY, mode, "16bit")) for mode in modes)
    assert torch.equal(first[LAYER], second[LAYER])


def test_a_base_already_in_4bit_is_dequantised_from_its_own_states(run, tmp_path):
    """As Unsloth's copies on the hub are."""
    packed = str(tmp_path / "tiny_base-bnb-4bit")
    models.load_checkpoint(TINY, adapter=None, quantization="4bit").save_pretrained(packed)
    plain = whole(merging.base_in_16bit(TINY, "merged_16bit", "4bit"))
    for quantization in ("4bit", "16bit"):  # the checkpoint says of itself that it is in 4 bit
        seen = whole(merging.base_in_16bit(packed, "merged_16bit", quantization))
        assert set(seen) == set(plain)
        assert all(torch.equal(seen[name], plain[name]) for name in plain)
    with pytest.raises(ValueError, match=r"holds 4-bit weights, no original in 16 bit"):
        merging.base_in_16bit(packed, "merged_16bit_original_base", "4bit")
    path = run / "train/adapter/adapter_config.json"
    config = json.loads(path.read_text()) | {
        "base_model_name_or_path": "unsloth/Tiny_Base-bnb-4bit"
    }
    path.write_text(json.dumps(config))
    assert adapter.trained_base(TINY, path.parent) == "unsloth/Tiny_Base-bnb-4bit"
    models.load_tokenizer(TINY).save_pretrained(packed)
    path.write_text(json.dumps(config | {"base_model_name_or_path": packed}))
    folder, report = export.merge(run, run.config())
    assert (report["passed"], report["base"]) == (True, packed)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_shards_read_back_as_one_model(demo_run, run):
    config = run.config()
    small = config.model_copy(
        update={"export": config.export.model_copy(update={"max_shard_gb": 4e-4})}
    )
    folder, report = export.merge(run, small)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) >= 4
    assert max(path.stat().st_size for path in folder.glob("*.safetensors")) < 4.2e5
    assert report["passed"]
    whole = load_file(demo_run / "model/merged/model.safetensors")
    read = models.load_checkpoint(str(folder), adapter=None, quantization="16bit").state_dict()
    assert all(torch.equal(read[name].cpu(), whole[name]) for name in whole)
    files = {path.name for path in folder.iterdir()}
    assert {"chat_template.jinja", "generation_config.json", "tokenizer.json"} <= files
    (folder / shards[2]).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shards[2]}: it is no whole model"):
        export.check_complete(folder)


def test_the_memory_that_is_needed_is_said_before_it_is_taken(run, monkeypatch, capsys):
    before = run.files("model")
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10**6))
    with pytest.raises(RuntimeError, match=r"holds 0.0017 GB of 16-bit weights in memory; this"):
        export.merge(run, run.config())
    assert run.files("model") == before
    monkeypatch.undo()
    monkeypatch.setattr(merging, "_merged", lambda *_: pytest.fail(capsys.readouterr().out))
    with pytest.raises(
        pytest.fail.Exception, match=r"the merge holds 0.0017 GB of 16-bit weights in"
    ):
        export.merge(run, run.config())


def test_the_gate_of_stage_04_has_passed(demo_run):
    report = json.loads((demo_run / "model/parity.json").read_text())
    assert (report["passed"], report["mode"], report["forced"]) == (True, "merged_16bit", False)
    assert report["token_agreement"] >= 0.995
    assert report["kl"] < 1e-3
    assert report["layers"] == {"compared": 50, "differ": []}
    assert report["adapter"]["norm of B"] > 0
    assert report["adapter"]["still as begun"] == []
    assert report["prompts"] == 32 < report["tokens"]


def damage(change):
    """Put a fault into what a merge writes."""
    write = merging._write

    def faulty(model, config, folder):
        write(model, config, folder)
        change(folder / "model.safetensors")

    return "_write", faulty


def drop_a_delta(path):
    base = whole(merging.base_in_16bit(TINY, "merged_16bit", "4bit"))
    save_file(load_file(path) | {LAYER: base[LAYER]}, path, {"format": "pt"})


def drop_a_tensor(path):
    tensors = load_file(path)
    del tensors[LAYER]
    save_file(tensors, path, {"format": "pt"})


def onto_another_base():
    merged = merging._merged
    return "_merged", lambda base, adapter, _, config: merged(
        base, adapter, "merged_16bit_original_base", config
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            damage(drop_a_delta),
            rf"not base \+ adapter in 1 layers: {LAYER}: .* is not put in place",
        ),
        (damage(drop_a_tensor), rf"not base \+ adapter in 1 layers: {LAYER}: "),
        (onto_another_base(), r"not base \+ adapter in 28 layers: model.layers.0.*the base is not"),
        (damage(lambda path: os.truncate(path, 9**5)), r"the weights in .*merged.* are damaged"),
    ],
)
def test_a_merge_gone_wrong_is_caught_named_and_not_put_in_place(run, monkeypatch, fault, message):
    before = run.files("model/merged")
    monkeypatch.setattr(merging, *fault)
    with pytest.raises(ValueError, match=message):
        export.merge(run, run.config())
    assert run.files("model/merged") == before
    assert sorted(p.name for p in (run / "model").iterdir()) == ["merged", "parity.json"]


def test_a_merge_that_fails_the_gate_is_put_in_place_by_force_alone(run, monkeypatch):
    before = run.files("model/merged")
    monkeypatch.setattr(merging, *damage(drop_a_delta))
    with pytest.raises(ValueError, match="force = True exports it all the same"):
        export.merge(run, run.config())
    report = json.loads((run / "model/parity.json").read_text())
    assert (report["passed"], report["layers"]["differ"]) == (False, [LAYER])
    _, report = export.merge(run, run.config(), force=True)
    assert (report["passed"], report["forced"]) == (False, True)
    assert run.files("model/merged") != before


def test_another_policy_with_sound_layers_fails_on_behaviour():
    """The gate does not rest on the layers alone; only they speak against the base."""
    noise = {"kl": 1e-4, "token_agreement": 1.0}
    seen = {"kl": 0.5, "token_agreement": 0.8, "tokens": 3000, "noise": noise}
    first, second, cause = parity.verdict("merged_16bit", seen, [])
    assert (first, second) == ("KL 0.5 > 0.001", "greedy token agreement 80.00% < 99.4%")
    assert cause.startswith("every layer is base + adapter, so that the merge is sound")
    assert "the base is not" not in cause
    assert "the base is not the one trained on" in parity.verdict("merged_16bit", seen, [LAYER])[0]
    assert parity.verdict("merged_16bit", seen | {"kl": float("nan"), "token_agreement": 1.0}, [])
    sound = {"kl": 3.9e-3, "token_agreement": 0.985}  # as on questions unlike the training's
    rounding = {"kl": 2.1e-3, "token_agreement": 0.99}
    assert parity.verdict("merged_16bit", seen | sound | {"noise": rounding}, []) == []
    assert parity.verdict("merged_16bit", seen | sound, [])


UNLIKE = ("Who wrote it?", "x * y = ?", "7 - 3", "A train goes 3 km", "hello", "12345 + 678")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gate_tells_rounding_from_another_base_on_any_questions(
    moved_run, tmp_path, monkeypatch, dtype
):
    """bf16 and the fp16 of older GPUs; an adapter that changes much, and strange questions."""
    monkeypatch.setattr(checkpoint, "weights_dtype", lambda: getattr(torch, dtype))
    folder, config = moved_run / "train/adapter", moved_run.config()
    deltas = adapter.read_adapter(folder)
    judge = reward_lab.Bench(load_preset("math"), config.train, models.load_tokenizer(TINY))
    rows = [{"prompt": build_prompt(q), "question": q, "answer": "1"} for q in UNLIKE * 2]
    tuned = models.load_checkpoint(TINY, adapter=folder, quantization="4bit")

    def seen(mode):
        merging._write(merging._merged(TINY, folder, mode, config), config, tmp_path / mode)
        merged = models.load_checkpoint(str(tmp_path / mode), adapter=None, quantization="16bit")
        return parity.behaviour(tuned, merged, judge, rows, 48, 64, deltas)

    sound, other = seen("merged_16bit"), seen("merged_16bit_original_base")
    assert parity.verdict("merged_16bit", sound, []) == []
    assert sound["noise"]["kl"] > 0
    if dtype == "bfloat16":
        assert sound["kl"] > 1e-3, "a mark for all would fail it"
    faults = parity.verdict("merged_16bit", other, [])
    assert faults[0].startswith("KL ") and "token agreement" in faults[1]


def test_the_adapter_alone(run):
    copied = export.copy_adapter(run, run.config())
    assert (copied / "adapter_model.safetensors").exists()
    path = run / "train/adapter/adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(ValueError, match=r"the weights in .*adapter are damaged"):
        export.copy_adapter(run, run.config())


def test_4bit_weights_are_no_mode_any_more(run, capsys):
    assert main(["export", "demo", "--merge", "merged_4bit"]) == 2
    assert "merged_16bit" in capsys.readouterr().err


def test_leftovers_of_a_killed_merge_are_removed(run):
    left = run / "model/.merged.99999.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    export.merge(run, run.config())
    assert not left.exists()


def zero(tensors):
    for name in tensors:
        if "lora_B" in name:
            tensors[name].zero_()


def other_name(tensors):
    for side in "AB":
        name = f"base_model.model.model.layers.{{}}.self_attn.q_proj.lora_{side}.weight"
        tensors[name.format(9)] = tensors.pop(name.format(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (zero, "the adapter is all zero"),
        (lambda t: t[KEY].fill_(float("nan")), r"NaN or inf in model\.layers\.2\.mlp\.down_proj"),
        (
            other_name,
            r"model.layers.9.self_attn.q_proj.weight is missing in the base .*made for another",
        ),
        (
            lambda t: t.update({KEY: torch.ones(64, 16)}),
            r"\[128, 384\] in the base .* \[64, 384\] in the adapter: it was made for another",
        ),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_and_nothing_overwritten(run, change, message):
    before = run.files("model")
    change_adapter(run, change)
    with pytest.raises(ValueError, match=message):
        export.merge(run, run.config())
    assert run.files("model") == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": "Qwen/Qwen3-4B"}, r"made for the base 'Qwen/Qwen3-4B', and"),
        ({"use_dora": True}, r"use_dora is not plain LoRA"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(run, settings, message):
    path = run / "train/adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ValueError, match=message):
        export.merge(run, run.config())


def test_a_base_without_tokenizer_or_safetensors_is_refused(run, tmp_path):
    shutil.copytree(project_path(TINY), tmp_path / "tiny_base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tiny_base" / name).unlink()
    config = run.config()
    model = config.model.model_copy(update={"model_path": str(tmp_path / "tiny_base")})
    config = config.model_copy(update={"model": model})
    with pytest.raises(FileNotFoundError, match="tiny_base holds no tokenizer"):
        export.merge(run, config)
    (tmp_path / "tiny_base/model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"tiny_base holds no \*.safetensors"):
        export.merge(run, config)


def test_a_disk_too_small_is_said_before_anything_is_written(run, monkeypatch):
    before = run.files("model")
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RuntimeError, match=r"takes 0.00 GB and .* free some space"):
        export.merge(run, run.config())
    assert run.files("model") == before


@pytest.fixture
def llama_cpp(tmp_path):
    """A folder laid out as llama.cpp's, whose tools record their arguments and write a file."""
    folder = tmp_path / "llama.cpp"
    (folder / "build/bin").mkdir(parents=True)
    converter = "out = sys.argv[sys.argv.index('--outfile') + 1]\n"
    converter += "assert (pathlib.Path(sys.argv[1]) / 'model.safetensors').exists()\n"
    converter += "pathlib.Path(out).write_text('GGUF ' + sys.argv[-1])\n"
    (folder / "convert_hf_to_gguf.py").write_text("import pathlib, sys\n" + converter)
    quantizer = folder / "build/bin/llama-quantize"
    quantizer.write_text('#!/bin/sh\n{ cat "$1"; echo " $3"; } > "$2"\n')
    quantizer.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("kind", "content"), [("f16", "GGUF f16"), ("q8_0", "GGUF q8_0"), ("q4_k_m", "GGUF f16 Q4_K_M")]
)
def test_gguf_goes_through_the_converter_that_is_given(run, llama_cpp, capsys, kind, content):
    assert main(["export", "demo", "--gguf", kind, "--llama-cpp", str(llama_cpp)]) == 0
    assert str(run / f"model/demo-{kind}.gguf") in capsys.readouterr().out
    assert (run / f"model/demo-{kind}.gguf").read_text().strip() == content
    assert not [path for path in (run / "model").iterdir() if "tmp" in path.name]


def test_gguf_without_llama_cpp_says_what_is_missing_and_installs_nothing(
    run, llama_cpp, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert main(["export", "demo", "--gguf", "q8_0"]) == 1
    error = capsys.readouterr().err
    assert "convert_hf_to_gguf.py is not in the PATH. Nothing was installed" in error
    (llama_cpp / "build/bin/llama-quantize").unlink()
    assert main(["export", "demo", "--gguf", "q4_k_m", "--llama-cpp", str(llama_cpp)]) == 1
    assert f"llama-quantize is not in {llama_cpp}" in capsys.readouterr().err
    assert main(["export", "demo", "--gguf", "q8"]) == 2
    assert "did you mean 'q8_0'" in capsys.readouterr().err


def test_a_converter_that_fails_is_quoted_and_leaves_nothing(run, llama_cpp, capsys):
    (llama_cpp / "convert_hf_to_gguf.py").write_text("raise SystemExit('unknown pre-tokenizer')")
    assert main(["export", "demo", "--gguf", "f16", "--llama-cpp", str(llama_cpp)]) == 1
    assert "unknown pre-tokenizer" in capsys.readouterr().err
    assert not list((run / "model").glob("*gguf*"))


def test_the_card_says_what_the_run_recorded(run):
    card = export.model_card(run, "me/adder")
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "apache-2.0"
    report = json.loads((run / "eval/report.json").read_text())
    hashed = run.manifest()["01"]["outputs"]["data/train.parquet"]
    for said in (hashed, "| max_steps | 4 |", "numeric_correctness_reward | 1.0", "# me/adder"):
        assert said in body
    assert f"{report['greedy']['merged']['accuracy']:.4g}" in body
    assert "merged_16bit passes the parity gate" in body
    assert "## Limits" in body
    assert str(run.path.parent) not in card
    for absent in ("eval/report.json", "model/parity.json", "train/metrics.jsonl"):
        (run / absent).unlink()
    assert "## Evaluation" not in export.model_card(run)
    report["greedy"]["merged"]["accuracy_interval"] = [0.91, 0.97]
    (run / "eval/report.json").write_text(json.dumps(report))
    assert "0.91 – 0.97" in export.model_card(run)


def test_a_base_without_a_card_states_no_licence(run, tmp_path):
    shutil.copytree(project_path(TINY), tmp_path / "tiny_base")
    (tmp_path / "tiny_base/README.md").unlink()
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(TINY, str(tmp_path / "tiny_base")))
    assert "Not stated by the base: ask before you publish." in export.model_card(run)


class Hub(BaseHTTPRequestHandler):
    """What of the hub's API an upload needs."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked[self.path] = content
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.refuses:
            return self.answer({"error": "no write access"}, 403)
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "lfs" if "model.safe" in f["path"] else "regular"}
                for f in json.loads(content)["files"]
            ]
            return self.answer({"files": [f | {"shouldIgnore": False} for f in files]})
        if self.path.endswith("/objects/batch"):
            put = {"upload": {"href": f"{self.server.url}/put", "header": {}}}
            objects = [o | {"actions": put} for o in json.loads(content)["objects"]]
            return self.answer({"transfer": "basic", "objects": objects})
        commit = {"commitUrl": f"{self.server.url}/me/adder/commit/1", "commitOid": "1"}
        url = f"{self.server.url}/me/adder"
        return self.answer({"url": url, "name": "me/adder", "success": True} | commit)

    def do_PUT(self):
        self.server.stored.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({})

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """A stand-in for the hub, on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked, server.tokens, server.stored, server.refuses = {}, set(), [], False
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def call_push(run, hub, *more):
    command = [sys.executable, "-m", "grpo_nb", "push", str(run.path), "--repo", "me/adder", *more]
    known = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | known)


def test_push_tells_first_and_uploads_only_when_told_to(run, hub):
    (run / "model/demo-q8_0.gguf").write_text("GGUF")
    told = call_push(run, hub)
    assert told.returncode == 0
    for name in ("README.md", "model.safetensors  1.71 MB", "parity.json", "demo-q8_0.gguf"):
        assert name in told.stdout
    assert "Nothing was sent: add --yes" in told.stdout
    assert hub.asked == {}
    done = call_push(run, hub, "--yes")
    assert f"{hub.url}/me/adder/commit/1" in done.stdout, done.stderr
    assert b"private" in hub.asked["/api/repos/create"]
    assert hub.stored == [(run / "model/merged/model.safetensors").read_bytes()]
    lines = hub.asked["/api/models/me/adder/commit/main"].splitlines()
    sent = {line["value"].get("path") for line in map(json.loads, lines)}
    assert {"README.md", "config.json", "tokenizer.json", "figures/training.png"} <= sent
    assert hub.tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in done.stdout + done.stderr


def test_a_model_that_was_cut_short_is_not_uploaded(run, hub):
    path = run / "model/merged/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    done = call_push(run, hub, "--yes")
    assert done.returncode == 2
    assert f"{path} is not as 04_merge_and_infer wrote it" in done.stderr
    assert hub.asked == {}


def test_a_hub_that_refuses_is_quoted_without_the_token(run, hub):
    hub.refuses = True
    done = call_push(run, hub, "--yes")
    assert done.returncode == 1
    assert "the hub refused me/adder (" in done.stderr
    assert "hf_secret" not in done.stderr


def test_a_name_without_owner_is_refused(run, capsys):
    assert main(["push", "demo", "--repo", "adder"]) == 2
    assert "--repo 'adder': give OWNER/NAME" in capsys.readouterr().err


def test_another_merge_goes_beside_the_one_of_stage_04(run, capsys):
    before = run.files("model/merged")
    assert main(["export", "demo", "--merge", "merged_16bit_original_base"]) == 0
    assert "merged_16bit_original_base passes" in capsys.readouterr().out
    assert main(["export", "demo", "--merge", "adapter"]) == 0
    assert run.files("model/merged") == before
    assert main(["export", "demo", "--merge", "merged_8bit"]) == 2
    assert "did you mean 'merged_" in capsys.readouterr().err
