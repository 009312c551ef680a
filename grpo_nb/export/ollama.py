"""Write what Ollama needs beside a GGUF file."""

import re
from pathlib import Path
from typing import Any

from grpo_nb.export import gate
from grpo_nb.models.template import render

# In Ollama's language: what the chat template writes around turns.
TEMPLATE = """{{{{ range $i, $turn := .Messages }}}}{{{{ if eq $turn.Role "system" }}}}{system}\
{{{{ else if eq $turn.Role "assistant" }}}}{answer}{{{{ else if le $i {first} }}}}{user}\
{{{{ else }}}}{again}{{{{ end }}}}{{{{ $turn.Content }}}}{{{{ end }}}}{end}"""
LAST = ["PARAMETER temperature 0", "PARAMETER repeat_penalty 1", ""]


def write_modelfile(file: Path, model: gate.Model) -> None:
    """Write a Modelfile beside a GGUF file, for `ollama create`.

    Ollama does not read the chat template in a GGUF file, so it gets what ours writes around turns;
    and the system prompt and worked turns of every held-out chat.
    """
    engine, (chats, *_), _ = model
    tokenizer, turns = engine.tokenizer, chats[0][:-1]
    has_system = [turn["role"] for turn in turns[:1]] == ["system"]
    if any(chat[:-1] != turns for chat in chats):
        turns = turns[:has_system]  # the others are the chats' own
    lines = [f"FROM ./{file.name}", f'TEMPLATE """{_template(tokenizer, has_system)}"""']
    lines += [f'SYSTEM """{turn["content"]}"""' for turn in turns[:has_system]]
    lines += [f'MESSAGE {turn["role"]} """{turn["content"]}"""' for turn in turns[has_system:]]
    lines += [f'PARAMETER stop "{end}"' for end in tokenizer.convert_ids_to_tokens(engine.stops)]
    file.with_name("Modelfile").write_text("\n".join([*lines, *LAST]), encoding="utf-8")


def _template(tokenizer: Any, has_system: bool) -> str:
    """Return the chat template in Ollama's language."""
    roles = ["system"] * has_system + ["user", "assistant", "user"]
    turns = [{"role": role, "content": f"TURN-{n}-"} for n, role in enumerate(roles)]
    text = render(tokenizer, turns)
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        text = text.removeprefix(tokenizer.bos_token)  # llama.cpp adds it itself
    parts = [part.replace("{{", '{{ "{{" }}') for part in re.split(r"TURN-\d-", text)]
    names = ("system", "user", "answer", "again", "end")
    around = dict(zip(names, [""] * (not has_system) + parts, strict=True))
    return TEMPLATE.format(**around, first=int(has_system))
