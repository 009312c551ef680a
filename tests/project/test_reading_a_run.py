"""docs/reading-a-run.md names every metric of a run, and none that there is not."""

import inspect
import re

import pytest

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


@pytest.fixture(scope="module")
def logged(demo_run):
    lines = read_lines(demo_run / "train/metrics.jsonl")
    return {general(key) for line in lines for key in line}


def test_each_metric_of_a_run_is_on_the_page(logged):
    assert len(set(NAMED)) == len(NAMED)
    assert logged - set(NAMED) == set()


def test_each_metric_on_the_page_is_written_by_us_or_by_trl(logged):
    from trl import GRPOTrainer

    ours = (PROJECT_ROOT / "grpo_nb").rglob("*.py")
    source = inspect.getsource(inspect.getmodule(GRPOTrainer))
    source += "".join(path.read_text(encoding="utf-8") for path in ours)
    for name in set(NAMED) - logged:
        written = name.replace("<name>", r"\{[^}]+\}")
        assert re.search(f'"{written}"', source), name
