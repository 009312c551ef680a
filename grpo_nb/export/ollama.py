"""Write what Ollama needs beside a GGUF file."""

import re
from pathlib import Path

from grpo_nb.export import gate
from grpo_nb.models.template import render

# In Ollama's language: what the chat template writes around turns.
MODELFILE = '''FROM ./{file}
TEMPLATE """{{{{ range $i, $turn := .Messages }}}}{{{{ if eq $turn.Role "system" }}}}{system}\
{{{{ else if eq $turn.Role "assistant" }}}}{answer}{{{{ else if le $i {first} }}}}{user}\
{{{{ else }}}}{again}{{{{ end }}}}{{{{ $turn.Content }}}}{{{{ end }}}}{end}"""
SYSTEM """{prompt}"""
PARAMETER temperature 0
PARAMETER repeat_penalty 1
'''


def write_modelfile(file: Path, model: gate.Model) -> None:
    """Write a Modelfile beside a GGUF file, for `ollama create`.

    Ollama does not read the chat template in a GGUF file, so it gets what ours writes around turns.
    """
    tokenizer, questions = model[0].tokenizer, model[1]
    system = [turn["content"] for turn in questions.chats[0][:1] if turn["role"] == "system"]
    roles = ["system"] * len(system) + ["user", "assistant", "user"]
    turns = [{"role": role, "content": f"TURN-{n}-"} for n, role in enumerate(roles)]
    text = render(tokenizer, turns).removeprefix(tokenizer.bos_token or "")  # llama.cpp adds it
    parts = [""] * (not system) + re.split(r"TURN-\d-", text)
    names = dict(zip(("system", "user", "answer", "again", "end"), parts, strict=True))
    names |= {"file": file.name, "first": len(system), "prompt": "".join(system)}
    file.with_name("Modelfile").write_text(MODELFILE.format(**names), encoding="utf-8")
