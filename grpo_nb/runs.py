"""The run directory: paths, locks, atomic writes, and the manifest that links the stages.

`runs/<name>/manifest.json` records for each stage its status, the sha256 of what it read
and wrote, versions, seed, git commit and seconds. A stage refuses to start when one
before it is missing, failed, or has changed since.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from grpo_nb import config as configs
from grpo_nb.profiles import gpu_in_use

PROJECT_ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = {
    "01": "01_prepare_data",
    "02": "02_test_rewards",
    "03": "03_train_grpo",
    "04": "04_merge_and_infer",
}
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth", "datasets")
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_locks: dict[Path, FileLock] = {}


def runs_root() -> Path:
    """Where runs are kept: `$GRPO_NB_RUNS`, or `runs/` beside the package."""
    return Path(os.environ.get("GRPO_NB_RUNS") or PROJECT_ROOT / "runs")


def project_path(path: str | Path) -> Path:
    """A path as given if absolute, else below the project, wherever the kernel runs."""
    return PROJECT_ROOT / path


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
        if path.is_dir():
            shutil.rmtree(path)
        temporary.replace(path)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(
            f"no room to write {path} ({error}), which is left as it was: free some space, or "
            "point GRPO_NB_RUNS at a folder on a larger disk"
        ) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """JSON, indented, in place of `path` at once or not at all."""
    with atomic_path(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Run:
    """One run directory.

    Args:
        name: Letters, digits, dot, dash and underscore; the folder below `runs_root()`.
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,99}", name, flags=re.ASCII):
            raise ValueError(f"run_name {name!r}: use letters, digits, '.', '-' and '_' only")
        self.name = name
        self.path = runs_root() / name

    def __truediv__(self, relative: str) -> Path:
        return self.path / relative

    def manifest(self) -> dict[str, dict]:
        """{stage: entry}; empty before the first stage."""
        path = self / "manifest.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def record(self, stage: str, entry: Mapping[str, Any]) -> None:
        """Merge `entry` into the manifest's entry of `stage`."""
        manifest = self.manifest()
        manifest[stage] = {**manifest.get(stage, {}), **entry}
        write_json(self / "manifest.json", dict(sorted(manifest.items())))

    def lock(self, name: str = ".lock") -> FileLock:
        """Take the lock; the system frees it when this process ends, however it ends.

        Raises:
            RuntimeError: Another process holds it.
        """
        path = self / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locks.setdefault(path, FileLock(path))
        try:
            if not lock.is_locked:
                lock.acquire(timeout=0)
        except Timeout:
            raise RuntimeError(
                f"run {self.name!r} is in use by another process: wait for it, shut down the "
                "notebook kernel that holds it, or choose another run_name"
            ) from None
        return lock

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock."""
        lock = _locks.get(self / ".lock")
        return lock is not None and lock.is_locked

    def config(self) -> configs.RunConfig:
        """The configuration as the stage that started last left it."""
        path = self / "config.yaml"
        if not path.exists():
            raise ValueError(f"run {self.name!r} has no config.yaml: run {NOTEBOOKS['01']} first")
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
        return configs.resolve(stored.pop("profile"), stored)

    def write_config(self, config: configs.RunConfig) -> None:
        content = {"profile": config.profile, **configs.flatten(config)}
        with atomic_path(self / "config.yaml") as temporary:
            temporary.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """What `--set` and the Reward Lab have set, by dotted name."""
        path = self / "settings.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def files(self, *relatives: str) -> dict[str, str]:
        """{relative path: sha256} of each file, and of each file below each folder."""
        found: dict[str, str] = {}
        for relative in relatives:
            root = self / relative
            if not root.exists():
                raise FileNotFoundError(f"{root} was to be written by this stage and is missing")
            for path in [root] if root.is_file() else sorted(root.rglob("*")):
                if path.is_file():
                    found[path.relative_to(self.path).as_posix()] = sha256(path)
        return found


class Stage:
    """A stage that has started: its run, its configuration, and how to hand off."""

    def __init__(self, run: Run, stage: str, config: configs.RunConfig, set_here: dict) -> None:
        self.run, self.stage, self.config, self.set_here = run, stage, config, set_here
        self._started = time.monotonic()

    def settings(self, *sections: str) -> list[dict[str, Any]]:
        """Rows for a table of every effective value: setting, value, source, meaning."""
        return configs.describe(self.config, self.set_here, *sections)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Tell whoever watches (a notebook's reader, or the pipeline's bar) how far we are."""
        state = {"stage": self.stage, "done": done, "total": total, "note": note}
        write_json(self.run / "progress.json", state)

    def change(self, settings: Mapping[str, Any]) -> None:
        """Set values of the run from now on: for later stages, and for `--from`."""
        known = configs.flatten(self.config)
        self.config = configs.resolve(self.config.profile, known, settings)
        self.run.write_config(self.config)
        write_json(self.run / "settings.json", {**self.run.settings(), **settings})

    def finish(self, *outputs: str) -> str:
        """Record the stage as done, free the run, and say what comes next.

        Args:
            outputs: Files and folders this stage wrote, relative to the run.
        """
        seconds = round(time.monotonic() - self._started, 1)
        written = self.run.files(*outputs)
        self.run.record(self.stage, {"status": "done", "seconds": seconds, "outputs": written})
        self.run.lock().release(force=True)
        later = [name for stage, name in NOTEBOOKS.items() if stage > self.stage]
        after = f"next: {later[0]}.ipynb" if later else "the run is complete"
        return f"{NOTEBOOKS[self.stage]}: done, {len(written)} files written; {after}"


def start_stage(stage: str, parameters: Mapping[str, Any]) -> Stage:
    """Lock the run, check the stages before, and resolve the configuration.

    Args:
        stage: "01" … "04".
        parameters: The notebook's `globals()`: `run_name`, the settings of this stage,
            `profile` (stage 01) and `force` (later stages: start although a check fails).

    Raises:
        ValueError: A stage before is missing, failed or changed, or a setting is wrong.
        RuntimeError: The run is in use.
    """
    run = Run(parameters["run_name"])
    set_here = configs.from_parameters(stage, parameters)
    config = resolve_stage(run, stage, parameters.get("profile", ""), set_here)
    run.lock()
    if not parameters.get("force", False):
        check_stages_before(run, stage)
    run.write_config(config)
    before = {k: v for k, v in run.manifest().items() if k < stage}
    inputs = {path: sha for entry in before.values() for path, sha in entry["outputs"].items()}
    run.record(
        stage,
        {"status": "running", "inputs": inputs, "outputs": {}, "seed": config.seed}
        | {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git_commit": git_commit()}
        | {"versions": installed_versions(), "gpu": gpu_in_use()},
    )
    return Stage(run, stage, config, set_here)


def resolve_stage(run: Run, first: str, profile: str, settings: Mapping) -> configs.RunConfig:
    """The configuration from stage `first` on: earlier stages' settings are the run's own."""
    if first == "01":
        return configs.resolve(profile, settings)
    stored = run.config()
    earlier = {k: v for k, v in configs.flatten(stored).items() if configs.stage_of(k) < first}
    return configs.resolve(stored.profile, earlier, settings)


def check_stages_before(run: Run, stage: str) -> None:
    """Raise ValueError unless every earlier stage is done and nothing it touched changed."""
    manifest = run.manifest()
    for earlier in [key for key in NOTEBOOKS if key < stage]:
        entry = manifest.get(earlier, {"status": "not started"})
        if entry["status"] != "done":
            raise ValueError(
                f"{NOTEBOOKS[stage]} needs {NOTEBOOKS[earlier]}, which is {entry['status']} in "
                f"run {run.name!r}: run {NOTEBOOKS[earlier]}.ipynb first"
            )
        for kind, recorded in (("read", entry["inputs"]), ("wrote", entry["outputs"])):
            for relative, digest in recorded.items():
                path = run / relative
                if not path.exists() or sha256(path) != digest:
                    change = "changed" if path.exists() else "was removed"
                    raise ValueError(
                        f"{relative} {change} after {NOTEBOOKS[earlier]} {kind} it: run that "
                        "notebook again, or set force = True"
                    )


def installed_versions() -> dict[str, str]:
    """Versions of the packages a result depends on, without importing them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_commit() -> str:
    """The project's commit, with "-dirty" if files differ from it; "unknown" outside a checkout."""
    command = ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude=*"]  # tags
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
