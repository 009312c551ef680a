"""Write files atomically, append and read JSON lines, and read JSON and YAML strictly."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import yaml

from grpo_nb.machine import PROJECT_ROOT

DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def runs_root() -> Path:
    """Return the folder of all runs: `$GRPO_NB_RUNS`, or `runs/` beside the package."""
    folder = os.environ.get("GRPO_NB_RUNS")
    return Path(folder).expanduser().absolute() if folder else PROJECT_ROOT / "runs"


def project_path(path: str | Path) -> Path:
    """Resolve a relative path against the project folder, wherever the kernel runs."""
    return PROJECT_ROOT / path


def disk_error(path: Path | str, error: OSError, state: str = "") -> str:
    """Explain a full disk or an inaccessible path; return the text of any other error."""
    if error.errno in DISK_FULL:
        return (
            f"no room to write {path} ({error}){state}: free some space, or point GRPO_NB_RUNS at "
            "a folder on a larger disk"
        )
    if error.errno in CLOSED:
        return (
            f"{error.filename or path} cannot be read or written ({error}): ask its owner, or "
            "point GRPO_NB_RUNS at a writable folder"
        )
    return str(error)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling that replaces `path` (a file or folder) on success.

    Raises:
        OSError: The disk is full; `path` is unchanged.

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
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(disk_error(path, error, ", which is unchanged")) from None
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
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, restore it from a copy: {error}") from None
    return content


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


class _Strict(yaml.SafeLoader):
    """Load YAML with YAML 1.2's numbers and booleans, and reject duplicate keys.

    `off` is text and 1e-3 is a number. `010`, `1:30` and `0x1F` are text, which a setting reads
    as 10 or rejects; YAML 1.1 would silently read 8, 90 and 31.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}  # replaces YAML 1.1's; filled below

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # refuses a node that contains itself

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
            keys.append(key.value)
        return super().construct_mapping(node, deep)


for _kind, _pattern, _firsts in (
    ("bool", r"true|True|false|False", "tTfF"),
    ("int", r"[-+]?(0|[1-9]\d*)", "-+0123456789"),
    ("float", r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+", "-+.0123456789"),
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("merge", "<<", "<"),
):
    _matches = re.compile(rf"(?:{_pattern})\Z")
    _Strict.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _matches, list(_firsts))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of keys and plain values.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not YAML, has a duplicate key, or holds no keys; the message names the
            file and, where possible, the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{path}, line {mark.line + 1}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None  # such as `!!bool maybe`
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: write one `setting: value` per line")
    return content
