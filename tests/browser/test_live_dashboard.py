"""The live dashboard in JupyterLab, while the cell that feeds it runs.

GRPO_NB_SCREENSHOT=<folder of a trained run> writes docs/dashboard.png again, from its metrics.
"""

import os
import re

import nbformat
import pytest
from browsing import NEEDS_BROWSER, SLOW, contrast, jupyterlab, run_all_cells
from playwright.sync_api import expect

from grpo_nb.runs import PROJECT_ROOT

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
TRAINED = os.environ.get("GRPO_NB_SCREENSHOT")
METRICS = (
    f"{TRAINED}/train/metrics.jsonl" if TRAINED else PROJECT_ROOT / "tests/healthy_metrics.jsonl"
)
LOOK = f"""from pathlib import Path
import pandas as pd
from grpo_nb import training, views
from grpo_nb.runs import Check
lines = training.read_lines(Path("{METRICS}"))
dashboard = views.TrainingDashboard(training.Controls())
dashboard"""
SAMPLE = """alerts = [Check("spike", "warning", "2.1, 0.3 before", "lower it")]
alerts += [Check("not a number", "stop", "reward is nan", "lower the rate")]
text = "<script>document.title = 'taken over'</script> " + "so and so " * 60
scores = {"exact_match_reward": 1.0, "reward": 1.5, "advantage": 0.7}
completions = [{"question": "1 + 1", "completion": text, **scores}]
sample = lambda step: completions"""
REPLAY = f"""files = sorted(Path("{TRAINED}/train").rglob("completions/*.parquet"))
frame = pd.concat(map(pd.read_parquet, files))
frame["question"] = [prompt[-1]["content"] for prompt in frame["prompt"]]
frame["completion"] = [completion[-1]["content"] for completion in frame["completion"]]
weights = dict(numeric_correctness_reward=1, soft_format_reward=0.25)
weights |= dict(incremental_format_reward=0.25, reasoning_quality_reward=0.125)
frame["reward"] = sum(frame[name] * weight for name, weight in weights.items())
columns = ["question", "completion", *weights, "reward", "advantage"]
sample = lambda step: frame.loc[frame["step"] == step, columns].to_dict("records")
alerts = []"""
TRAIN = """controls = dashboard.controls
for line in lines[:len(lines) * 7 // 10]:
    new = alerts if line["step"] == 9 else []
    update = training.Update(line, len(lines), sample(line["step"]), new)
    dashboard(update)
    assert not controls.stop.wait(0.001)
print("asked for a checkpoint:", controls.save.wait(100))
controls.save.clear()
dashboard(update)
print("asked to stop:", controls.stop.wait(100))"""


@pytest.fixture(scope="module")
def page(browser, forks, tmp_path_factory):
    """A notebook whose last cell keeps running till a button stops it."""
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    cells = [LOOK, REPLAY if TRAINED else SAMPLE, TRAIN]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "train.ipynb")
    with jupyterlab(browser, folder / "train.ipynb", settings) as page:
        run_all_cells(page)
        yield page


@pytest.fixture(scope="module")
def dashboard(page):
    shown = page.locator(".jp-OutputArea-output", has=page.get_by_text("Stop after this step"))
    expect(shown.get_by_role("img")).to_be_visible(timeout=SLOW)
    step = 70 if TRAINED else 42
    expect(shown.get_by_text(re.compile(rf"step {step} of \d+"))).to_be_visible(timeout=SLOW)
    return shown


def test_curves_alerts_and_completions_are_shown_while_the_cell_runs(page, dashboard):
    assert page.locator(".jp-InputPrompt").nth(2).inner_text() == "[*]:"
    charts = dashboard.get_by_role("img", name=re.compile(r"reward, weighted total: \d"))
    assert charts.evaluate("image => image.naturalWidth") > 900
    if TRAINED:
        return
    errors = dashboard.locator("li", has_text="step 9")
    assert [text.split(",")[0] for text in errors.all_inner_texts()] == ["stop", "warning"]
    link = re.compile(r"troubleshooting\.md#not-a-number$")
    expect(errors.first.get_by_role("link")).to_have_attribute("href", link)
    assert page.title() != "taken over"
    expect(dashboard.locator(".sheet .text").nth(1)).to_contain_text("so and so so and")


def test_it_reads_in_either_theme(page, dashboard):
    for scheme, light in (("dark", "false"), ("light", "true")):
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        for node in dashboard.locator("b, li a, td, th").all():
            assert contrast(node) > 4.5, node.inner_text()
    if TRAINED:
        dashboard.screenshot(path=PROJECT_ROOT / "docs/dashboard.png")


def test_the_buttons_reach_the_running_cell(page, dashboard):
    output = page.locator(".jp-OutputArea-output", has_text="asked for a checkpoint: True")
    save = dashboard.get_by_role("button", name="Save now")
    save.click()
    expect(output).to_be_visible()
    expect(save).to_be_enabled()
    dashboard.get_by_role("button", name="Stop after this step").click()
    expect(dashboard.get_by_role("status")).to_contain_text("stops after the step")
    expect(page.get_by_text("asked to stop: True")).to_be_visible()
    expect(page.locator(".jp-InputPrompt").nth(2)).to_have_text("[3]:")
