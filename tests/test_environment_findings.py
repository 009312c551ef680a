"""Findings: what is planted in an environment is found and named, and what is sound is left."""

import copy
import re

import pytest
from flawed_environments import CLEAN, FLAWED, WARNED, Hunt, hunt_rows, qwen3_tokenizer, row

from grpo_nb.environments import contract, findings
from grpo_nb.environments.contract import Environment
from grpo_nb.runs import PROJECT_ROOT, checks, read_rows

EXAMPLES = [
    name
    for name in contract.EXAMPLES
    if (PROJECT_ROOT / f"grpo_nb/environments/examples/{name}.py").is_file()
]
CAP = 3000  # a token is a byte here


@pytest.fixture(scope="module")
def tokenizer():
    return qwen3_tokenizer()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def found_in(kind, rows, *arguments):
    return findings.findings(Environment(kind), rows, *arguments)


@pytest.mark.parametrize("kind", FLAWED, ids=lambda kind: kind.__name__)
def test_what_is_planted_is_refused_by_the_finding_that_names_it_alone(
    kind, tokenizer, monkeypatch
):
    if FLAWED[kind] == "files":  # tests run in a temporary folder, where files may be written
        monkeypatch.setattr(findings, "EXEMPT", re.compile("(?!)"))
    found = found_in(kind, hunt_rows(), tokenizer, CAP)
    assert {check.name.partition(":")[0] for check in found} == {FLAWED[kind]}, found
    assert all(check.evidence and check.fix for check in found)
    with pytest.raises(ValueError, match=FLAWED[kind]):
        checks.refuse(found)


@pytest.mark.parametrize("kind", WARNED, ids=lambda kind: kind.__name__)
def test_what_a_person_should_know_is_a_warning(kind, monkeypatch):
    monkeypatch.setattr(findings, "SLOW", 0.015)
    monkeypatch.setattr(findings, "PATIENCE", 0.0)
    [found] = found_in(kind, hunt_rows())
    assert found.name.startswith(WARNED[kind])
    assert found.state == "warning"


@pytest.mark.parametrize("kind", CLEAN, ids=lambda kind: kind.__name__)
def test_what_is_clean_passes_without_a_word(kind, tokenizer):
    assert found_in(kind, CLEAN[kind], tokenizer, CAP) == []
    assert found_in(kind, CLEAN[kind][:3]) == []
