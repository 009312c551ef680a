"""Write a merged model as GGUF for llama.cpp, Ollama and LM Studio.

    write("merged", ["q8_0", "q4_k_m"], questions)  # into merged/gguf, with a Modelfile

A file is kept only if llama.cpp answers with it as the model does.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from grpo_nb.checks import Check, Checks
from grpo_nb.export import llama_cpp, served
from grpo_nb.files import atomic_path
from grpo_nb.models import TransformersEngine
from grpo_nb.models.template import encode, render


def write(folder: Path, kinds: Sequence[str], questions: served.Questions) -> Checks:
    """Write a model's GGUF files, and keep those with which llama.cpp answers as the model does.

    Args:
        folder: The merged model. Its folder `gguf` is replaced.
        kinds: Kinds of files, such as "q8_0". One in 16 bit is tested first in any case, for its
            limit is narrow, and what is wrong in it is so in the others.
        questions: What the model and each file answer.

    Returns:
        A check for each file.

    Raises:
        RuntimeError: The converter does not take the model, or is not installed.
    """
    model, checks, files = served.model_of(folder, questions), Checks(), []
    first = next((kind for kind in kinds if kind.endswith("f16")), "f16")
    with atomic_path(folder / "gguf") as temporary:
        temporary.mkdir()
        for kind in dict.fromkeys([first, *kinds]):
            file = temporary / f"{folder.name}-{kind}.gguf"
            llama_cpp.run_converter(folder, file, kind)
            checks.append(test(file, kind, model))
            is_sound = checks[-1].state != "stop"
            if is_sound and kind in kinds:
                files.append(file.name)
            else:
                file.unlink()
            if kind == first and not is_sound:
                break
        if files:
            text = modelfile(files[0], model)
            (temporary / "Modelfile").write_text(text, encoding="utf-8")
    return checks


def test(file: Path, kind: str, model: served.Model) -> Check:
    """Return the check of a GGUF file, which llama.cpp loads in a process of its own."""
    figures, faults, questions = {}, faults_of(file, model.engine), model.questions
    room = max(map(len, encode(model.engine.tokenizer, questions.chats))) + questions.tokens + 8
    try:
        with llama_cpp.serving(file, room) as url:
            figures = served.compare(served.server_at(url), model)
    except RuntimeError as error:
        faults["file"] = str(error)
    limit = llama_cpp.TABLES["kinds"][kind]["kl"]
    return served.verdict(f"gguf {kind}", figures, limit, faults)


def faults_of(file: Path, engine: TransformersEngine) -> dict[str, str]:
    """Return what a file's fields show to be wrong: {kind of `served.FAULTS`: evidence}."""
    from gguf import GGUFReader

    reader, config = GGUFReader(file), engine.model.config.get_text_config()
    fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    names, faults = [*fields, *(tensor.name for tensor in reader.tensors)], {}
    own = "gpt2" if '"ByteLevel"' in engine.tokenizer.backend_tokenizer.to_str() else "llama"
    if {own, fields["ggml.model"]} == {"gpt2", "llama"}:
        faults["vocabulary"] = f"the vocabulary is of type {fields['ggml.model']!r}, not {own!r}"
    if fields["block_count"] < config.num_hidden_layers:
        faults["layers"] = f"{fields['block_count']} layers of {config.num_hidden_layers}"
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    is_scaled = any(name.startswith(("rope.scaling", "rope_")) for name in names)
    if scaling not in ("default", "dynamic") and not is_scaled:
        faults["rope"] = f"the scaling of positions, {scaling!r}, is not in the file"
    return faults


def modelfile(file: str, model: served.Model) -> str:
    """Return Ollama's Modelfile for a file, with the system prompt and turns of every chat."""
    chats, engine = model.questions.chats, model.engine
    turns = chats[0][:-1]
    has_system = [turn["role"] for turn in turns[:1]] == ["system"]
    if any(chat[:-1] != turns for chat in chats):
        turns = turns[:has_system]  # the others are the chats' own
    lines = [f"FROM ./{file}", f'TEMPLATE """{go_template(engine, has_system)}"""']
    lines += [f'SYSTEM """{turn["content"]}"""' for turn in turns[:has_system]]
    lines += [f'MESSAGE {turn["role"]} """{turn["content"]}"""' for turn in turns[has_system:]]
    ends = engine.tokenizer.convert_ids_to_tokens(engine.stops)
    lines += [f'PARAMETER stop "{end}"' for end in ends]
    # Greedy, as the file was tested; Ollama's own default punishes repetition.
    return "\n".join([*lines, "PARAMETER temperature 0", "PARAMETER repeat_penalty 1", ""])


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
