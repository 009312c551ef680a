"""docs/reading-a-run.md names every metric of a run."""

import re

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.training import read_lines

PAGE = (PROJECT_ROOT / "docs/reading-a-run.md").read_text(encoding="utf-8")
TABLES = PAGE.partition("## The metrics")[2].partition("\n## ")[0]
CELLS = re.findall(r"^\| (`.+?`) \|", TABLES, re.MULTILINE)
NAMED = [name for cell in CELLS for name in re.findall("`([^`]+)`", cell)]


def general(key):
    """A metric of one reward as that of any."""
    key = re.sub(r"^rewards/[^/]+/", "rewards/<name>/", key)
    return re.sub(r"^[^/]+/(skipped|failures|factor|drift|length|markup|style)$", r"<name>/\1", key)


def test_each_metric_of_a_run_is_on_the_page(demo_run):
    lines = read_lines(demo_run / "train/metrics.jsonl")
    assert len(set(NAMED)) == len(NAMED)
    assert {general(key) for line in lines for key in line} - set(NAMED) == set()
