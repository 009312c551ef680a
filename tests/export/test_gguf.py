"""GGUF files and servers: what llama.cpp and transformers serve make of a model."""

import json
import re
import shutil
import subprocess
import time
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import forked
import gguf as library
import httpx
import pytest
import tokenizers
import torch
from conftest import moved
from families import CHATML, GEMMA, LLAMA3, SPECIAL
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import grpo_nb
from grpo_nb import models
from grpo_nb.export import gate, gguf
from grpo_nb.files import project_path, read_lines
from grpo_nb.models.template import add_defaults, render
from grpo_nb.rewards.prompts import build_prompt

BASE = "data/task_base"
SMOLLM2 = project_path(".venv/smollm2")
WORDS = [row["question"] for row in read_lines(project_path("data/word_problems.jsonl"))]
# With what programs split differently between their words.
ODD = ["  ", "\n\n\n", "\t", "'ll ", " 12345 ", "…", "é", " дело ", "東京", "🙂", "}}", "_", "\r\n"]
TEXTS = [text.replace(" ", ODD[n % len(ODD)], 1 + n % 5) for n, text in enumerate(WORDS[:26])]
ROWS = read_lines(project_path("data/tasks/json_extraction.jsonl"))[:6]
CHATS = [build_prompt(row["question"], "Answer with one JSON object.") for row in ROWS]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}


def save(model_type, settings, tokenizer, folder, base=""):
    """Save a random model, and its tokenizer."""
    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    models.save_tokenizer(tokenizer, folder, base)
    return folder


def gemma2(folder):
    """With a SentencePiece model, from which transformers and the converter take the vocabulary."""
    import sentencepiece

    source = folder.with_name("sentencepiece")
    source.mkdir(parents=True)
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    pieces = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
    pieces |= {"user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"]}
    splits = {"byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True}
    splits |= {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(source / "tokenizer"),
        **{"model_type": "bpe", "vocab_size": 700, "normalization_rule_name": "identity"},
        **{"minloglevel": 2, **ids, **pieces, **splits},
    )
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    (source / "config.json").write_text('{"model_type": "gemma2"}')
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.eos_token, tokenizer.chat_template = "<end_of_turn>", "{{ bos_token }}" + GEMMA
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": 2, "pad_token_id": 0}
    ids |= {"vocab_size": len(tokenizer), "sliding_window": 256, "query_pre_attn_scalar": 64}
    return save("gemma2", ids, tokenizer, folder, str(source))


def byte_level(folder, model_type, template, *steps, **options):
    """With a vocabulary of its own of bytes and what they merge to, within words by these steps."""
    end, *others = SPECIAL[template]
    own = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    own.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<pad>", "<bos>", end, *others],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(TEXTS, trainer)
    if "{{ bos_token }}" in template:
        begin = tokenizers.processors.TemplateProcessing("<bos> $A", None, [("<bos>", 1)])
        own.post_processor = begin
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": end}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, chat_template=template, **names)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    return save(model_type, ids, tokenizer, folder)


WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
IN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# As their tokenizer.json has them.
LLAMA3_WORDS, QWEN_WORDS = (
    tokenizers.Regex(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
EMPTY = "{% if enable_thinking is false %}<think></think>{% endif %}"
NOT_THINKING = add_defaults(CHATML + EMPTY, {"enable_thinking": False})
SPECIAL[NOT_THINKING] = SPECIAL[CHATML]
FAMILIES = {
    "llama": ("llama", LLAMA3, pre_tokenizers.Split(LLAMA3_WORDS, "isolated"), IN_BYTES),
    "smollm2": ("llama", CHATML, pre_tokenizers.Digits(individual_digits=True), WHOLE),
    # With a default that Python's callers leave out, and llama.cpp's server does not.
    "qwen3": ("qwen3", NOT_THINKING, pre_tokenizers.Split(QWEN_WORDS, "isolated"), IN_BYTES),
}


def folder_of(family, parent):
    """A merged model: gemma2, the real SmolLM2, or one of FAMILIES."""
    if family == "gemma2":
        return gemma2(parent / "merged")
    if family in FAMILIES:
        return byte_level(parent / "merged", *FAMILIES[family], ignore_merges=family == "llama")
    if not (SMOLLM2 / "config.json").is_file():
        pytest.skip("no .venv/smollm2: make .venv/smollm2/config.json")
    return SMOLLM2


@pytest.mark.parametrize("family", ["gemma2", *FAMILIES, "SmolLM2"])
def test_llama_cpp_tokenizes_odd_texts_as_the_merged_folder_does(family, tmp_path):
    folder = folder_of(family, tmp_path)
    # What is odd stands at the beginning of each text.
    chats = [build_prompt("".join(text[:30] for text in TEXTS[n : n + 13])) for n in (0, 13)]
    model = gate.model_of(folder, gate.Questions(chats, 2))
    gguf.convert(folder, tmp_path / "model.gguf", "f16")
    assert "tokenizer.ggml.add_bos_token" in library.GGUFReader(tmp_path / "model.gguf").fields
    tokenizer, texts = model[0].tokenizer, [*TEXTS, *WORDS[: 500 - len(TEXTS)]]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert not any(gguf.faults_of(tmp_path / "model.gguf", model[0]).values())
    with gguf.serving(tmp_path / "model.gguf", 512) as url:
        figures, server = gate.served(url, model, 0.01), gate.Server(url)
        assert [server.ids(text) for text in texts] == ids
    assert (figures["texts"], figures["chats"]) == (0, 0)
    assert gate.verdict("f16", figures).state == "ok", figures


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """The tiny model of tasks, with scaled positions, and an end of turn that its folder tells."""
    folder = shutil.copytree(project_path(BASE), tmp_path_factory.mktemp("model") / "merged")
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<|im_end|>", "<|close|>")
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 1.001}
    config["rope_parameters"]["original_max_position_embeddings"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def sound(merged):
    """The model that has answered, and its file as the converter writes it."""
    gguf.convert(merged, merged.with_name("sound.gguf"), "f16")
    return gate.model_of(merged, gate.Questions(CHATS, 40)), merged.with_name("sound.gguf")


def rewrite(source, file, changes):
    """Copy a GGUF file with other fields and weights; without what begins with a name for None."""
    reader, writer = library.GGUFReader(source), library.GGUFWriter(file, "qwen2")
    without = tuple(name for name, value in changes.items() if value is None)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", *without)):
            part = field.types[-1] if len(field.types) > 1 else None
            value = changes.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], part)
    for tensor in reader.tensors:
        if not tensor.name.startswith(without):
            change = changes.get(tensor.name, lambda data: data)
            writer.add_tensor(tensor.name, change(tensor.data))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return file


# Weights of the same size, and other ones.
OTHERS = dict.fromkeys(
    [f"blk.{n}.ffn_down.weight" for n in range(4)], lambda data: data[::-1].copy()
)
FIELD = "tokenizer.ggml"
FAULTS = [
    ({f"{FIELD}.model": "llama"}, "^the vocabulary is of type 'llama'"),
    ({f"{FIELD}.pre": "smollm"}, r"^\d texts or special tokens are split into other tokens"),
    ({f"{FIELD}.token_type": [1] * 832}, r"^\d texts or special tokens"),  # specials are text
    ({f"{FIELD}.eos_token_id": 0}, "^6 answers run on where"),
    ({"tokenizer.chat_template": CHATML}, "^6 prompts are rendered by another chat template"),
    ({"qwen2.block_count": 3, "blk.3.": None}, "^3 layers alone"),
    ({"qwen2.rope.scaling": None}, "^the scaling of positions, 'yarn', is"),
    ({"blk.1.ffn_down": None}, "^llama.cpp cannot load it: "),
    (OTHERS, "^the weights differ; greedy answers equal "),
]


@pytest.mark.parametrize(("changes", "evidence"), FAULTS)
def test_a_fault_in_a_file_is_caught_and_named(sound, tmp_path, changes, evidence):
    model, file = sound
    figures = gguf.compare(rewrite(file, tmp_path / "model.gguf", changes), "f16", model)
    check = gate.verdict("gguf f16", figures)
    assert check.state == "stop" and check.fix
    assert re.search(evidence, check.evidence), check


def test_a_sound_file_passes_and_says_what_was_compared(sound):
    (engine, questions, answers), file = sound
    questions = questions._replace(score=lambda texts: len(texts) / 4)
    check = gate.verdict("gguf f16", gguf.compare(file, "f16", (engine, questions, answers)))
    assert check.state == "ok", check
    assert "greedy answers equal 6 of 6, KL " in check.evidence
    assert check.evidence.endswith("reward 1.5 (the model 1.5)")


@pytest.mark.parametrize(("count", "state"), [(2, "ok"), (3, "warning")])
def test_a_server_that_answers_worse_is_a_warning(sound, monkeypatch, count, state):
    """One or two answers that differ are chance."""
    (engine, questions, answers), _ = sound
    questions = questions._replace(score=lambda texts: texts.count("right"))
    texts = ["wrong"] * count + ["right"] * (6 - count)
    replies = [(models.Sample(text, 0, False), 0, []) for text in texts]
    server = Mock(ids=Mock(return_value=[]), reply=Mock(side_effect=replies))
    monkeypatch.setattr(gate, "Server", lambda url: server)
    ours = [one._replace(text="right") for one in answers]
    check = gate.verdict("served", gate.served("", (engine, questions, ours)))
    assert check.state == state and ("q8_0" in check.fix) == (state == "warning"), check


def test_ids_are_read_as_llama_cpp_and_vllm_write_them():
    entries = [{"id": 5, "token": "a"}, {"token": "token_id:7"}, {"token": "a"}]
    assert [gate._id(entry) for entry in entries] == [5, 7, -1]


def test_a_web_page_is_no_server_of_a_model(monkeypatch):
    page = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=page))
    with pytest.raises(ValueError, match=r"no server answers at http://here .*: start it first"):
        gate.Server("http://here")


def test_a_merge_with_gguf_leaves_tested_files_and_all_that_other_programs_need(tmp_path):
    run, to = moved(tmp_path / "runs", 0.02, {"model.model_name": BASE}), tmp_path / "merged"
    options = {"load_in_4bit": True, "max_completion_length": 12}
    user, answer = {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}
    chats = [{"prompt": [chat[0], user, answer, *chat[1:]]} for chat in CHATS]
    grpo_nb.merge(BASE, run / "train/adapter", to, chats, gguf="q8_0", **options)
    assert {path.name for path in (to / "gguf").iterdir()} == {"merged-q8_0.gguf", "Modelfile"}
    modelfile = (to / "gguf/Modelfile").read_text()
    assert modelfile.startswith("FROM ./merged-q8_0.gguf\n")
    system = f'SYSTEM """{CHATS[0][0]["content"]}"""\n'
    worked = 'MESSAGE user """1 + 1"""\nMESSAGE assistant """2"""\n'
    assert f'{system}{worked}PARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 4096\n' in modelfile
    assert 'eq $turn.Role "system" }}<|im_start|>system\n{{ else' in modelfile


def as_ollama(template, turns):
    """What Ollama makes of a template as ours are, read from its branches."""
    branches = re.findall(r"(?:if|else if) (.*?) }}(.*?)(?={{ (?:else|end))", template, re.DOTALL)
    other = re.search(r"{{ else }}(.*?){{ end }}{{ \$turn.Content }}", template, re.DOTALL)[1]
    text = ""
    for place, turn in enumerate(turns):
        holds = {f'eq $turn.Role "{turn["role"]}"', f"eq $i {place}"}
        text += next((part for rule, part in branches if rule in holds), other) + turn["content"]
    return text + template.rpartition("{{ end }}")[2]


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3", "SmolLM2"])
def test_a_modelfile_renders_every_chat_as_the_model_does(family, tmp_path):
    """SmolLM2's template has a system prompt of its own, and Gemma's has no place for one."""
    folder = folder_of(family, tmp_path)
    tokenizer = models.load_tokenizer(str(folder))
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    for chat in (turns[:2], turns[1:2], turns, turns[1:]):
        text = as_ollama(gguf._template(tokenizer), chat)
        assert text.removeprefix("<bos>") == render(tokenizer, chat).removeprefix("<bos>")


@pytest.mark.parametrize(("system", "states"), [("Be\xa0brief.", ["warning"]), ("Be\nso.", [])])
def test_what_ollama_would_drop_of_a_prompt_is_named(sound, tmp_path, system, states):
    (engine, *_), _ = sound
    questions = gate.Questions([[{"role": "system", "content": system}, *CHATS[0][1:]]], 4)
    checks = gguf.write_modelfile(tmp_path / "model.gguf", (engine, questions, []))
    assert [check.state for check in checks] == states


def test_weights_are_packed_into_few_bits(tmp_path):
    """Rows that are no multiple of 256 stay in 8 bit."""
    folder = shutil.copytree(project_path(BASE), tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.hidden_size, config.num_hidden_layers = 256, 1
    config.layer_types = ["full_attention"]
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    gguf.convert(folder, tmp_path / "model.gguf", "q4_k_m")
    reader = library.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.file_type"].contents() == 15
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    expected = {"attn_q": "Q4_K", "attn_v": "Q6_K", "ffn_up": "Q4_K", "ffn_down": "Q8_0"}
    assert {name: types[f"blk.0.{name}.weight"] for name in expected} == expected
    assert types["token_embd.weight"] == "Q6_K"


def test_what_cannot_be_written_is_named_and_leaves_no_file(merged, tmp_path):
    folder = shutil.copytree(merged, tmp_path / "merged")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Unheard0fForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(folder.iterdir())
    why = r"does not take .*merged \(Architecture 'Unheard0f.*: serve it with vLLM, or .*: pip in"
    with pytest.raises(RuntimeError, match=why):
        gguf.write(folder, ["q8_0"], gate.Questions(CHATS, 4))
    assert sorted(folder.iterdir()) == before


def test_words_split_in_a_way_without_a_name_are_refused():
    tokenizer = AutoTokenizer.from_pretrained(project_path(BASE))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    unknown = Mock(side_effect=NotImplementedError)
    with pytest.raises(NotImplementedError, match="no name for how the tokenizer splits"):
        gguf.split_of(tokenizer, unknown)


def test_an_unknown_kind_is_named_before_anything_is_merged():
    with pytest.raises(ValueError, match=r"unknown kind of GGUF file 'q4_k'.*q4_k_m"):
        grpo_nb.merge("no-base", "no-adapter", "nowhere", load_in_4bit=True, gguf="q4_k")


@pytest.fixture
def server(tmp_path, port, forks):
    """The URL of transformers' own server of the folder, in a process of its own."""
    script = tmp_path / "serve.py"
    script.write_text("from transformers.cli.transformers import main; main()")
    line = [*forked.python(), str(script), "serve", "--port", str(port), str(project_path(BASE))]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)
        for _ in range(1200):
            with suppress(ValueError):
                gate.Server(f"http://127.0.0.1:{port}/v1")
                yield f"http://127.0.0.1:{port}/v1"
                break
            assert process.poll() is None, log.seek(0) or log.read()
            time.sleep(0.1)
        process.kill()
        process.wait()


def test_a_server_that_tells_nothing_but_answers_is_judged_by_them(server):
    model = gate.model_of(project_path(BASE), gate.Questions(CHATS, 40))
    figures = gate.served(server, model)
    assert figures["kl"] is None and gate.verdict("served", figures).state == "ok", figures
    others = [answer._replace(text="no") for answer in model[2]]
    check = gate.verdict("served", gate.served(server, (*model[:2], others)))
    assert check.evidence.startswith("the weights differ; greedy answers equal 0 of 6")
    with pytest.raises(ValueError, match=r"no server answers at .*: start it first"):
        gate.Server("http://127.0.0.1:1")
