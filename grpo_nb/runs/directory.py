"""The run directory: paths, locks, atomic writes, and the manifest that links the stages.

`runs/<name>/manifest.json` records for each stage its status, the sha256 of what it read
and wrote, versions, seed, git commit and seconds. A stage refuses to start when one
before it is missing, failed, or has changed since.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from grpo_nb.machine import gpu_in_use, switches
from grpo_nb.runs import config as configs
from grpo_nb.runs.checks import Check
from grpo_nb.runs.files import atomic_path, read_json, read_yaml, sha256, write_json
from grpo_nb.runs.versions import PROJECT_ROOT, git_commit, installed_versions

NOTEBOOKS = {
    "01": "01_prepare_data",
    "02": "02_test_rewards",
    "03": "03_train_grpo",
    "04": "04_merge_and_infer",
}
_locks: dict[Path, FileLock] = {}


def runs_root() -> Path:
    """Where runs are kept: `$GRPO_NB_RUNS`, or `runs/` beside the package.

    A relative one is below the folder that the first command was started in: the whole path is
    written back, for kernels and trials inherit it and work in other folders.
    """
    given = os.environ.get("GRPO_NB_RUNS")
    if given:
        given = os.environ["GRPO_NB_RUNS"] = str(Path(given).expanduser().absolute())
    return Path(given or PROJECT_ROOT / "runs")


def project_path(path: str | Path) -> Path:
    """A path as given if absolute, else below the project, wherever the kernel runs."""
    return PROJECT_ROOT / path


def refuse_path(what: str, name: str) -> None:
    """Raise ValueError unless `name` is that of a folder, which leads nowhere else."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name, flags=re.ASCII):
        raise ValueError(f"{what} {name!r}: use letters, digits, '.', '-' and '_' only")


class Run:
    """One run directory.

    Args:
        name: Letters, digits, dot, dash and underscore; the folder below `runs_root()`.
    """

    def __init__(self, name: str) -> None:
        refuse_path("run_name", name)
        self.name = name
        self.path = runs_root() / name

    def __truediv__(self, relative: str) -> Path:
        return self.path / relative

    def manifest(self) -> dict[str, dict]:
        """{stage: entry}; empty before the first stage."""
        path = self / "manifest.json"
        return read_json(path) if path.exists() else {}

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

    def status(self, stage: str) -> str:
        """ "not started", "running", "done", "failed", "cut off": its process is gone, or "stale":
        it was done, and a stage before it has been run again since."""
        status = self.manifest().get(stage, {}).get("status", "not started")
        if status == "done" and self._again(stage):
            return "stale"
        if status != "running" or self.is_locked:
            return status
        try:
            self.lock().release()
        except RuntimeError:  # its process lives
            return "running"
        return "cut off"

    def _again(self, stage: str) -> str:
        """The stage whose results are no longer those that `stage` read; "" if there is none."""
        manifest = self.manifest()
        read = manifest.get(stage, {}).get("inputs")
        before = {k: v.get("outputs", {}) for k, v in manifest.items() if k < stage}
        now = {path: digest for outputs in before.values() for path, digest in outputs.items()}
        if read is None or read == now:
            return ""
        other = [k for k, outputs in before.items() if not outputs.items() <= read.items()]
        begun = [k for k in before if manifest[k].get("status") != "done"]
        return min([*other, *begun], default=max(before, default=stage))

    def why_stale(self, stage: str = "04") -> str:
        """Why what `stage` wrote is not of the run as it is now, and what to do; "" if it is."""
        name, again, entry = NOTEBOOKS[stage], self._again(stage), self.manifest().get(stage, {})
        if entry.get("status") == "done" and again:
            why = f"{NOTEBOOKS[again]} was run again after {name}"
        elif entry.get("outdated"):
            why = f"{name} was begun again and did not end, what it wrote is of an earlier training"
        else:
            return ""
        first = next(one for one in NOTEBOOKS if one == stage or self.status(one) != "done")
        return f"{why}: run {NOTEBOOKS[first]} (--from {first})"

    def refuse_stale(self) -> None:
        """Raise ValueError if merged model and evaluation are not of the run as it is now."""
        if why := self.why_stale():
            raise ValueError(f"run {self.name!r}: {why}")

    def config(self) -> configs.RunConfig:
        """The configuration as the stage that started last left it."""
        path = self / "config.yaml"
        if not path.exists():
            raise ValueError(f"run {self.name!r} has no config.yaml: run {NOTEBOOKS['01']} first")
        stored = read_yaml(path)
        if not isinstance(stored.get("profile"), str):
            raise ValueError(f"{path} names no profile: restore it, or run {NOTEBOOKS['01']} again")
        return configs.resolve(stored.pop("profile"), stored)

    def write_config(self, config: configs.RunConfig, writer: str = "") -> None:
        """Write config.yaml, and into the manifest what it holds, so that an edit shows.

        Args:
            writer: The stage that begins; without one, that of the last time.
        """
        content, manifest = configs.stored(config), self.manifest()
        writer = writer or self._writer(manifest)
        if writer:
            for entry in manifest.values():
                entry.pop("config", None)
            manifest[writer]["config"] = content
            write_json(self / "manifest.json", manifest)
        with atomic_path(self / "config.yaml") as temporary:
            temporary.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def _writer(self, manifest: Mapping[str, dict]) -> str:
        return next((stage for stage, entry in manifest.items() if "config" in entry), "")

    def refuse_edited(self) -> None:
        """Raise ValueError if somebody else than the stages changed config.yaml."""
        manifest = self.manifest()
        writer = self._writer(manifest)
        if not writer or not (self / "config.yaml").exists():
            return
        now = json.loads(json.dumps(configs.stored(self.config())))
        then = manifest[writer]["config"]
        cut = self.status(writer) == "cut off"  # perhaps before it wrote the file
        changed = [
            f"{name}: {then.get(name)!r} → {now.get(name)!r}"
            for name in {**then, **now}
            if then.get(name) != now.get(name) and not (cut and configs.stage_of(name) >= writer)
        ]
        if changed:
            raise ValueError(
                f"{self / 'config.yaml'} was edited after {NOTEBOOKS[writer]} wrote it "
                f"({'; '.join(changed)}): the stages write that file and do not take settings "
                "from it. Write the old values back, and set new ones by --set or in the "
                "notebook's parameters cell; or set force = True"
            )

    def settings(self) -> dict[str, Any]:
        """What `--set` and the Reward Lab have set, by dotted name."""
        path = self / "settings.json"
        return read_json(path) if path.exists() else {}

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

    def record_checks(self, checks: Iterable[Check]) -> None:
        """Keep what was found in the manifest; of the same name the last counts."""
        before = self.run.manifest().get(self.stage, {}).get("checks", [])
        found = {check["name"]: check for check in before}
        found |= {check.name: check._asdict() for check in checks}
        self.run.record(self.stage, {"checks": list(found.values())})

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
        done = {"status": "done", "outdated": False, "seconds": seconds, "outputs": written}
        self.run.record(self.stage, done)
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
    if not parameters.get("force", False):
        check_stages_before(run, stage)
    run.lock()
    outdated = bool(run.why_stale(stage))  # until it has written anew
    before = {k: v for k, v in run.manifest().items() if k < stage}
    inputs = {
        path: sha for entry in before.values() for path, sha in entry.get("outputs", {}).items()
    }
    run.record(
        stage,
        {"status": "running", "inputs": inputs, "outputs": {}, "checks": [], "seed": config.seed}
        | {"outdated": outdated}
        | {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git_commit": git_commit()}
        | {"versions": installed_versions(), "gpu": gpu_in_use(), "switches": switches()},
    )
    run.write_config(_with_later(run, stage, config), stage)
    return Stage(run, stage, config, set_here)


def _with_later(run: Run, stage: str, config: configs.RunConfig) -> configs.RunConfig:
    """With the settings by which later stages came to the results that they have."""
    done = [one for one in NOTEBOOKS if one > stage and run.status(one) in ("done", "stale")]
    try:
        known = configs.flatten(run.config()).items() if done else ()
        later = {name: value for name, value in known if configs.stage_of(name) in done}
        return configs.resolve(config.profile, configs.flatten(config), later)
    except ValueError:  # they do not go together, or cannot be read
        return config


def resolve_stage(run: Run, first: str, profile: str, settings: Mapping) -> configs.RunConfig:
    """The configuration from stage `first` on: earlier stages' settings are the run's own."""
    if first == "01":
        return configs.resolve(profile, settings)
    stored = run.config()
    earlier = {k: v for k, v in configs.flatten(stored).items() if configs.stage_of(k) < first}
    return configs.resolve(stored.profile, earlier, settings)


def check_stages_before(run: Run, stage: str) -> None:
    """Raise ValueError unless every earlier stage is done and nothing it touched changed."""
    run.refuse_edited()
    manifest = run.manifest()
    for earlier in [key for key in NOTEBOOKS if key < stage]:
        entry, status = manifest.get(earlier, {}), run.status(earlier)
        if status not in ("done", "stale"):
            was = "was" if status == "cut off" else "is"
            raise ValueError(
                f"{NOTEBOOKS[stage]} needs {NOTEBOOKS[earlier]}, which {was} {status} in "
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
        if why := run.why_stale(earlier):
            raise ValueError(f"{why}, or set force = True")
