"""The 149 reward files with known truth: which are accused, and of what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILES = Path(__file__).parents[1] / "reward_files"
# Files whose truth is not found, with the reason; a file that is found after all must leave.
MISSED = {
    "held_out/flawed/swallowed.py": "a warning: the columns read may hold no answers",
    "held_out/flawed/boxed_wanted.py": "a warning: a box inside the tags asked for is paid",
    "held_out/flawed/common_substring.py": "a warning: it is slow, and does end",
    "held_out/flawed/concise.py": "the shortest right answer earns more than the empty completion",
}


@pytest.fixture(scope="module")
def verdicts():
    """What judge.py says of every file, {file: line}."""
    command = [sys.executable, str(FILES / "judge.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line["file"]: line for line in map(json.loads, done.stdout.splitlines())}


def found(line):
    """Whether a file is accused as it deserves: of a warning by any finding, else by a stop."""
    levels = {"stop"} if line.get("severity") != "warning" else {"stop", "warning"}
    return bool(levels & {state for state, _ in line["findings"]})


def test_every_file_is_judged(verdicts):
    assert len(verdicts) == 149
    assert [line["file"] for line in verdicts.values() if line["findings"] is None] == []


def test_what_is_flawed_is_found(verdicts):
    flawed = [line for line in verdicts.values() if line["truth"] == "flawed"]
    assert {line["file"] for line in flawed if not found(line)} == MISSED.keys()


def test_what_is_sound_is_not_accused(verdicts):
    sound = [line for line in verdicts.values() if line["truth"] == "sound"]
    accused = {line["file"] for line in sound if "stop" in dict(line["findings"])}
    assert accused == set(), [verdicts[name]["text"] for name in accused]
