"""docs/troubleshooting.md has a section for all that can be shown, and for nothing else."""

import ast
import inspect
import re

import pytest

from grpo_nb.data import split
from grpo_nb.data.sources import REMEDIES
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.reward_lab import gate
from grpo_nb.reward_lab.attacks import ANY, BY_ANSWER
from grpo_nb.reward_lab.check import FIXES
from grpo_nb.training import health, preflight

PAGE = (PROJECT_ROOT / health.PAGE).read_text(encoding="utf-8")
CHAPTERS = {
    head: re.findall(r"^### (.+)$", body, re.MULTILINE)
    for head, body in re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", PAGE, re.MULTILINE)
}


def anchor(heading):
    """As a code host and the handbook's build make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


ANCHORS = [anchor(head) for chapter, heads in CHAPTERS.items() for head in (chapter, *heads)]


def calls(module, name):
    """Arguments of each call of `name` in a module, those that are plain texts."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
            yield [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]


def test_no_two_sections_have_one_anchor_and_links_within_the_page_lead_somewhere():
    assert len(set(ANCHORS)) == len(ANCHORS)
    linked = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert linked and set(linked) <= set(ANCHORS)


@pytest.mark.parametrize(
    ("chapter", "known"),
    [
        ("Alerts of a training", health.ALERTS),
        ("Rows that are refused", {*REMEDIES, split.REPEATED, split.LEAKS}),
    ],
)
def test_a_chapter_has_a_section_for_each(chapter, known):
    assert set(CHAPTERS[chapter]) == set(known)


def test_an_alert_names_its_section():
    assert all(health.section(rule) == f"{health.PAGE}#{anchor(rule)}" for rule in health.ALERTS)
    watch = health.Watch(health.Expected({"right": (1.0, 0.0, 1.0)}))
    (alert,) = watch.feed({"step": 1, "reward": None})
    assert alert.fix.endswith("; see docs/troubleshooting.md#not-a-number")
    assert alert.fix in health.summary([alert])


def test_the_checks_before_a_training_are_those_that_can_fail():
    failing = {check for check, result, *_ in calls(preflight, "Check") if result != "ok"}
    assert set(CHAPTERS["Checks before a training"]) == failing
    assert all(health.section(check).endswith(f"#{anchor(check)}") for check in failing)


def test_the_verdicts_on_rewards_are_those_of_the_gate():
    source = inspect.getsource(gate)
    assert all(head in source for head in CHAPTERS["Verdicts on the rewards"])


def test_the_table_of_findings_has_those_that_there_are():
    """Each has a fix, except notes, and the finding of a run's own form."""
    table = PAGE.partition("\n## Findings on the rewards\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(names) == len(set(names))
    assert set(names) == {*FIXES, "environment"}
    attacks = [*ANY, *(attack for each in BY_ANSWER.values() for attack in each)]
    assert {attack.family for attack in attacks} <= set(names)
