"""Keep a run's directory: its settings, its locks, and the manifest that links the stages.

`runs/<name>/config.yaml` holds every setting with its source; `manifest.json` records each stage's
status, the SHA-256 of its settings and of the files it read and wrote, package versions, seed, git
commit and duration. A stage refuses to start if an earlier one is missing, has failed, or has
changed since.
"""

import fcntl
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

from grpo_nb.checks import Check
from grpo_nb.files import (
    atomic_path,
    digests,
    read_json,
    runs_root,
    sha256,
    write_json,
)
from grpo_nb.machine import git_commit, gpu_name, installed_versions
from grpo_nb.ranks import by_main
from grpo_nb.runs import config as configs

NOTEBOOKS = {
    "01": "01_prepare_data",
    "02": "02_test_rewards",
    "03": "03_train_grpo",
    "04": "04_merge_and_infer",
}
HEAD = "# Every value with its source: docs/settings.md says what an edit does\n"
_locks: dict[Path, FileLock] = {}


class State(NamedTuple):
    """Describe the status of a stage.

    status: "not started", "running", "done", "failed", "cut off" (its process ended before the
        stage was done) or "stale" (after it was done, its settings were changed or an earlier stage
        was run again).
    why: The status with its reason.
    """

    status: str
    why: str


class Run:
    """Give access to one run directory.

    Args:
        folder: A path, or the name of a folder below `runs_root()`. The name may contain only
            letters, digits, dots, dashes and underscores.
    """

    def __init__(self, folder: str | Path) -> None:
        self.name = folder.name if isinstance(folder, Path) else folder
        if not re.fullmatch(r"\w[\w.-]{0,99}", self.name, flags=re.ASCII):
            raise ValueError(
                f"run_name {self.name!r}: use letters, digits, '.', '-' and '_' only, 100 at most"
            )
        self.path = folder.absolute() if isinstance(folder, Path) else runs_root() / folder

    def __truediv__(self, relative: str) -> Path:
        return self.path / relative

    def manifest(self) -> dict[str, dict]:
        """Return {stage: entry}; empty before the first stage."""
        path = self / "manifest.json"
        return read_json(path) if path.exists() else {}

    def record(self, stage: str, entry: Mapping[str, Any]) -> None:
        """Merge `entry` into the manifest's entry of `stage`."""
        manifest = self.manifest()
        manifest[stage] = {**manifest.get(stage, {}), **entry}
        write_json(self / "manifest.json", dict(sorted(manifest.items())))

    def lock(self, name: str = ".lock") -> FileLock:
        """Take the lock, which the operating system frees when this process ends.

        Raises:
            RuntimeError: Another process holds the lock.
        """
        path = self / name
        # One lock per process, because widgets and cells run on different threads.
        lock = _locks.setdefault(path, FileLock(path, thread_local=False))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not lock.is_locked:
                lock.acquire(timeout=0.2)  # another process's `in_use` holds it briefly
        except Timeout:
            raise RuntimeError(
                f"run {self.name!r} is in use by another process: wait for it, shut down the "
                "notebook kernel that holds it, or choose another run_name"
            ) from None
        return lock

    def in_use(self, *names: str) -> bool:
        """Return whether a process, this one or another, holds one of these locks.

        A user who may only read the run can call this, too.
        """
        for path in [self / name for name in names if (self / name).exists()]:
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        return False

    def state(self, stage: str) -> State:
        """Return the status of a stage, and the reason for it."""
        entry = self.manifest().get(stage, {})
        status, reason = entry.get("status", "not started"), ""
        if status == "done" and (reason := self.outdated(stage)):
            status = "stale"
        elif status == "running" and not self.in_use(".lock"):
            status, reason = "cut off", f"it began {entry.get('started')}, and did not end"
        elif status == "failed":
            reason = entry.get("error", "")
        return State(status, f"{status}: {reason}" if reason else status)

    def undone(self) -> str:
        """Return the first stage that is not done or is out of date; "" if all are done."""
        return next((stage for stage in NOTEBOOKS if self.state(stage).status != "done"), "")

    def why_undone(self) -> str:
        """Describe the first stage that is not done or is out of date; "" if all are done."""
        stage = self.undone()
        return f"{NOTEBOOKS[stage]} of {self.name!r} is {self.state(stage).why}" if stage else ""

    def outdated(self, stage: str) -> str:
        """Return why a finished stage might now give another result; "" if nothing has changed."""
        manifest = self.manifest()
        entry = manifest.get(stage, {})
        for earlier in [name for name in NOTEBOOKS if "inputs" in entry and name < stage]:
            before = manifest.get(earlier, {})
            # A stage that is running, failed or cut off may have overwritten its results.
            is_done = before.get("status") == "done"
            if not is_done or not before["outputs"].items() <= entry["inputs"].items():
                return f"{NOTEBOOKS[earlier]} was run again after {NOTEBOOKS[stage]}"
        if "settings" in entry and entry["settings"] != configs.digest(self.config(), stage):
            return f"{self / 'config.yaml'} has other settings than {NOTEBOOKS[stage]} was run with"
        return ""

    def config(self) -> configs.RunConfig:
        """Return the configuration as the most recently started stage left it.

        Raises:
            ValueError: There is no configuration yet, or this version cannot read it.
        """
        if not (self / "config.yaml").exists():
            raise ValueError(f"run {self.name!r} has no config.yaml: run {NOTEBOOKS['01']} first")
        return configs.read(self / "config.yaml")

    def write_config(self, config: configs.RunConfig) -> None:
        """Write every setting with its source to config.yaml."""
        settings = {name: list(pair) for name, pair in configs.stored(config).items()}
        content = {"profile": config.profile, "settings": settings}
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=math.inf)
        with atomic_path(self / "config.yaml") as temporary:
            temporary.write_text(HEAD + text, encoding="utf-8")

    def settings(self, first: str = "01") -> dict[str, Any]:
        """Return the values that were set for the stages from `first` on, by dotted name."""
        if not (self / "config.yaml").exists():
            return {}
        values = configs.set_values(self.config())
        return {name: value for name, value in values.items() if configs.stage_of(name) >= first}

    def progress(self) -> str:
        """Return the progress that the running stage has reported; "" if there is none."""
        path = self / "progress.json"
        if not path.exists():
            return ""
        state = read_json(path)
        return f"{NOTEBOOKS[state['stage']]} {state['done']}/{state['total']} {state['note']}"

    def files(self, *relatives: str) -> dict[str, str]:
        """Return {relative path: sha256} of these files, and of all files in these folders."""
        hashes: dict[str, str] = {}
        for relative in relatives:
            root = self / relative
            if not root.exists():
                raise FileNotFoundError(f"{root} is missing: this stage should have written it")
            if root.is_file():
                hashes[relative] = sha256(root)
            hashes |= {f"{relative}/{name}": value for name, value in digests(root).items()}
        return hashes


def find_run(path: str) -> Run:
    """Find a run by its name or its folder, such as runs/demo.

    Raises:
        FileNotFoundError: There is no such run.
    """
    for folder in (Path(path), runs_root() / path):
        if (folder / "manifest.json").exists():
            return Run(folder.resolve())
    raise FileNotFoundError(
        f"{path} is not a run: neither it nor {runs_root() / path} holds a manifest.json; give a "
        "run's folder, such as runs/demo, or its name"
    )


class Stage:
    """Hold a stage that has started, with its run and its configuration."""

    def __init__(self, run: Run, stage: str, config: configs.RunConfig) -> None:
        self.run, self.stage, self.config = run, stage, config
        self._started = time.monotonic()
        self._part = (0, 0, 0)  # steps done and in total of the running part, and its number

    def settings(self, *sections: str) -> list[dict[str, Any]]:
        """Return table rows of the settings in these sections."""
        return configs.describe(self.config, *sections)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show how far along the running part of the stage is.

        A notebook shows it as a line, and the pipeline reads it from progress.json.
        """
        from IPython import get_ipython
        from IPython.display import display

        before, whole, number = self._part
        is_new = whole != total or done < before
        self._part = (done, total, number + is_new)
        state = {"stage": self.stage, "done": done, "total": total, "note": note}
        write_json(self.run / "progress.json", state)
        if get_ipython():
            line, place = f"{done}/{total}  {note}", f"progress {self._started} {self._part[2]}"
            display({"text/plain": line}, raw=True, display_id=place, update=not is_new)

    @by_main
    def record_checks(self, checks: Iterable[Check]) -> None:
        """Add checks to the manifest; a check replaces an earlier one of the same name."""
        before = self.run.manifest().get(self.stage, {}).get("checks", [])
        by_name = {check["name"]: check for check in before}
        by_name |= {check.name: check._asdict() for check in checks}
        self.run.record(self.stage, {"checks": list(by_name.values())})

    def change(self, settings: Mapping[str, Any]) -> None:
        """Change settings of the run, by dotted name.

        They apply to this stage, to the later stages, and to later runs with `--from`.
        """
        stored = configs.stored(self.config)
        self.config = configs.resolve(self.config.profile, settings, stored=stored)
        self.run.write_config(self.config)

    @by_main
    def finish(self, *outputs: str) -> str:
        """Record the stage as done, release the run's lock, and return a sentence for the user.

        Args:
            outputs: Files and folders that this stage wrote, relative to the run.
        """
        seconds = round(time.monotonic() - self._started, 1)
        files, inputs = self.run.files(*outputs), {}
        for stage, entry in self.run.manifest().items():
            inputs |= entry.get("outputs", {}) if stage < self.stage else {}
        self.run.record(
            self.stage,
            {"status": "done", "seconds": seconds, "inputs": inputs, "outputs": files}
            | {"settings": configs.digest(self.config, self.stage)},
        )
        self.run.lock().release(force=True)
        later = [name for stage, name in NOTEBOOKS.items() if stage > self.stage]
        after = f"next: {later[0]}.ipynb" if later else "the run is complete"
        checks = self.run.manifest()[self.stage].get("checks", [])
        if stops := [check["name"] for check in checks if later and check["state"] == "stop"]:
            after = f"{later[0]}.ipynb has to wait: see the fix of {', '.join(stops)}"
        return f"{NOTEBOOKS[self.stage]}: done, {len(files)} files written; {after}"


@by_main
def start(
    stage: str,
    run_name: str | Path,
    settings: Mapping[str, Any] | None = None,
    *,
    profile: str = "auto",
    task: str = "math",
    force: bool = False,
    all_stages: bool = False,
) -> Stage:
    """Begin a stage: resolve its configuration, check the earlier stages, and lock the run.

    The manifest keeps the inputs and outputs of the stage's last execution until the new one is
    done.

    Args:
        stage: "01" … "04".
        run_name: The name of the run, or its folder.
        settings: Values for this stage, by dotted name, such as {"grpo.max_steps": 20}.
        profile: The run's profile, or "auto"; used by stage 01 only.
        task: The run's task, used by stage 01 only; a task in `settings` overrides it.
        force: Whether to start even if an earlier stage is not done or has changed.
        all_stages: Whether the notebook holds every stage. If so, `settings` may belong to any
            stage, and those of this stage and later ones apply.

    Returns:
        The stage, with its run and its configuration.

    Raises:
        ValueError: An earlier stage is missing, failed or changed, or a setting is wrong.
        RuntimeError: Another process is using the run.
    """
    run, settings = Run(run_name), dict(settings or {})
    for name in settings:
        configs.refuse_unknown_setting(name)
        if (owner := configs.stage_of(name)) != stage and not all_stages:
            raise ValueError(f"{name} belongs to {NOTEBOOKS[owner]}: set it there, not here")
    settings = {name: v for name, v in settings.items() if configs.stage_of(name) >= stage}
    if stage == "01" and task != "math":  # the default is "math"
        settings = {"task": task} | settings
    config = resolve_stages(run, settings, stage, "04" if all_stages else stage, profile)
    if not force:
        refuse_undone(run, stage)
    run.lock()
    run.record(
        stage,
        {"status": "running", "checks": [], "seed": config.seed}
        | {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git_commit": git_commit()}
        | {"versions": installed_versions(), "gpu": gpu_name()},
    )
    run.write_config(config)
    return Stage(run, stage, config)


def resolve_stages(
    run: Run, settings: Mapping[str, Any], first: str, last: str, profile: str = "auto"
) -> configs.RunConfig:
    """Return the configuration with which stages `first` to `last` would run.

    Earlier stages keep the run's settings. Values set for later stages are kept if they fit the new
    settings.

    Raises:
        ValueError: A setting is wrong, or stage 03 would run with too few rows for a step.
    """
    stored: dict[str, configs.Sourced] = {}
    if first > "01" or (run / "config.yaml").exists():
        config = run.config()
        stored, profile = configs.stored(config), profile if first == "01" else config.profile
    before = {name: pair for name, pair in stored.items() if configs.stage_of(name) < first}
    after = {n: p for n, p in stored.items() if configs.stage_of(n) > last and p[1] == configs.SET}
    try:
        config = configs.resolve(profile, settings, stored=before | after)
    except ValueError:
        config = configs.resolve(profile, settings, stored=before)
    report = run / "data/report.json"
    if "01" < first <= "03" <= last and report.exists():
        configs.refuse_few_rows(config, read_json(report)["train_rows"])
    return config


def refuse_undone(run: Run, stage: str) -> None:
    """Raise ValueError unless every earlier stage is done and its files are unchanged."""
    for earlier in [name for name in NOTEBOOKS if name < stage]:
        state = run.state(earlier)
        if state.status != "done":
            otherwise = ", or set force = True" if state.status == "stale" else ""
            raise ValueError(
                f"run {run.name!r}: {NOTEBOOKS[stage]} needs {NOTEBOOKS[earlier]}, which is "
                f"{state.why}: run {NOTEBOOKS[earlier]}.ipynb first{otherwise}"
            )
        for relative, digest in run.manifest()[earlier]["outputs"].items():
            path = run / relative
            if not path.exists() or sha256(path) != digest:
                change = "changed" if path.exists() else "was removed"
                raise ValueError(
                    f"{run.name}/{relative} {change} after {NOTEBOOKS[earlier]} wrote it: run "
                    f"{NOTEBOOKS[earlier]}.ipynb again, or set force = True"
                )
