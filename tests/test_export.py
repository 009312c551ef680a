"""Merging, the parity gate, GGUF, the model card and the hub."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from grpo_nb import export, models
from grpo_nb.__main__ import main
from grpo_nb.export import merging, parity, weights
from grpo_nb.models import checkpoint
from grpo_nb.runs import Run, project_path

TINY = "data/tiny_base"
KEY = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"
LAYER = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def trained(demo_run):
    return weights.read_adapter(demo_run / "train/adapter")


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


def test_which_layers_are_kept_in_4bit_is_as_transformers_has_it():
    from bitsandbytes.nn import Linear4bit

    live = models.load_checkpoint(TINY, adapter=None, quantization="4bit").named_modules()
    kept = {f"{name}.weight" for name, module in live if isinstance(module, Linear4bit)}
    assert len(kept) == 28
    assert weights.Base(TINY).quantizable == kept


@pytest.mark.parametrize("mode", ["merged_16bit", "merged_16bit_original_base"])
def test_tensor_by_tensor_is_what_peft_makes_in_memory_bit_for_bit(
    demo_run, trained, mode, monkeypatch
):
    from peft import PeftModel

    monkeypatch.setattr(checkpoint, "has_bf16", lambda: True)  # as the file is, on any processor
    kept = "4bit" if mode == "merged_16bit" else "16bit"
    live = models.load_checkpoint(TINY, adapter=None, quantization=kept)
    live = live.dequantize() if kept == "4bit" else live
    live = PeftModel.from_pretrained(live, demo_run / "train/adapter").merge_and_unload()
    expected = live.state_dict()
    seen = dict(weights.merged_tensors(weights.Base(TINY), trained, mode, "4bit"))
    assert set(expected) - set(seen) == {"lm_head.weight"}  # tied to the embedding
    assert [name for name in seen if not torch.equal(seen[name], expected[name])] == []


def test_the_modes_are_different_weights(trained):
    base = weights.Base(TINY)
    modes = ("merged_16bit", "merged_16bit_original_base")
    first, second = (dict(weights.merged_tensors(base, trained, m, "4bit"))[LAYER] for m in modes)
    assert not torch.equal(first, second)
    # A base trained in 16 bit is its own original.
    same = (dict(weights.merged_tensors(base, trained, m, "16bit"))[LAYER] for m in modes)
    assert torch.equal(*same)


def test_a_base_already_in_4bit_is_dequantised_from_its_own_states(trained, run, tmp_path):
    """As Unsloth's copies on the hub are."""
    live = models.load_checkpoint(TINY, adapter=None, quantization="4bit")
    live.save_pretrained(tmp_path / "tiny_base-bnb-4bit")
    base = weights.Base(str(tmp_path / "tiny_base-bnb-4bit"))
    assert len(base.packed) == 28
    plain = dict(weights.merged_tensors(weights.Base(TINY), trained, "merged_16bit", "4bit"))
    for name, tensor in weights.merged_tensors(base, trained, "merged_16bit", "4bit"):
        assert torch.equal(tensor, plain.pop(name)), name
    assert not plain
    with pytest.raises(ValueError, match=r"holds 4-bit weights, no original in 16 bit"):
        next(weights.merged_tensors(base, trained, "merged_16bit_original_base", "4bit"))
    path = run / "train/adapter/adapter_config.json"
    config = json.loads(path.read_text()) | {
        "base_model_name_or_path": "unsloth/Tiny_Base-bnb-4bit"
    }
    path.write_text(json.dumps(config))
    assert weights.trained_base(TINY, path.parent) == "unsloth/Tiny_Base-bnb-4bit"


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


MEMORY = """
import sys, threading
from pathlib import Path
from grpo_nb.export import weights

def held():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

def merge(folder):
    base = weights.Base(folder)
    q = "model.layers.0.self_attn.q_proj.weight"
    rank_1 = [weights.torch.ones(base.read(q, False).shape[i], 1) for i in (1, 0)]
    delta = weights.Delta(rank_1[0].T, rank_1[1], 1e-3)
    tensors = weights.merged_tensors(base, {q: delta}, "merged_16bit", "4bit")
    out = Path(sys.argv[3])
    out.mkdir(exist_ok=True)
    weights.write_shards(tensors, out, 8e6)

def watch():
    while not done.wait(0.001):
        seen.append(held())

import torch
weights.torch = torch
merge(sys.argv[1])  # imports and first uses
before, seen, done = held(), [], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
merge(sys.argv[2])
done.set()
thread.join()
print(max(seen) - before)
"""


def test_memory_is_a_shard_and_a_tensor_however_large_the_model(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(project_path(TINY))
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 32}
    config.update(sizes | {"layer_types": ["full_attention"] * 32, "head_dim": 32})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "large", max_shard_size="40MB")
    size = 2 * model.num_parameters()
    assert size > 1e8
    places = [project_path(TINY), tmp_path / "large", tmp_path / "out"]
    command = [sys.executable, "-c", MEMORY, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(size, done.stdout)
    assert int(done.stdout) < 0.4 * size
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) >= 14


def test_the_gate_of_stage_04_has_passed(demo_run):
    report = json.loads((demo_run / "model/parity.json").read_text())
    assert (report["passed"], report["mode"], report["forced"]) == (True, "merged_16bit", False)
    assert report["token_agreement"] >= 0.995
    assert report["kl"] < 1e-3
    assert report["layers"] == {"compared": 50, "differ": []}
    assert report["adapter"]["norm of B"] > 0
    assert report["adapter"]["still as begun"] == []
    assert report["prompts"] == 32 < report["tokens"]


def test_a_dropped_delta_is_caught_named_and_not_put_in_place(run, monkeypatch, trained):
    before = run.files("model/merged")
    write = merging.write_shards

    def faulty(tensors, *arguments):
        base = weights.Base(TINY)
        write(((n, base.read(n, True) if n == LAYER else t) for n, t in tensors), *arguments)

    monkeypatch.setattr(merging, "write_shards", faulty)
    with pytest.raises(ValueError, match=rf"1 layers: {LAYER}.* is not put in place"):
        export.merge(run, run.config())
    assert run.files("model/merged") == before
    assert sorted(p.name for p in (run / "model").iterdir()) == ["merged", "parity.json"]
    report = json.loads((run / "model/parity.json").read_text())
    assert (report["passed"], report["layers"]["differ"]) == (False, [LAYER])
    _, report = export.merge(run, run.config(), force=True)
    assert (report["passed"], report["forced"]) == (False, True)
    assert run.files("model/merged") != before


def test_another_policy_with_sound_layers_fails_on_behaviour(run, trained):
    """The gate does not rest on the layers alone: a base of other weights shows in the KL."""
    seen = {"kl": 0.5, "token_agreement": 0.8}
    first, second, cause = parity.verdict("merged_16bit", seen, [])
    assert (first, second) == ("KL 0.5 > 0.001", "greedy token agreement 80.00% < 99.5%")
    assert "the base is not the one trained on" in cause
    assert parity.verdict("merged_16bit", {"kl": float("nan"), "token_agreement": 1.0}, [])


def test_4bit_and_adapter_alone(run):
    folder, report = export.merge(run, run.config(), "merged_4bit", target="model/merged_4bit")
    assert report["mode"] == "merged_4bit"
    assert json.loads((run / "model/merged_4bit.json").read_text()) == report
    size = (folder / "model.safetensors").stat().st_size
    assert size < 0.5 * (run / "model/merged/model.safetensors").stat().st_size
    read = models.load_checkpoint(str(folder), adapter=None, quantization="16bit")
    assert read.is_loaded_in_4bit
    adapter = export.copy_adapter(run, run.config())
    assert (adapter / "adapter_model.safetensors").exists()


def test_leftovers_of_a_killed_merge_are_removed(run):
    left = run / "model/.merged.99999.tmp"
    left.mkdir()
    (left / "shard-0").write_bytes(b"half")
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
        (other_name, r"1 weights that the base .* not have, such as model.layers.9.self_attn.q"),
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
    assert "it passed the parity gate" in body
    assert "## Limits" in body
    assert str(run.path.parent) not in card
    for absent in ("eval/report.json", "model/parity.json", "train/metrics.jsonl"):
        (run / absent).unlink()
    assert "## Evaluation" not in export.model_card(run)
    report["greedy"]["merged"]["accuracy_interval"] = [0.91, 0.97]
    (run / "eval/report.json").write_text(json.dumps(report))
    assert "0.91 – 0.97" in export.model_card(run)


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
