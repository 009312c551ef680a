"""The set-up cell of the notebooks on Colab: the pins into the runtime that is there.

It works before anything is installed: nothing but Python's own library is imported here.
"""

import importlib
import os
import re
import subprocess
import sys
from importlib import metadata

from grpo_nb.machine import PROJECT_ROOT, gpu_fault, gpu_name

OTHER_GPU = "Runtime → Change runtime type: take another GPU, or the CPU."
DRIVER = (
    "Runtime → Change runtime type: another GPU may come with a newer one. If none does, take the "
    "CPU: every notebook runs there with the tiny model. On a T4 of your own, install driver 580, "
    "which supports it."
)
RUNS_ON_DRIVE = "/content/drive/MyDrive/grpo_nb_runs"


def set_up(drive: bool = False) -> None:
    """Install the list that fits the runtime, as `make install` does.

    Args:
        drive: Keep the runs on your Google Drive, where the other notebooks find them: on Colab
            each notebook has a machine of its own.

    Raises:
        SystemExit: With one sentence, where the notebook cannot go on: the GPU cannot be used,
            pip failed, or it installed anything: the old versions may be loaded.
    """
    if fault := gpu_fault():
        raise SystemExit(f"{fault}. {DRIVER if 'driver' in fault else OTHER_GPU}")
    if drive:
        from google.colab import drive as google_drive

        google_drive.mount("/content/drive")
        os.environ["GRPO_NB_RUNS"] = RUNS_ON_DRIVE
    path = PROJECT_ROOT / ("requirements.txt" if gpu_name() else "requirements-cpu.txt")
    torch = re.search(r"^torch==\S+", path.read_text(encoding="utf-8"), re.MULTILINE)[0]
    print(f"Installing {path.name}. The first time this takes minutes and stops once, by design.")
    before = _installed()
    for what in ([torch], ["--no-deps", "-r", str(path)]):
        command = [sys.executable, "-m", "pip", "install", "-q", *what]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip could not install {what[-1]}; its message is above.")
    importlib.invalidate_caches()
    if _installed() != before:
        raise SystemExit("Installed. Runtime → Restart session, then Runtime → Run all again.")


def _installed() -> set[tuple[str, str]]:
    return {(found.name, found.version) for found in metadata.distributions()}
