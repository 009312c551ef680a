"""Files written aside and renamed, and the one reader of YAML."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml

DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def disk_error(path: Path | str, error: OSError, kept: str = "") -> str:
    """The sentence for a disk that is full or read-only; the system's own for other errors."""
    if error.errno in DISK_FULL:
        return (
            f"no room to write {path} ({error}){kept}: free some space, or point GRPO_NB_RUNS at "
            "a folder on a larger disk"
        )
    if error.errno in READ_ONLY:
        return f"{path} cannot be written ({error}): point GRPO_NB_RUNS at a folder that can"
    return str(error)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary sibling that takes the place of `path` (file or folder) on success.

    Raises:
        OSError: The disk is full; `path` is left as it was.

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
        if path.is_dir():  # a kill from here on leaves one of the two, whole
            path.replace(before)
        temporary.replace(path)
        shutil.rmtree(before, ignore_errors=True)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(disk_error(path, error, ", which is left as it was")) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """JSON, indented, in place of `path` at once or not at all."""
    with atomic_path(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

    Raises:
        ValueError: It is damaged; with its name.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, restore it from a copy: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged, restore it from a copy: it holds no names")
    return content


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Strict(yaml.SafeLoader):
    """YAML 1.2's numbers and booleans, so that `off` is text and 1e-3 a number; no key twice.

    `010`, `1:30` and `0x1F` are text, which a setting takes as 10 or refuses: YAML 1.1 would
    silently read 8, 90 and 31.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}  # none of YAML 1.1's; those below

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.append(key.value)
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
    """A file of keys and plain values.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not YAML, a key twice, or no keys; with file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except yaml.MarkedYAMLError as error:
        mark, why = error.problem_mark or error.context_mark, error.problem
        tab = ": indent with spaces, not tabs" if "'\\t'" in str(why) else ""
        raise ValueError(f"{path}, line {mark.line + 1}: {why}{tab}") from None
    except RecursionError:
        raise ValueError(f"{path} is not a file of settings: it nests too deep") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # `!!bool maybe`
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: write one `setting: value` a line")
    return content
