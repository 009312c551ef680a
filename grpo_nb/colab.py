"""Run the set-up cell of the notebooks on Colab: install the pinned packages into the runtime.

Only the standard library is imported here, because nothing is installed yet.
"""

import importlib
import os
import re
import subprocess
import sys
from importlib import metadata

from grpo_nb.machine import PROJECT_ROOT, gpu_fault, gpu_name

OTHER_GPU = (
    "Runtime → Change runtime type: take another GPU, which may come with a newer driver, or the "
    "CPU: every notebook runs there with the tiny model."
)
# The packages of Colab's kernel. With other versions, google.colab cannot be imported and no kernel
# starts after the restart, so their installed versions are kept.
KERNEL = re.compile(
    r"ipython.*|ipykernel|ipyparallel|jupyter.*|notebook.*|tornado|pyzmq|traitlets|prompt-toolkit|"
    r"comm|debugpy|jedi|parso|pexpect|ptyprocess|matplotlib-inline|decorator|wcwidth|nest-asyncio\d?|"
    r"stack-data|executing|asttokens|pure-eval"
)
RUNS_ON_DRIVE = "/content/drive/MyDrive/grpo_nb_runs"


def set_up(drive: bool = False) -> None:
    """Install the pinned packages, as `make install` does, except those of Colab's kernel.

    Args:
        drive: Whether to keep the runs on your Google Drive, so that the other notebooks find them:
            on Colab, each notebook has its own machine.

    Raises:
        SystemExit: The GPU cannot be used, or pip failed. It is also raised after pip has installed
            something, to ask for a restart, because old versions may be loaded. The message gives
            the reason.
    """
    if fault := gpu_fault():
        raise SystemExit(f"{fault}. {OTHER_GPU}")
    if drive:
        from google.colab import drive as google_drive

        google_drive.mount("/content/drive")
        os.environ["GRPO_NB_RUNS"] = RUNS_ON_DRIVE
    path = PROJECT_ROOT / ("requirements.txt" if gpu_name() else "requirements-cpu.txt")
    print(f"Installing {path.name}. The first time takes minutes and ends by asking for a restart.")
    before = _installed()
    pins = wanted(path.read_text(encoding="utf-8"), {name for name, _ in before})
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    for name, what in ((torch, [torch]), (path.name, ["--no-deps", *pins])):
        command = [sys.executable, "-m", "pip", "install", "-q", *what]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip could not install {name}; its message is above.")
    importlib.invalidate_caches()
    if _installed() != before:
        raise SystemExit("Installed. Runtime → Restart session, then Runtime → Run all again.")


def wanted(requirements: str, installed: set[str]) -> list[str]:
    """Return the pins in a list of requirements; leave out installed packages of Colab's kernel.

    Args:
        requirements: The text of a list of requirements.
        installed: The names of the packages that are installed.

    >>> wanted("ipython==9.18.0  # via x\\ncomm==0.2.3\\ntrl==1.15.0\\n", {"ipython", "trl"})
    ['comm==0.2.3', 'trl==1.15.0']
    """
    pins = re.findall(r"^[\w.-]+==[^\s;]+(?: *;[^#\n]+)?", requirements, re.MULTILINE)
    there = {_canonical(name) for name in installed}
    names = {pin: _canonical(pin.partition("==")[0]) for pin in pins}
    return [p.strip() for p, n in names.items() if not (n in there and KERNEL.fullmatch(n))]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed() -> set[tuple[str, str]]:
    return {(package.name, package.version) for package in metadata.distributions()}
