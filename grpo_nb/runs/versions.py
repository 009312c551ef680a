"""Which code and packages a result comes from."""

import subprocess
from importlib import metadata
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth", "datasets")
EXECUTED = ("grpo_nb", "data")


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
    """The project's commit; "unknown" outside a checkout.

    Behind it "-dirty" if what a run executes differs from it: the package, and the models and
    rows that come with it. A notebook differs as soon as its parameters are set, and is kept with
    the run as it was executed.
    """
    git = ["git", "-C", str(PROJECT_ROOT)]
    command = [*git, "describe", "--always", "--abbrev=40", "--exclude=*"]  # no tags
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *EXECUTED], check=False)
    except FileNotFoundError:
        return "unknown"
    dirty = "-dirty" if changed.returncode else ""
    return done.stdout.strip() + dirty if done.returncode == 0 else "unknown"
