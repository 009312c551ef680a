"""Print what `check_rewards` says of each reward file, as JSON lines.

    python benchmarks/reward_files/judge.py dev

Each file is judged in a process of its own, since some change the process that runs them.
"""

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

from grpo_nb import check_rewards
from grpo_nb.reward_lab import linter, programs
from grpo_nb.rewards.load import rewards_of

FOLDER = Path(__file__).parent
SECONDS = 60
# No reward here has a time limit of its own that is longer: what hangs is not waited for.
linter.HANGS = programs.ENDLESS = 5.0


def about(path):
    """What the first docstring says of a file: rows, truth, kind, severity."""
    text = re.search(r'"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)[1]
    return dict(re.findall(r"^(rows|truth|kind|severity): (.*)$", text, re.MULTILINE))


def verdict_on(path):
    """The verdict on a file, with the rows that it names."""
    lines = (FOLDER / "rows" / f"{about(path)['rows']}.jsonl").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    funcs, weights = zip(*rewards_of(module, {}), strict=True)
    rows = [json.loads(line) for line in lines.splitlines()]
    return check_rewards(list(funcs), rows, reward_weights=weights)


def judged(path):
    """A line about a file; the verdict is made in a fork."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(SECONDS)
        verdict = verdict_on(path)
        findings = [[check.state, check.name.rpartition(": ")[2]] for check in verdict.findings]
        bare = [check.name for check in verdict.findings if not (check.evidence and check.fix)]
        found = {"findings": findings, "bare": bare, "seconds": verdict.seconds}
        found["text"] = str(verdict)
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as result:
        text = result.read()
    os.waitpid(child, 0)
    name = path.relative_to(FOLDER).as_posix()
    return {"file": name, **about(path), **(json.loads(text) if text else {"findings": None})}


def main(parts):
    """Judge the files whose path contains one of the parts."""
    for path in sorted(FOLDER.glob("*/*/*.py")):
        if not parts or any(part in path.as_posix() for part in parts):
            print(json.dumps(judged(path)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    main(sys.argv[1:])
