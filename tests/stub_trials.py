"""A sweep whose trials execute a notebook of two cells, for test_sweep.py and test_cluster.py.

    python tests/stub_trials.py FOLDER JOBS TRIALS [SECONDS [OPTION …]]

is a driver, to be killed: `grpo-nb sweep`, but for what starts a trial. A trial appends its
name to FOLDER/begun, leaves the manifest of a finished run, at once as a real one does, and
then appends its name to FOLDER/ended, unless it is killed between the two.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from grpo_nb import __main__ as grpo_nb
from grpo_nb.pipeline import sweep
from grpo_nb.runs.files import atomic_path

CELLS = [
    "import json, pathlib, time\nfolder = pathlib.Path(run_folder)\nfolder.mkdir(exist_ok=True)",
    "time.sleep(seconds)\ndone = {f'0{i}': {'status': 'done'} for i in range(1, 5)}\n"
    "(folder / 'aside').write_text(json.dumps(done))\n"
    "(folder / 'aside').replace(folder / 'manifest.json')",
]
# Starts in 20 ms: neither the package nor a kernel is loaded.
TRIAL = """
import json, sys
folder, name, seconds, fails = sys.argv[1:]
def tell(what):
    with open(f"{folder}/{what}", "a") as file:
        file.write(name + "\\n")
tell("begun")
if open(f"{folder}/begun").read().split().count(name) <= int(fails):
    sys.exit("grpo-nb: not yet")
space = {"run_folder": f"{folder}/{name}", "seconds": float(seconds)}
for cell in json.load(open(f"{folder}/stub.ipynb"))["cells"]:
    exec("".join(cell["source"]), space)
tell("ended")
"""


def prepare(folder: Path, trials: int) -> sweep.Sweep:
    """The sweep of a folder; its files are written once, for trials may be reading them."""
    cells = [{"cell_type": "code", "source": cell} for cell in CELLS]
    grid = f"profile: tiny-cpu\ngrid: {{seed: {list(range(trials))}}}\nretries: 2\n"
    for name, text in (("stub.ipynb", json.dumps({"cells": cells})), ("stub.yaml", grid)):
        if not (folder / name).exists():
            with atomic_path(folder / name) as temporary:
                temporary.write_text(text)
    return sweep.read_sweep(folder / "stub.yaml")


def command(folder: Path, seconds: float = 0.0, fails: int = 0):
    start = [sys.executable, "-S", "-I", "-c", TRIAL, str(folder)]
    return lambda _, trial: [*start, trial.name, str(seconds), str(fails)]


def write(folder, text):
    (folder / "s.yaml").write_text(text)
    return folder / "s.yaml"


def told(folder, what):
    path = folder / what
    return path.read_text().split() if path.exists() else []


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def log_of(folder):
    return (folder / "stub.sweep/log.txt").read_text()


def at_work(folder: Path) -> list[psutil.Process]:
    """The processes of the trials, wherever they run."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if {"-S", str(folder)} <= set(p.info["cmdline"] or ())]


def main(place: str, jobs: str, trials: str, seconds: str = "0.05", *options: str) -> int:
    prepare(Path(place), int(trials))
    stub = command(Path(place), float(seconds))
    sweep.run_sweep = partial(sweep.run_sweep, command=stub)
    return grpo_nb.main(["sweep", f"{place}/stub.yaml", "--jobs", jobs, *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
