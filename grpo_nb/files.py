"""Write files atomically, append and read JSON lines, and read JSON and YAML."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from grpo_nb.machine import PROJECT_ROOT


def runs_root() -> Path:
    """Return the folder of all runs: `$GRPO_NB_RUNS`, or `runs/` beside the package."""
    folder = os.environ.get("GRPO_NB_RUNS")
    return Path(folder).expanduser().absolute() if folder else PROJECT_ROOT / "runs"


def project_path(path: str | Path) -> Path:
    """Resolve a relative path against the project folder, wherever the kernel runs."""
    return PROJECT_ROOT / path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling that replaces `path` (a file or folder) on success.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "report.json"
    >>> with atomic_path(target) as temporary:
    ...     _ = temporary.write_text("{}")
    >>> target.read_text(), len(list(target.parent.iterdir()))
    ('{}', 1)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        before = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.is_dir():  # a kill from here on leaves one of the two folders complete
            path.replace(before)
        temporary.replace(path)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON to `path`, atomically."""
    with atomic_path(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, restore it from a copy: {error}") from None


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Append JSON as a new line, even after an incomplete line; NaN and infinity become null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in content.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        start = "" if file.read(1) in (b"", b"\n") else "\n"
        file.write(f"{start}{json.dumps(finite)}\n".encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON of every whole line; a killed process may have left incomplete lines."""
    contents = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            contents.append(json.loads(line))
    return contents


def sha256(path: Path) -> str:
    """Return the file's SHA-256 digest in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """Return {relative path: SHA-256} of the files in a folder; {} if there is no folder."""
    files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of keys and plain values.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not YAML, or holds no keys; the message names the file and the place.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: write one `setting: value` per line")
    return content
