"""The 149 reward files with known truth: which are accused, and of what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "benchmarks" / "reward_files"
# Files whose truth is not found, with the reason; a file that is found after all must leave.
MISSED = {
    "held_out/flawed/boxed_wanted.py": "a warning: a box inside the tags asked for is paid",
    "held_out/flawed/common_substring.py": "a warning: it is slow, and does end",
    "held_out/flawed/concise.py": "the shortest right answer earns more than the empty completion",
}
# kind of flaw: the findings that call it by its name
NAMES = {
    "clock": "clock",
    "constant": "constant, nothing earns",
    "empty_reference": "empty reference",
    "format_outweighs": "form outweighs",
    "harsh": "line breaks, spelling",
    "hides_error": "every number, cut off, nothing written",
    "missing_column": "missing column",
    "none": "None",
    "not_finite": "not finite",
    "nothing_earns": "nothing earns, form not read, reference loses",
    "order": "order",
    "pays_any_answer": "any answer, nothing earns, program",
    "pays_echo": "copied from the prompt",
    "pays_empty": "nothing written",
    "pays_empty_form": "empty form",
    "pays_hedging": "several answers, mentioned",
    "pays_keywords": "stuffing",
    "pays_length": "length, length pays",
    "pays_mention": "mentioned",
    "pays_nan": "not a number",
    "pays_near": "near miss",
    "pays_negated": "negated",
    "pays_partial": "unfinished, part of a number, cut off",
    "raises": "raises",
    "random": "random",
    "self_judged": "program, constant, own words",
    "side_effect": "side effects",
    "sign": "sign, length pays",
    "slow": "hangs, slow",
    "state": "state",
    "wrong_length": "wrong length",
    "wrong_type": "wrong type",
}
# Accused of something else, which their flaw brings with it.
OTHERWISE = {
    "dev/flawed/inverse_error.py",
    "held_out/flawed/column_by_default.py",
    "held_out/flawed/loose_allclose.py",
    "held_out/flawed/other_errors_pass.py",
    "held_out/flawed/own_equals.py",
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


def test_what_is_found_is_called_by_its_name_with_evidence_and_a_fix(verdicts):
    unnamed = set()
    for line in verdicts.values():
        kinds = line.get("kind", "").split(", ") if line["truth"] == "flawed" else []
        names = {name for kind in kinds for name in NAMES[kind].split(", ")}
        if kinds and not names & {name for _, name in line["findings"]}:
            unnamed.add(line["file"])
        assert not line["bare"], line["file"]
    assert unnamed - MISSED.keys() == OTHERWISE


def test_what_is_sound_is_not_accused(verdicts):
    sound = [line for line in verdicts.values() if line["truth"] == "sound"]
    accused = {line["file"] for line in sound if "stop" in dict(line["findings"])}
    assert accused == set(), [verdicts[name]["text"] for name in accused]
