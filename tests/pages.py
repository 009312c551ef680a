"""A page of the handbook as its tests read it: its fences and its files.

A fence whose first line is `# name.py` or `# name.yaml` is a file that later fences find.
"""

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

COMMAND = re.compile(r"(\$ )?((\.venv/bin/)?python3? |make |grpo-nb |accelerate launch )")
FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\b")


class Block(NamedTuple):
    section: str  # the title of the second level that it stands under
    language: str  # "" of an indented block
    text: str
    line: int


def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks in order: of these languages, or all."""
    found, section, tokens = [], "", tokens_of(page)
    for number, token in enumerate(tokens):
        if (token.type, token.tag) == ("heading_open", "h2"):
            section = tokens[number + 1].content
        if token.type in ("fence", "code_block"):
            language = (token.info.split() or [""])[0]
            if not languages or language in languages:
                found.append(Block(section, language, token.content, token.map[0] + 1))
    return found


def write_files(page: Path, folder: Path) -> list[Path]:
    """Each named file and each YAML fence; in an indented block commands may follow the file."""
    written = []
    for block in blocks(page, "python", "yaml", ""):
        named = FILE.match(block.text)
        if named or block.language == "yaml":
            written.append(folder / (named[1] if named else f"line{block.line}.yaml"))
            lines = [line for line in block.text.splitlines() if not COMMAND.match(line)]
            written[-1].write_text("\n".join(lines), encoding="utf-8")
    return written
