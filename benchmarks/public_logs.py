"""What do the alerts say of the GRPO runs that others published?

    python benchmarks/public_logs.py --list                       # what to clone, and where to
    python benchmarks/public_logs.py --clones ../public           # the table; minutes
    python benchmarks/public_logs.py --clones ../public --write   # docs/alerts.md, and the rates

benchmarks/public_logs.yaml names each log by repository, path and commit, and says what a person
judged of it, from its curves and completions, before any tool was run. No log is committed here:
--clones is a folder with clones OWNER/NAME. The limits of the alerts were set with these logs and
with the recorded tiny runs (alarms.py) in view, so the figures are no test on unseen ones.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_nb.diagnosis import autopsy
from grpo_nb.runs.files import write_json

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/alerts.md"
RATES = HERE.parent / "grpo_nb/training/public_rates.json"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
# Which alerts name a fault as a person called it.
NAMES = {
    "reward never earned": {"constant reward", "nothing learnt"},
    "no signal": {"little signal", "nothing learnt", "nothing left to learn"},
    "length hacking": {"length creep"},
    "collapse": {"collapse", "reward falls"},
    "nothing learnt": {"nothing learnt", "little signal", "reward stuck"},
    "reward hacking": {"reward hacking", "held-out accuracy does not follow"},
    "reward stuck": {"reward stuck", "nothing learnt"},
    "format learnt, correctness flat": {
        "format learnt, correctness flat",
        "constant reward",
        "reward stuck",
    },
}


class Judged(NamedTuple):
    """Hold a log and what the alerts said of it: {alert: its state}; `error` if unreadable."""

    entry: dict[str, Any]
    alerts: dict[str, str]
    error: str = ""

    @property
    def outcome(self) -> str:
        """Say whether a sound run is left alone, and a faulty one is named."""
        verdict, alerts = self.entry["verdict"], set(self.alerts)
        if self.error:
            return "not read"
        if verdict == "sound":
            grave = "stop" in self.alerts.values()
            more = alerts - names(self.entry.get("also_true", ()))
            return "accused" if grave or len(more) > 1 else "left alone"
        if verdict == "faulty":
            faults = names(fault["what"] for fault in self.entry["faults"])
            return "named" if alerts & faults else "found" if alerts else "missed"
        return "–"


def names(faults: Any) -> set[str]:
    return {name for fault in faults for name in NAMES.get(fault, set()) | {fault}}


def judged(entry: dict[str, Any], clones: Path, folder: Path) -> Judged:
    """Take a log out of its clone, and read it."""
    clone, place = str(clones / entry["repo"]), f"{entry['commit']}:{entry['path']}"
    command = ["git", "-C", clone, "show", place]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        return Judged(entry, {}, f"not in the clone: {done.stderr.decode()[:80]}")
    path = folder / f"{entry['name']}{Path(entry['path']).suffix}"
    path.write_bytes(done.stdout)
    try:
        findings = autopsy(path).findings
    except ValueError as error:
        return Judged(entry, {}, str(error).partition(", but")[0][-60:])
    return Judged(entry, {c.name: c.state for c in findings if c.state in ("stop", "warning")})


def rates(logs: list[Judged]) -> dict[str, Any]:
    """Count the sound and the faulty runs that raised each alert."""
    readable = [log for log in logs if not log.error]
    kinds = ("sound", "faulty")
    of = {kind: [log for log in readable if log.entry["verdict"] == kind] for kind in kinds}
    rules = sorted({rule for log in readable for rule in log.alerts})
    counts = {r: {kind: sum(r in log.alerts for log in of[kind]) for kind in of} for r in rules}
    return {"runs": {kind: len(each) for kind, each in of.items()}, "alerts": counts}


def table(logs: list[Judged]) -> str:
    """Return the Markdown table, and the counts below it."""
    lines = ["| run | judged by a person | because | alerts | outcome |", "|---|---|---|---|---|"]
    for log in logs:
        entry = log.entry
        faults = ", ".join(fault["what"] for fault in entry.get("faults", ()))
        verdict = f"{entry['verdict']}{': ' if faults else ''}{faults} ({entry['confidence']})"
        alerts = ", ".join(f"**{n}**" if s == "stop" else n for n, s in log.alerts.items())
        source = f"{entry['repo']}, {Path(entry['path']).name} @ {entry['commit'][:8]}"
        cells = (source, verdict, entry["reason"], log.error or alerts or "none", log.outcome)
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    counts = {}
    for log in logs:
        key = f"{log.entry['verdict']}, {log.outcome}"
        counts[key] = counts.get(key, 0) + 1
    return "\n".join([*lines, "", "; ".join(f"{key}: {n}" for key, n in sorted(counts.items()))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clones", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name} and {RATES.name}")
    options = parser.parse_args()
    entries = yaml.safe_load((HERE / "public_logs.yaml").read_text(encoding="utf-8"))
    if options.list or not options.clones:
        for repo in sorted({entry["repo"] for entry in entries}):
            print(f"git clone https://github.com/{repo} CLONES/{repo}")
        return
    with tempfile.TemporaryDirectory() as folder:
        logs = [judged(entry, options.clones, Path(folder)) for entry in entries]
    text = table(logs)
    print(text)
    if options.write:
        before, after = PAGE.read_text(encoding="utf-8").split(BEGIN)
        page = f"{before}{BEGIN}\n\n{text}\n\n{END}{after.partition(END)[2]}"
        PAGE.write_text(page, encoding="utf-8")
        write_json(RATES, rates(logs))


if __name__ == "__main__":
    main()
