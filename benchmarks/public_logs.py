"""What do the alerts say of the GRPO runs that others published?

    python benchmarks/public_logs.py --list                       # what to clone, and where to
    python benchmarks/public_logs.py --clones ../public           # the table; minutes
    python benchmarks/public_logs.py --clones ../public --write   # public_logs.md

benchmarks/public_logs.yaml names each log by repository, path and commit, and says what was
judged of it, from its curves and completions, before any tool was run. No log is committed here:
--clones is a folder with clones OWNER/NAME. The limits of the alerts were set with these logs and
with the recorded tiny runs (alarms.py) in view, but for those marked unseen: `first_try` is what
was said of them before anything was changed on their account.
"""

import argparse
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_nb.diagnosis import autopsy

HERE = Path(__file__).resolve().parent
PAGE = HERE / "public_logs.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
# Which alerts name a fault as the judge called it.
NAMES = {
    "reward never earned": {"constant reward", "nothing learnt"},
    "no signal": {"little signal", "nothing learnt", "nothing left to learn"},
    "length hacking": {"length creep"},
    "collapse": {"collapse", "reward falls"},
    "nothing learnt": {"nothing learnt", "little signal", "reward stuck"},
    "reward hacking": {"reward hacking"},
    "reward stuck": {"reward stuck", "nothing learnt"},
    "format learnt, correctness flat": {
        "format learnt, correctness flat",
        "constant reward",
        "reward stuck",
    },
}


class Judged(NamedTuple):
    """Hold a log and what the alerts said of it: {alert: its state}; `error` if unreadable.

    `named` says which alerts name a fault as the judge called it.
    """

    entry: dict[str, Any]
    alerts: dict[str, str]
    error: str = ""
    named: Mapping[str, set[str]] = NAMES

    @property
    def outcome(self) -> str:
        """Say whether a sound run is left alone, and a faulty one is named."""
        verdict, alerts = self.entry["verdict"], set(self.alerts)
        if self.error:
            return "not read"
        if verdict == "sound":
            grave = "stop" in self.alerts.values()
            more = alerts - names(self.entry.get("also_true", ()), self.named)
            return "accused" if grave or len(more) > 1 else "left alone"
        if verdict == "faulty":
            faults = names((fault["what"] for fault in self.entry["faults"]), self.named)
            return "named" if alerts & faults else "found" if alerts else "missed"
        return "–"


def names(faults: Iterable[str], named: Mapping[str, set[str]]) -> set[str]:
    return {name for fault in faults for name in named.get(fault, set()) | {fault}}


def logs_named() -> list[dict[str, Any]]:
    """Return the logs of public_logs.yaml."""
    return yaml.safe_load((HERE / "public_logs.yaml").read_text(encoding="utf-8"))


def judged(entry: dict[str, Any], clones: Path, folder: Path) -> Judged:
    """Take a log out of its clone, and read it."""
    path = taken(entry, clones, folder)
    if not path:
        return Judged(entry, {}, "not in the clone")
    try:
        findings = autopsy(path).findings
    except ValueError as error:
        why = str(error).replace(str(path), "it").partition(": give")[0]
        return Judged(entry, {}, why[:80])
    return Judged(entry, {c.name: c.state for c in findings if c.state in ("stop", "warning")})


def taken(entry: dict[str, Any], clones: Path, folder: Path) -> Path | None:
    """Write the log of an entry into a folder; return None if its clone has it not."""
    clone, place = str(clones / entry["repo"]), f"{entry['commit']}:{entry['path']}"
    command = ["git", "-C", clone, "show", place]
    done = subprocess.run(command, capture_output=True, check=False)
    path = folder / f"{entry['name']}{Path(entry['path']).suffix}"
    path.write_bytes(done.stdout)
    return None if done.returncode else path


def table(logs: list[Judged]) -> str:
    """Return the Markdown tables of the logs in view and of those left aside, with counts."""
    parts = []
    for title, of in (("In view", False), ("Left aside for the test", True)):
        some = [log for log in logs if bool(log.entry.get("unseen")) is of]
        rows = [
            "| run | judged | because | alerts | outcome |",
            "|---|---|---|---|---|",
        ]
        rows += [row(log) for log in some]
        counts = [f"Now: {count((log.entry['verdict'], log.outcome) for log in some)}"]
        if of:
            first = count((log.entry["verdict"], log.entry["first_try"]) for log in some)
            counts.insert(0, f"First try: {first}\n")
        parts += [f"### {title}", "\n".join(rows), "\n".join(counts)]
    return "\n\n".join(parts)


def row(log: Judged) -> str:
    """Return a row of the table; for a log that was left aside, also the first outcome."""
    entry = log.entry
    faults = ", ".join(fault["what"] for fault in entry.get("faults", ()))
    verdict = f"{entry['verdict']}{': ' if faults else ''}{faults} ({entry['confidence']})"
    alerts = ", ".join(f"**{n}**" if s == "stop" else n for n, s in log.alerts.items())
    source = f"{entry['repo']}, {Path(entry['path']).name} @ {entry['commit'][:8]}"
    first = entry.get("first_try", log.outcome)
    outcome = log.outcome if first == log.outcome else f"{log.outcome} (first: {first})"
    cells = (source, verdict, entry["reason"], log.error or alerts or "none", outcome)
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def count(pairs: Iterable[tuple[str, str]]) -> str:
    """Return how often each pair of a verdict and an outcome comes."""
    counts = Counter(", ".join(pair) for pair in pairs)
    return "; ".join(f"{key}: {n}" for key, n in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clones", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    options = parser.parse_args()
    entries = logs_named()
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


if __name__ == "__main__":
    main()
