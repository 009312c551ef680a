"""GGUF files, as llama.cpp itself reads them."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gguf as library
import pytest
import torch
from families import CHATML, GEMMA, LLAMA3
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo_nb
from grpo_nb import models
from grpo_nb.export import gguf, llama_cpp, served
from grpo_nb.files import project_path, read_lines
from grpo_nb.rewards.prompts import build_prompt

BASE = "data/task_base"
SMOLLM2 = project_path(".venv/smollm2")
WORDS = [row["question"] for row in read_lines(project_path("data/word_problems.jsonl"))]
# Half of them with what programs split differently between their words.
ODD = ["  ", "\n\n\n", "\t", "'ll ", " 12345 ", "…", "é", " дело ", "東京", "🙂", "}}", "_", "\r\n"]
TEXTS = [
    *WORDS[:250],
    *(text.replace(" ", ODD[n % len(ODD)], 1 + n % 5) for n, text in enumerate(WORDS[250:500])),
]
CHATS = [build_prompt(text) for text in WORDS[500:503]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
SIZES |= {"max_position_embeddings": 1024, "head_dim": 64}
SCALING = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
SCALING |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def byte_level(steps, *specials, bos="", **model):
    """A tokenizer of 700 tokens that is trained on word problems and splits as a family does."""
    backend = Tokenizer(kinds.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(specials), initial_alphabet=alphabet
    )
    backend.train_from_iterator(TEXTS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def split_by(name):
    [expression] = [name for name in llama_cpp.TABLES["splits"][name] if name != "ByteLevel"]
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return [split, pre_tokenizers.ByteLevel(False, use_regex=False)]


def save(folder, tokenizer, model_type, seed=0, **settings):
    """Save a random model of a family with its tokenizer, as a merge does."""
    end = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    ids = {"eos_token_id": end, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **SIZES | settings, **ids, vocab_size=len(tokenizer))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)  # sharper choices than those of transformers' first weights
    model.save_pretrained(folder)
    models.save_tokenizer(tokenizer, folder)
    return folder


def llama3(folder, **settings):
    """With a token at the start, scaled positions, and an end of turn that only the file tells."""
    specials = ("<|pad|>", "<|begin|>", "<|close|>", "<|start_header_id|>", "<|end_header_id|>")
    backend = byte_level(split_by("llama-bpe"), *specials, bos="<|begin|>", ignore_merges=True)
    template = LLAMA3.replace("<|eot_id|>", "<|close|>")
    names = {"bos_token": "<|begin|>", "eos_token": "<|close|>", "pad_token": "<|pad|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)
    return save(folder, tokenizer, "llama", rope_parameters=SCALING, **settings)


def gemma2(folder):
    """With a SentencePiece model, from which transformers and the converter take the vocabulary."""
    import sentencepiece

    source = folder.with_name("sentencepiece")
    source.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(source / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        eos_piece="<eos>",
        bos_piece="<bos>",
        pad_piece="<pad>",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
        allow_whitespace_only_pieces=True,
    )
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    (source / "config.json").write_text('{"model_type": "gemma2"}')
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.eos_token, tokenizer.chat_template = "<end_of_turn>", "{{ bos_token }}" + GEMMA
    save(folder, tokenizer, "gemma2", query_pre_attn_scalar=64, sliding_window=256)
    models.save_tokenizer(tokenizer, folder, str(source))
    return folder


FAMILIES = {"llama": llama3, "gemma2": gemma2, "SmolLM2": lambda _: SMOLLM2}


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_tokenizes_500_texts_as_the_merged_folder_does(family, tmp_path):
    folder = FAMILIES[family](tmp_path / "merged")
    file = tmp_path / "model.gguf"
    llama_cpp.run_converter(folder, file, "f16")
    tokenizer = models.load_tokenizer(str(folder))
    ours = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    with llama_cpp.serving(file, 512) as url:
        server = served.server_at(url)
        theirs = [server.text_ids(text) for text in TEXTS]
        assert server.prompt_ids(CHATS[0]) == models.template.encode(tokenizer, CHATS[:1])[0]
    wrong = [text for text, left, right in zip(TEXTS, ours, theirs, strict=True) if left != right]
    assert len(TEXTS) == 500 and wrong == []


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A model that has answered, and its file as the converter writes it."""
    folder = tmp_path_factory.mktemp("llama")
    llama3(folder / "merged")
    llama_cpp.run_converter(folder / "merged", folder / "sound.gguf", "f16")
    return served.model_of(folder / "merged", served.Questions(CHATS, 12)), folder / "sound.gguf"


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """The file of another model of the same family."""
    folder = tmp_path_factory.mktemp("another")
    llama3(folder / "merged", seed=1)
    llama_cpp.run_converter(folder / "merged", folder / "another.gguf", "f16")
    return folder / "another.gguf"


def rewrite(source, file, changes=None, without=(), values=lambda tensor: tensor.data):
    """Copy a GGUF file with other fields, without some tensors, or with other weights."""
    reader, changes = library.GGUFReader(source), changes or {}
    writer = library.GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            part = field.types[-1] if len(field.types) > 1 else None
            value = changes.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], part)
    for tensor in reader.tensors:
        if not any(part in tensor.name for part in without):
            writer.add_tensor(tensor.name, values(tensor))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return file


def halved(tensor):
    return tensor.data / 2 if "blk.1.ffn_down" in tensor.name else tensor.data


FAULTS = {
    "another vocabulary type": (
        {"changes": {"tokenizer.ggml.model": "llama"}},
        "^the vocabulary is of type 'llama', not 'gpt2'",
    ),
    "another pre-tokenizer": (
        {"changes": {"tokenizer.ggml.pre": "smollm"}},
        r"^\d texts are split into other tokens",
    ),
    "specials as text": (
        {"changes": {"tokenizer.ggml.token_type": [1] * 700}},
        "^5 special tokens are no single token",
    ),
    "no end of turn": ({"changes": {"tokenizer.ggml.eos_token_id": 0}}, "^1 tokens that end an"),
    "another template": (
        {"changes": {"tokenizer.chat_template": CHATML}},
        "^3 prompts are rendered by another chat template",
    ),
    "a layer dropped": (
        {"changes": {"llama.block_count": 2}, "without": ["blk.2."]},
        "^2 layers of 3",
    ),
    "scaling lost": ({"without": ["rope_freqs"]}, "^the scaling of positions, 'llama3', is not in"),
    "a tensor missing": ({"without": ["blk.1.ffn_down"]}, "^llama.cpp cannot load it: "),
    "wrong weights": ({"values": halved}, "^the weights differ; greedy answers equal "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_file_is_caught_and_named(sound, tmp_path, fault):
    change, evidence = FAULTS[fault]
    model, file = sound
    check = gguf.test(rewrite(file, tmp_path / "model.gguf", **change), "f16", model)
    assert check.state == "stop" and check.fix
    assert re.search(evidence, check.evidence), check


def test_a_sound_file_passes_and_another_models_weights_do_not(sound, another):
    model, file = sound
    questions = model.questions._replace(score=lambda texts: len(texts) / 4)
    check = gguf.test(file, "f16", model._replace(questions=questions))
    assert check.state == "ok", check
    assert "greedy answers equal 3 of 3, KL " in check.evidence
    assert check.evidence.endswith("reward 0.75 (the model 0.75)")
    check = gguf.test(another, "f16", model)
    assert check.evidence.startswith("the weights differ; greedy") and "another" in check.fix


@pytest.fixture
def adapter(tmp_path):
    """An adapter of noise on the tiny model of tasks, whose tokenizer splits as Qwen's."""
    from test_export import noise_adapter

    return noise_adapter(BASE, tmp_path / "adapter", 0.02)


@pytest.mark.parametrize(
    ("reward", "equal", "state"),
    [(1.2, 5, "ok"), (1.16, 5, "ok"), (0.9, 5, "warning"), (0.9, 6, "ok")],
)
def test_a_file_that_answers_worse_is_kept_with_a_warning(reward, equal, state):
    """One or two answers that differ are chance."""
    figures = {"prompts": 8, "equal": equal, "kl": 0.1, "tokens": 90, "score": 1.2}
    check = served.verdict("gguf q4_k_m", figures | {"score_served": reward}, limit=0.25)
    assert check.state == state and ("q8_0" in check.fix) == (state == "warning")


def test_a_merge_with_gguf_leaves_tested_files_and_all_that_other_programs_need(adapter, tmp_path):
    user, answer = {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}
    chats = [{"prompt": [chat[0], user, answer, *chat[1:]]} for chat in CHATS]
    to = tmp_path / "merged"
    options = {"load_in_4bit": True, "max_completion_length": 12}
    grpo_nb.merge(BASE, adapter, to, chats, gguf="q8_0, q4_k_m", **options)
    assert {path.name for path in (to / "gguf").iterdir()} == {
        *("merged-q8_0.gguf", "merged-q4_k_m.gguf"),
        "Modelfile",
    }
    kinds = [library.GGUFReader(to / f"gguf/merged-{kind}.gguf") for kind in ("q8_0", "q4_k_m")]
    assert [kind.fields["general.file_type"].contents() for kind in kinds] == [7, 15]
    assert {"Q5_0", "Q8_0"} == {
        tensor.tensor_type.name
        for tensor in kinds[1].tensors
        if ".attn_" in tensor.name and "norm" not in tensor.name and "bias" not in tensor.name
    }
    modelfile = (to / "gguf/Modelfile").read_text()
    assert modelfile.startswith("FROM ./merged-q8_0.gguf\n")
    system = f'SYSTEM """{CHATS[0][0]["content"]}"""\n'
    worked = 'MESSAGE user """1 + 1"""\nMESSAGE assistant """2"""\n'
    assert f'{system}{worked}PARAMETER stop "<|im_end|>"\n' in modelfile


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """The tiny model of tasks, whose tokenizer splits as Qwen's, as a merge leaves it."""
    folder = tmp_path_factory.mktemp("model") / "merged"
    shutil.copytree(project_path(BASE), folder)
    return folder


def test_what_cannot_be_written_is_one_sentence_and_leaves_no_file(merged, tmp_path):
    folder = shutil.copytree(merged, tmp_path / "merged")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Unheard0fForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(folder.iterdir())
    message = r"^llama\.cpp's converter does not take .*Unheard0f.* serve it with"
    with pytest.raises(RuntimeError, match=message) as error:
        gguf.write(folder, ["q8_0"], served.Questions(CHATS, 4))
    assert "\n" not in str(error.value) and sorted(folder.iterdir()) == before


def test_an_unknown_kind_is_named_before_anything_is_merged():
    with pytest.raises(ValueError, match=r"unknown kind of GGUF file 'q4_k'.*q4_k_m"):
        grpo_nb.merge("no-base", "no-adapter", "nowhere", load_in_4bit=True, gguf="q4_k")


@pytest.fixture(scope="module")
def server(merged, tmp_path_factory):
    """transformers' own server of the folder, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [str(Path(sys.executable).with_name("transformers")), "serve", "--port", str(port)]
    log = (tmp_path_factory.mktemp("server") / "log").open("w+")
    process = subprocess.Popen([*line, str(merged)], stdout=log, stderr=log)
    for _ in range(1200):
        with suppress(ValueError):
            yield served.server_at(f"http://127.0.0.1:{port}/v1")
            break
        assert process.poll() is None, log.seek(0) or log.read()
        time.sleep(0.1)
    process.kill()
    process.wait()


def test_a_server_that_tells_nothing_but_answers_is_judged_by_them(server, merged, sound):
    assert type(server) is served.Server
    rows = read_lines(project_path("data/tasks/json_extraction.jsonl"))[:8]
    chats = [build_prompt(row["question"], "Answer with one JSON object.") for row in rows]
    other = sound[1].with_name("merged")
    for folder, state in ((merged, "ok"), (other, "stop")):
        model = served.model_of(folder, served.Questions(chats, 12))
        check = served.verdict("served", served.compare(server, model))
        assert check.state == state, check
    assert check.evidence.startswith("the weights differ; greedy answers equal 0 of 8")
