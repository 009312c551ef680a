"""The Environment Lab in JupyterLab, over episodes of a model that says what it was told to.

GRPO_NB_SCREENSHOT=1 writes docs/environment_lab.png again.
"""

import os
import re

import nbformat
import pytest
from browsing import NEEDS_BROWSER, SLOW, contrast, jupyterlab, run_all_cells
from playwright.sync_api import expect

from grpo_nb.runs import PROJECT_ROOT

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
MADE = f"""import sys
sys.path.append("{PROJECT_ROOT}/tests")
import scripted_model
from grpo_nb import environments, views
from grpo_nb.reward_lab import RewardTest, bench_of
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
config = resolve("tiny-cpu", {{"task": "guess"}})
rows = scripted_model.rows_of("guess", 16)
call = lambda n: {{"name": "guess", "arguments": {{"n": n}}}}
text = "<script>document.title = 'taken over'</script> costs $5 or $6, $x^2$"
def scripts(row):
    low = row["low"]
    halved = environments.load("guess").solution(row)
    ends = [call(low), call(low + 7), call(low + 1), call(low + 6), "I do not know."]
    return [[*halved, "Found it."], ends, ['<tool_call>\\n{{"name": guess}}'], [text]]
tried = scripted_model.played(environments.of(config), rows[:4], scripts)
bench = bench_of(config, load_preset("environment"), scripted_model.tokenizer())"""
OPEN = "views.lab(RewardTest(Stage(Run('lab'), '02', config), rows, tried, bench))"


@pytest.fixture(scope="module")
def lab(browser, forks, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, (MADE, OPEN))])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "lab.ipynb")
    with jupyterlab(browser, folder / "lab.ipynb", settings) as page:
        run_all_cells(page)
        button = page.get_by_role("button", name="Play")
        lab = page.locator(".jp-OutputArea-output", has=button)
        expect(lab.locator("caption")).to_contain_text("rollout 1", timeout=SLOW)
        yield lab


def test_episodes_are_read_changed_and_played_again(lab):
    page, box = lab.page, lab.get_by_role("textbox", name="Turns")
    page.set_viewport_size({"width": 1100, "height": 1250})
    player, told = lab.get_by_role("listbox", name="Player"), lab.locator("caption").last
    expect(lab.get_by_text("scripted policies find no fault")).to_be_visible()
    roles = lab.locator("table.sheet").last.locator("td:first-child")
    turns = ["assistant", "tool"] * 4
    assert roles.all_inner_texts() == ["system, user", *turns, "assistant"]
    if os.environ.get("GRPO_NB_SCREENSHOT"):
        lab.screenshot(path=PROJECT_ROOT / "docs/environment_lab.png")
    page.set_viewport_size({"width": 1280, "height": 1600})
    player.select_option("scripted: oracle")
    expect(told).to_contain_text(
        "scripted: oracle, ended: answered\nreward 1, mean of the group 0.6"
    )
    player.select_option(label="rollout 4 (reward 0, advantage -0.87)")
    expect(lab.locator("table.sheet").last).to_contain_text(
        "'taken over'</script> costs $5 or $6, $x^2$"
    )
    assert page.title() != "taken over" and lab.locator("mjx-container").count() == 0
    expect(box).to_have_value(re.compile("taken over"))
    lab.get_by_text("as the model reads it").click()
    expect(lab.locator("details .text")).to_contain_text("<|im_start|>system\nFind the secret")
    for wrong in ("guess(61)", '{"name": "guess"}'):
        box.fill(wrong)
        lab.get_by_role("button", name="Play").click()
        expect(lab.get_by_role("alert")).to_contain_text(f"line 1 is not a turn: {wrong}")
    box.fill('{"name": "guess", "arguments": {"n": 61}}\n{"name": "gess", "arguments": {}}')
    lab.get_by_role("button", name="Play").click()
    expect(told).to_contain_text("your own turns, ended: answered\nreward 0, mean of the group 0.4")
    expect(lab.get_by_role("alert")).to_have_count(0)
    expect(lab.locator("table.sheet").last).to_contain_text("→ {'error': ")
    lab.get_by_role("combobox", name="Row").select_option(index=1)
    expect(told).to_contain_text("rollout 1, ended: answered")
    for scheme, light in (("dark", "false"), ("light", "true")):
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        for node in lab.locator(".sheet th, .sheet td, caption, button, select, label").all():
            assert contrast(node) > 4.5, node.inner_text()
