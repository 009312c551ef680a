"""The set-up cell of the notebooks on Colab: the pins into the runtime that is there.

It works before anything is installed: nothing but Python's own library is imported here.
"""

import importlib
import os
import re
import subprocess
import sys
from importlib import metadata

from grpo_nb.machine import PROJECT_ROOT, gpu_fault, gpu_name, version_of

RUNS_ON_DRIVE = "/content/drive/MyDrive/grpo_nb_runs"


def set_up(drive: bool = False) -> None:
    """Install the list that fits the runtime, as `make install` does.

    Args:
        drive: Keep the runs on your Google Drive, where the other notebooks find them: on Colab
            each notebook has a machine of its own.

    Raises:
        SystemExit: With one sentence, where the notebook cannot go on: the GPU cannot be used,
            pip failed, or a package was replaced of which the old version is loaded.
    """
    if fault := gpu_fault():
        raise SystemExit(f"{fault}. Runtime → Change runtime type: take another GPU, or the CPU.")
    if drive:
        from google.colab import drive as google_drive

        google_drive.mount("/content/drive")
        os.environ["GRPO_NB_RUNS"] = RUNS_ON_DRIVE
    path = PROJECT_ROOT / ("requirements.txt" if gpu_name() else "requirements-cpu.txt")
    torch = re.search(r"^torch==\S+", path.read_text(encoding="utf-8"), re.MULTILINE)[0]
    print(f"Installing {path.name}: minutes the first time.")
    loaded = _loaded()
    for what in ([torch], ["--no-deps", "-r", str(path)]):
        command = [sys.executable, "-m", "pip", "install", "-q", *what]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip could not install {what[-1]}; its message is above.")
    importlib.invalidate_caches()
    replaced = [name for name, version in loaded.items() if version_of(name) != version]
    if replaced:
        raise SystemExit(
            f"Installed, and {', '.join(sorted(replaced))} is still loaded in its old version. "
            "Runtime → Restart session, then run this cell again."
        )


def _loaded() -> dict[str, str]:
    """Version of each distribution of which this process has loaded a module."""
    modules = {name.partition(".")[0] for name in list(sys.modules)}
    owners = metadata.packages_distributions().items()
    return {
        name: version_of(name) for module, names in owners if module in modules for name in names
    }
