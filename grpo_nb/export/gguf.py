"""Write a merged model as GGUF for llama.cpp, Ollama and LM Studio, and keep only what is the same.

write("merged", ["q8_0", "q4_k_m"], chats)      # merged/gguf/merged-q8_0.gguf, Modelfile, README.md
"""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.checks import Check, Checks
from grpo_nb.export import llama_cpp, served
from grpo_nb.files import atomic_path, read_json
from grpo_nb.models import load_checkpoint, load_tokenizer
from grpo_nb.models.template import encode, fold_system, render
from grpo_nb.models.vision import read_config
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Mean KL per token [nats], file to model, at most; sound files of SmolLM2 had a third of it.
KL = {"f16": 0.01, "bf16": 0.01, "q8_0": 0.02, "q6_k": 0.05, "q5_k_m": 0.1, "q4_k_m": 0.25}
MODELFILE = '''FROM ./{file}
TEMPLATE """{template}"""
{system}{stops}
# Greedy, as the file was tested; Ollama's own default punishes repetition.
PARAMETER temperature 0
PARAMETER repeat_penalty 1
'''
README = """Tested against the model that they were made from, on {prompts} held-out prompts:

{lines}

    llama-server -m {file} --jinja        # llama.cpp
    ollama create {name} -f Modelfile     # Ollama, then: ollama run {name}
    lms import {file}                     # LM Studio
"""


def kinds_of(gguf: str | Sequence[str]) -> list[str]:
    """Return the kinds of files in "q8_0, q4_k_m", or in a list; refuse what cannot be written.

    Raises:
        ValueError: A kind is unknown.
        RuntimeError: A package is missing.
    """
    names = gguf.split(",") if isinstance(gguf, str) else gguf
    kinds = [name.strip().lower() for name in names if name.strip()]
    for kind in kinds:
        refuse_unknown("kind of GGUF file", kind, list(KL))
    if kinds:
        llama_cpp.require()
    return kinds


def write(
    folder: Path,
    kinds: Sequence[str],
    chats: Sequence[list[Message]],
    *,
    max_completion_length: int = 64,
    score: Callable[[list[str]], float] | None = None,
    force: bool = False,
) -> Checks:
    """Write a model's GGUF files, and keep those with which llama.cpp answers as the model does.

    Args:
        folder: The merged model. Its folder `gguf` is replaced.
        kinds: Kinds of files, such as "q8_0". A file in 16 bit is tested first in any case, for
            its limit is narrow; what it gets wrong, the smaller ones get wrong, too.
        chats: Held-out prompts.
        max_completion_length: Length of the answers that are compared [tokens].
        score: Returns the mean reward of one answer to each chat.
        force: Whether to keep files that fail.

    Returns:
        A check for each file.

    Raises:
        RuntimeError: The disk has no room, or the converter does not take the model.
    """
    _refuse_without_room(folder, kinds)
    checks, tokenizer = Checks(), load_tokenizer(str(folder))
    model = load_checkpoint(str(folder), adapter=None, quantization="16bit")
    whole = [kind for kind in kinds if kind.endswith("f16")] or ["f16"]
    kept = []
    with atomic_path(folder / "gguf") as temporary:
        temporary.mkdir()
        for kind in dict.fromkeys([*whole, *kinds]):
            file = temporary / f"{folder.name}-{kind}.gguf"
            llama_cpp.run_converter(folder, file, kind)
            checks.append(
                test(file, kind, model, tokenizer, chats, max_completion_length, score)
            )
            is_kept = kind in kinds and (force or checks[-1].state == "ok")
            kept += [file.name] if is_kept else []
            if not is_kept:
                file.unlink()
            if checks[-1].state != "ok" and not force and kind in whole:
                break
        if not kept:
            shutil.rmtree(temporary)
            return checks
        ends = tokenizer.convert_ids_to_tokens(served.ends_of(model))
        _describe(temporary, kept, folder.name, checks, tokenizer, chats, ends)
    return checks


def test(
    file: Path,
    kind: str,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[list[Message]],
    max_completion_length: int = 64,
    score: Callable[[list[str]], float] | None = None,
) -> Check:
    """Return the check of a GGUF file, which llama.cpp loads in a process of its own."""
    name, figures, facts = f"gguf {kind}", {}, wrong(file, kind, model, tokenizer)
    room = max(map(len, encode(tokenizer, chats))) + max_completion_length + 8
    try:
        with llama_cpp.serving(file, room) as url:
            figures = served.compare(
                served.server_at(url), model, tokenizer, chats, max_completion_length, score
            )
    except RuntimeError as error:
        facts["file"] = str(error)
    return served.verdict(name, figures, KL[kind], **facts)


def wrong(
    file: Path, kind: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, str]:
    """Return what a file itself shows to be wrong: {kind of `served.FAULTS`: evidence}."""
    import gguf

    reader, config = gguf.GGUFReader(file), model.config.get_text_config()
    held = {key.partition(".")[2]: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    content = tokenizer.backend_tokenizer.to_str()
    own, theirs = "gpt2" if '"ByteLevel"' in content else "llama", held["ggml.model"]
    facts = {}
    if {own, theirs} == {"gpt2", "llama"}:
        facts["vocabulary"] = f"the vocabulary is of type {theirs!r}, not {own!r}"
    if held["block_count"] < config.num_hidden_layers:
        facts["layers"] = f"{held['block_count']} layers of {config.num_hidden_layers}"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    scaled = {name for name in (*held, *tensors) if name.startswith("rope") and name != "rope.freq_base" and name != "rope.dimension_count"}
    if rope not in ("default", "dynamic") and not scaled:
        facts["rope"] = f"rope_type {rope!r} of the positions is not in the file"
    embedding = tensors["token_embd.weight"]
    ours = model.get_input_embeddings().weight[::50].detach().float().cpu()
    rows = gguf.quants.dequantize(embedding.data[::50], embedding.tensor_type)[: len(ours)]
    distance = float((ours[: len(rows)] - ours.new_tensor(rows)).norm() / ours.norm())
    if distance > (0.01 if kind.endswith("f16") else 0.2):
        facts["base"] = f"the weights are another model's (embeddings {distance:.0%} off)"
    return facts


def _describe(
    folder: Path,
    files: Sequence[str],
    name: str,
    checks: Sequence[Check],
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[list[Message]],
    ends: Sequence[str],
) -> None:
    """Write Modelfile, for the first of the files, and README.md."""
    turn = chats[0][0]
    system = turn["content"] if turn["role"] == "system" else ""
    text = MODELFILE.format(
        file=files[0],
        template=go_template(tokenizer, bool(system)),
        system=f'SYSTEM """{system}"""\n' if system else "",
        stops="\n".join(f'PARAMETER stop "{end}"' for end in ends),
    )
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    lines = "\n".join(f"- {check.name}: {check.state}; {check.evidence}" for check in checks)
    about = README.format(prompts=len(chats), lines=lines, file=files[0], name=name)
    (folder / "README.md").write_text(about, encoding="utf-8")


def go_template(tokenizer: "PreTrainedTokenizerBase", has_system: bool) -> str:
    """Return the chat template in Ollama's language, from what the template writes around turns.

    Args:
        tokenizer: The model's tokenizer.
        has_system: Whether every chat begins with a system prompt.
    """
    roles = ["system"] * has_system + ["user", "assistant", "user"]
    turns = [{"role": role, "content": f"TURN-{n}-"} for n, role in enumerate(roles)]
    text = render(tokenizer, turns)
    if (first := tokenizer("a")["input_ids"][0]) == tokenizer.bos_token_id:
        text = text.removeprefix(tokenizer.decode([first]))  # llama.cpp adds it itself
    parts = [part.replace("{{", '{{ "{{" }}') for part in re.split(r"TURN-\d-", text)]
    system, user, answer, again, end = parts if has_system else ["", *parts]
    first_user = f"{{{{ if le $i {int(has_system)} }}}}{user}{{{{ else }}}}{again}{{{{ end }}}}"
    return (
        '{{ range $i, $turn := .Messages }}{{ if eq $turn.Role "system" }}'
        + system
        + '{{ else if eq $turn.Role "user" }}'
        + first_user
        + "{{ else }}"
        + answer
        + "{{ end }}{{ $turn.Content }}{{ end }}"
        + end
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
