"""The Reward Lab in JupyterLab, in a real browser.

GRPO_NB_SCREENSHOT=1 writes docs/reward_lab.png again.
"""

import os

import nbformat
import pytest
from browsing import NEEDS_BROWSER, SLOW, contrast, jupyterlab, run_all_cells
from playwright.sync_api import expect

from grpo_nb.machine import PROJECT_ROOT

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
REWARDS = """import re

tags = re.compile(r"<reasoning>.*</reasoning>\\s*<answer>(.*)</answer>", re.DOTALL)


def match_format(completions, **kwargs):
    return [1.0 if tags.search(one[0]["content"]) else 0.0 for one in completions]


def check_answer(completions, answer, **kwargs):
    found = [tags.search(one[0]["content"]) for one in completions]
    return [3.0 if f and a in f[1] else 0.0 for f, a in zip(found, answer)]"""
DATA = """sums = [(47, 38), (9, 6), (30, 12), (5, 8), (21, 3)]
dataset = [
    {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
    for a, b in sums
]"""
OPEN = """from grpo_nb import RewardLab

RewardLab([match_format, check_answer], dataset)"""


@pytest.fixture(scope="module")
def lab(browser, forks, tmp_path_factory):
    """The Reward Lab in a person's own notebook."""
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    cells = [*map(nbformat.v4.new_code_cell, (REWARDS, DATA, OPEN))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "mine.ipynb")
    with jupyterlab(browser, folder / "mine.ipynb", settings) as page:
        run_all_cells(page)
        lab = page.locator(".jp-OutputArea-output", has=page.get_by_role("status"))
        expect(lab.locator(".sheet").first).to_be_visible(timeout=SLOW)
        yield lab


def choose(lab, name):
    lab.get_by_role("listbox", name="Completion").select_option(name)


def test_the_verdict_stands_first_and_the_attacks_that_win_above_the_right_answer(lab):
    expect(lab.get_by_role("status")).to_contain_text("do not train: several answers, negated")
    options = lab.get_by_role("listbox").locator("option").all_text_contents()
    names = [each.replace("\xa0", " ") for each in options]
    assert names[0] == "4 · the right answer"
    assert "4 · one or the other (stop)" in names and "0 · plea for full marks" in names
    expect(lab.get_by_text("compare the whole answer; refuse several")).to_be_visible()
    if os.environ.get("GRPO_NB_SCREENSHOT"):
        choose(lab, "4 · one or the other (stop)")
        expect(lab.locator("mark")).to_have_text("15 or 85")
        lab.page.set_viewport_size({"width": 1100, "height": 1500})
        lab.page.screenshot(path=PROJECT_ROOT / "docs/reward_lab.png")


def test_a_completion_is_chosen_edited_and_scored_by_the_keyboard(lab):
    box, earned = lab.get_by_role("textbox"), lab.locator("p")
    choose(lab, "1 · empty form (warning)")
    expect(box).to_have_value("<reasoning></reasoning><answer></answer>")
    expect(earned).to_contain_text("this earns 1; the right answer earns 4")
    box.fill("<reasoning>so</reasoning><answer>about 85</answer>")
    lab.page.keyboard.press("Tab")
    expect(earned).to_contain_text("this earns 4;")
    expect(lab.locator("mark")).to_have_text("about 85")
    row = lab.get_by_role("combobox", name="Row")
    row.select_option("2. What is 9 + 6?")
    expect(earned).to_contain_text("this earns 1;")
    expect(box).to_have_value("<reasoning></reasoning><answer></answer>")


def test_it_reads_in_either_theme(lab):
    choose(lab, "4 · the right answer")
    expect(lab.locator("mark")).to_have_text("15")
    for scheme, light in (("dark", "false"), ("light", "true")):
        lab.page.emulate_media(color_scheme=scheme)
        expect(lab.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        for node in lab.locator(".sheet th, mark, p, select, label, b").all():
            assert contrast(node) > 4.5, node.inner_text()
