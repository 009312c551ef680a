"""List the checks of a run (`checklist`) or of this machine (`doctor`), and what to do next.

Each stage writes its checks into its manifest entry. The checklist lists them, and adds the checks
that concern the whole run. A stage that is not done has the state "not yet".
"""

import os
import platform
import shutil
from collections import Counter
from importlib.util import find_spec
from typing import Any

import psutil

from grpo_nb.checks import Check, shown
from grpo_nb.machine import PROJECT_ROOT, gpu_fault, gpu_name, installed_versions
from grpo_nb.models import cuda_available
from grpo_nb.pipeline.caused import caused
from grpo_nb.runs import NOTEBOOKS, Run, refuse_undone, runs_root
from grpo_nb.runs.config import detect_profile
from grpo_nb.sandbox import choose_backend

NEEDED_DISK_GIB, NEEDED_MEMORY_GIB = 5, 4
NO_GPU = "none: training runs on the CPU, with small models; transformers generates"
DRIVER = "install a newer driver, use another GPU, or go without: make clean install GPU=0"
MOVE = "export GRPO_NB_RUNS=/a/larger/disk"
READ = "No check reads completions: read some, docs/reading-a-run.md#reading-completions"


def examine(run: Run) -> list[dict[str, str]]:
    """Return stage, name, state, evidence and fix of every check, in the order of the stages.

    Raises:
        ValueError: manifest.json or config.yaml cannot be read.
    """
    lines, manifest = [], run.manifest()
    for stage in NOTEBOOKS:
        entry = manifest.get(stage, {})
        checks = [_stage(run, stage, entry), *entry.get("checks", [])]
        lines += [{"stage": stage, **check} for check in checks]
    whole = [_unchanged(run)]
    if not run.undone() and whole[0].state == "ok":
        whole += caused(run)
    return lines + [{"stage": "all", **check._asdict()} for check in whole]


def _stage(run: Run, stage: str, entry: dict[str, Any]) -> dict[str, str]:
    """Return whether a stage is done, or else why not and which command continues the run."""
    status, evidence = run.state(stage)
    state = {"done": "ok", "failed": "stop", "cut off": "stop"}.get(status, "not yet")
    fix = f"python -m grpo_nb run --name {run.name} --from {stage}"
    if status == "done":
        evidence, fix = f"done in {entry.get('seconds', 0):.0f} s", ""
    elif status == "running":
        fix = "wait"
    return {"name": NOTEBOOKS[stage], "state": state, "evidence": evidence, "fix": fix}


def _unchanged(run: Run) -> Check:
    """Check that each file of the stages that are done is as its stage wrote it."""
    end = run.undone() or "05"
    try:
        refuse_undone(run, end)
    except ValueError as error:
        return Check("unchanged", "stop", str(error), "")
    count = sum(len(run.manifest()[stage]["outputs"]) for stage in NOTEBOOKS if stage < end)
    return Check("unchanged", "ok", f"{count} files are as their stages wrote them")


def report(run: Run) -> int:
    """Print each check, with its fix on the line below; return 1 if one is a "stop", else 0."""
    lines = examine(run)
    for line in lines:
        print(line["stage"], shown(**{key: line[key] for key in Check._fields}), sep="  ")
    counts = Counter(line["state"] for line in lines)
    print(", ".join(f"{count} {state}" for state, count in counts.items()), READ, sep="\n")
    return int("stop" in counts)


def examine_machine() -> list[Check]:
    """Return every check of this machine, in the order in which the user should fix them."""
    gpu, fault, python = gpu_name(), gpu_fault(), f"Python {platform.python_version()}"
    root = runs_root() if runs_root().exists() else PROJECT_ROOT
    disk, memory = shutil.disk_usage(root).free / 2**30, psutil.virtual_memory().available / 2**30
    device = "; ".join(filter(None, [gpu or NO_GPU, fault]))
    lines = [  # name, whether it passes, evidence, fix
        ("gpu", not fault, device, DRIVER),
        ("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}, {python}", ""),
        ("disk", disk >= NEEDED_DISK_GIB, f"{disk:.0f} GiB free for runs/", MOVE),
        ("memory", memory >= NEEDED_MEMORY_GIB, f"{memory:.0f} GiB free", "jupyter lab stop"),
    ]
    install, versions = f"make install GPU={int(bool(gpu))}", installed_versions()
    lines += [(name, text != "not installed", text, install) for name, text in versions.items()]
    if gpu:  # vLLM 0.31 supports bitsandbytes, and so 4-bit weights, only with the plugin
        lines.append(("engine cuda", cuda_available(), "", "make clean install GPU=1"))
        for name in ("vllm", "vllm_bnb_plugin"):
            lines.append((f"engine {name}", bool(find_spec(name)), "", install))
    try:
        lines.append(("engine sandbox", True, f"{choose_backend()} runs generated code", ""))
    except RuntimeError as error:
        lines.append(("engine sandbox", False, str(error), "sudo apt-get install bubblewrap"))
    return [
        Check(name, "ok", text or "works") if works else Check(name, "stop", text or "missing", fix)
        for name, works, text, fix in lines
    ]


def doctor() -> int:
    """Print every check of this machine and its profile; return 1 if a check fails, else 0."""
    checks = examine_machine()
    print(*(shown(*check) for check in checks), sep="\n")
    print(f"profile {detect_profile()} fits this machine")
    return int(any(check.state == "stop" for check in checks))
