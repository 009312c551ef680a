"""`python -m grpo_nb checklist`: the checks of a run with their evidence, and what to do next.

Each stage writes its checks into its manifest entry. The checklist lists them, and adds the checks
that concern the whole run. A stage that is not done has the state "not yet".
"""

from collections import Counter
from typing import Any

from grpo_nb.checks import Check, shown
from grpo_nb.pipeline.caused import caused
from grpo_nb.runs import NOTEBOOKS, Run, refuse_undone

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
    """Check that the files of the stages that are done are as these wrote them."""
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
