"""Stand-in trials for test_sweep.py, which start in 20 ms.

    python tests/stub_trials.py FOLDER TRIALS [SECONDS [OPTION …]]

is a driver, to be killed: `grpo-nb sweep`, but for what starts a trial. A trial takes its run's
lock, as a real one does, and adds a line to FOLDER/told at each event: "begun NAME", and
"ended NAME" once the manifest of a finished run is there.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from grpo_nb import __main__ as grpo_nb
from grpo_nb.pipeline import sweep

TRIAL = """
import fcntl, json, os, sys, time
folder, name, settings, seconds, fails = sys.argv[1:]
os.makedirs(f"{folder}/{name}", exist_ok=True)
lock = open(f"{folder}/{name}/.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
def tell(what):
    with open(f"{folder}/told", "a") as file:
        file.write(f"{what} {name}\\n")
def write(file, text):
    with open(f"{folder}/{name}/aside", "w") as aside:
        aside.write(text)
    os.replace(f"{folder}/{name}/aside", f"{folder}/{name}/{file}")
tell("begun")
pairs = {name: [value, "set"] for name, value in json.loads(settings).items()}
write("config.yaml", json.dumps({"profile": "tiny-cpu", "settings": pairs}))
if open(f"{folder}/told").read().splitlines().count(f"begun {name}") <= int(fails):
    sys.exit("grpo-nb: not yet")
time.sleep(float(seconds))
write("manifest.json", json.dumps({f"0{i}": {"status": "done"} for i in range(1, 5)}))
tell("ended")
"""


def prepare(folder: Path, trials: int) -> sweep.Sweep:
    """A sweep of so many seeds."""
    seeds = list(range(trials))
    return sweep.read_sweep(write(folder, f"profile: tiny-cpu\ngrid: {{seed: {seeds}}}", "stub"))


def write(folder: Path, text: str, name: str = "s") -> Path:
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def command(folder: Path, seconds: float = 0.0, fails: int = 0):
    start = [sys.executable, "-S", "-I", "-c", TRIAL, str(folder)]

    def of_trial(_, trial):
        return [*start, trial.name, json.dumps(trial.settings), str(seconds), str(fails)]

    return of_trial


def told(folder: Path, event: str = "") -> list[str]:
    """Names of the trials of which this was told, or all lines, in their order."""
    path = folder / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.startswith(event)] if event else lines


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def at_work(folder: Path) -> list[psutil.Process]:
    """The processes of the trials, wherever they run."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if {"-S", str(folder)} <= set(p.info["cmdline"] or ())]


def main(place: str, trials: str, seconds: str = "0.05", *options: str) -> int:
    stub = command(Path(place), float(seconds))
    sweep.run_sweep = partial(sweep.run_sweep, command=stub)
    prepare(Path(place), int(trials))
    return grpo_nb.main(["sweep", f"{place}/stub.yaml", *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
