"""Write a merged model as GGUF for llama.cpp, Ollama and LM Studio.

    write("merged", ["q8_0", "q4_k_m"], questions)  # into merged/gguf, with a Modelfile

A file is kept only if llama.cpp answers with it as the model does.
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from grpo_nb.checks import Check, Checks
from grpo_nb.export import llama_cpp, served
from grpo_nb.files import atomic_path
from grpo_nb.models import (
    Sample,
    TransformersEngine,
    engine_of,
    load_checkpoint,
    load_tokenizer,
)
from grpo_nb.models.template import encode, render


class _RefusedError(Exception):
    """Leave the temporary folder of files that fail the gate."""


def write(
    folder: Path, kinds: Sequence[str], questions: served.Questions, *, force: bool = False
) -> Checks:
    """Write a model's GGUF files, and keep those with which llama.cpp answers as the model does.

    Args:
        folder: The merged model. Its folder `gguf` is replaced.
        kinds: Kinds of files, such as "q8_0". One in 16 bit is tested first in any case, for its
            limit is narrow, and what is wrong in it is so in the others.
        questions: What the model and each file answer.
        force: Whether to keep files that fail.

    Returns:
        A check for each file.

    Raises:
        RuntimeError: The disk has no room, or the converter does not take the model.
    """
    _refuse_without_room(folder, kinds)
    checks, files = Checks(), []
    model = load_checkpoint(str(folder), adapter=None, quantization="16bit")
    engine = engine_of(model, load_tokenizer(str(folder)))
    ours = served.answers_of(engine, questions)
    first = next((kind for kind in kinds if kind.endswith("f16")), "f16")
    with suppress(_RefusedError), atomic_path(folder / "gguf") as temporary:
        temporary.mkdir()
        for kind in dict.fromkeys([first, *kinds]):
            file = temporary / f"{folder.name}-{kind}.gguf"
            llama_cpp.run_converter(folder, file, kind)
            checks.append(test(file, kind, engine, questions, ours))
            is_sound = checks[-1].state != "stop" or force
            if is_sound and kind in kinds:
                files.append(file.name)
            else:
                file.unlink()
            if kind == first and not is_sound:
                break
        if not files:
            raise _RefusedError
        _describe(temporary, files, folder.name, checks, engine, questions)
    return checks


def test(
    file: Path,
    kind: str,
    engine: TransformersEngine,
    questions: served.Questions,
    ours: Sequence[Sample],
) -> Check:
    """Return the check of a GGUF file, which llama.cpp loads in a process of its own."""
    figures, faults = {}, faults_of(file, kind, engine)
    room = max(map(len, encode(engine.tokenizer, questions.chats))) + questions.tokens + 8
    try:
        with llama_cpp.serving(file, room) as url:
            figures = served.compare(served.server_at(url), engine, questions, ours)
    except RuntimeError as error:
        faults["file"] = str(error)
    limit = llama_cpp.TABLES["kinds"][kind]["kl"]
    return served.verdict(f"gguf {kind}", figures, limit, faults)


def faults_of(file: Path, kind: str, engine: TransformersEngine) -> dict[str, str]:
    """Return what a file itself shows to be wrong: {kind of `served.FAULTS`: evidence}."""
    import gguf

    reader, config = gguf.GGUFReader(file), engine.model.config.get_text_config()
    fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    tensors, faults = {tensor.name: tensor for tensor in reader.tensors}, {}
    own = "gpt2" if '"ByteLevel"' in engine.tokenizer.backend_tokenizer.to_str() else "llama"
    if {own, fields["ggml.model"]} == {"gpt2", "llama"}:
        faults["vocabulary"] = f"the vocabulary is of type {fields['ggml.model']!r}, not {own!r}"
    if fields["block_count"] < config.num_hidden_layers:
        faults["layers"] = f"{fields['block_count']} layers of {config.num_hidden_layers}"
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    scalings = [name for name in (*fields, *tensors) if name.startswith(("rope.scaling", "rope_"))]
    if scaling not in ("default", "dynamic") and not scalings:
        faults["rope"] = f"the scaling of positions, {scaling!r}, is not in the file"
    table, ours = tensors["token_embd.weight"], engine.model.get_input_embeddings().weight
    ours = ours[::50].detach().float().cpu()
    theirs = gguf.quants.dequantize(table.data[::50], table.tensor_type)[: len(ours)]
    distance = float((ours - ours.new_tensor(theirs)).norm() / ours.norm())
    if distance > (0.01 if kind.endswith("f16") else 0.2):
        faults["base"] = f"the weights are another model's (embeddings {distance:.0%} off)"
    return faults


def _describe(
    folder: Path,
    files: Sequence[str],
    name: str,
    checks: Sequence[Check],
    engine: TransformersEngine,
    questions: served.Questions,
) -> None:
    """Write Modelfile, for the first of the files, and README.md."""
    before, tokenizer = questions.chats[0][:-1], engine.tokenizer
    has_system = [turn["role"] for turn in before[:1]] == ["system"]
    system, worked = before[0]["content"] if has_system else "", before[has_system:]
    if any(chat[:-1] != before for chat in questions.chats):
        worked = []  # these turns are the chats' own
    ends = tokenizer.convert_ids_to_tokens(engine.stops)
    texts = {
        "file": files[0],
        "name": name,
        "template": go_template(engine, bool(system)),
        "system": f'SYSTEM """{system}"""\n' if system else "",
        "worked": "".join(f'MESSAGE {t["role"]} """{t["content"]}"""\n' for t in worked),
        "stops": "\n".join(f'PARAMETER stop "{end}"' for end in ends),
        "prompts": len(questions.chats),
        "lines": "\n".join(f"- {each.name}: {each.state}; {each.evidence}" for each in checks),
    }
    for title in ("Modelfile", "README.md"):
        text = llama_cpp.TABLES[title.lower().removesuffix(".md")].format(**texts)
        (folder / title).write_text(text, encoding="utf-8")


def go_template(engine: TransformersEngine, has_system: bool) -> str:
    """Return the chat template in Ollama's language, from what the template writes around turns.

    Args:
        engine: The model's.
        has_system: Whether every chat begins with a system prompt.
    """
    roles = ["system"] * has_system + ["user", "assistant", "user"]
    turns = [{"role": role, "content": f"TURN-{n}-"} for n, role in enumerate(roles)]
    text, tokenizer = render(engine.tokenizer, turns), engine.tokenizer
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        text = text.removeprefix(tokenizer.bos_token)  # llama.cpp adds it itself
    parts = [part.replace("{{", '{{ "{{" }}') for part in re.split(r"TURN-\d-", text)]
    system, user, answer, again, end = parts if has_system else ["", *parts]
    return (
        f'{{{{ range $i, $turn := .Messages }}}}{{{{ if eq $turn.Role "system" }}}}{system}'
        f'{{{{ else if eq $turn.Role "assistant" }}}}{answer}'
        f"{{{{ else if le $i {int(has_system)} }}}}{user}{{{{ else }}}}{again}{{{{ end }}}}"
        f"{{{{ $turn.Content }}}}{{{{ end }}}}{end}"
    )


def _refuse_without_room(folder: Path, kinds: Sequence[str]) -> None:
    """Raise RuntimeError if the disk has no room for the files."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    need, free = size * (1 + len(kinds)), shutil.disk_usage(folder).free
    if free < need:
        raise RuntimeError(
            f"the GGUF files take up to {need / 1e9:.2g} GB while they are tested, and the disk "
            f"of {folder} has {free / 1e9:.2g} GB free: free some space, or write fewer kinds"
        )
