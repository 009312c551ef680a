"""The Reward Lab in JupyterLab, in a real browser.

GRPO_NB_SCREENSHOT=1 writes docs/reward_lab.png again.
"""

import os
import re

import nbformat
import pytest
from browsing import NEEDS_BROWSER, SLOW, contrast, jupyterlab, run_all_cells
from playwright.sync_api import expect

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.notebooks import run_pipeline
from grpo_nb.reward_lab import refuse_untested
from grpo_nb.rewards import load_preset
from grpo_nb.runs import start_stage

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
RIGHT = "<reasoning>so</reasoning><answer>{}</answer>"
MINE = """def right(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(f">{want}<" in text) for want, text in zip(answer, texts)]

@rewards.reward()
def brief(response: str) -> float:
    return float(len(response) <= 300)
"""
ENDLESS = """def endless(completions, **kwargs):
    while True:
        pass
"""
SET = {"rewards.baseline_prompts": 4, "rewards.seconds": 600}
OPEN = f"""from grpo_nb import reward_lab, rewards, runs, views
stage = runs.start_stage("02", "demo", {SET})
views.lab(reward_lab.open_test(stage, rewards.load_rewards(stage.config.rewards)))"""
EXACT = "reward_funcs = [rewards.numeric_correctness_reward]"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose data is prepared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield run_pipeline("demo", "tiny-cpu", last="01")


@pytest.fixture(scope="module")
def lab(run, browser, forks, tmp_path_factory):
    """The Reward Lab with the run's preset, in a notebook that has started stage 02."""
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    title = nbformat.v4.new_markdown_cell("# The Reward Lab of run demo")
    notebook = nbformat.v4.new_notebook(cells=[title, nbformat.v4.new_code_cell(OPEN)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "lab.ipynb")
    with jupyterlab(browser, folder / "lab.ipynb", settings) as page:
        run_all_cells(page)
        lab = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Adopt"))
        expect(lab.locator(".sheet .chosen")).to_be_visible(timeout=SLOW)
        yield lab


def edit(lab, text, number=1):
    lab.get_by_role("combobox", name="Completion").select_option(str(number))
    expect(lab.locator(".sheet .chosen td").first).to_have_text(str(number))
    lab.get_by_role("textbox", name="Edit").fill(text)
    lab.page.keyboard.press("Tab")


def reference_of(lab):
    return re.search(r"reference answer (\S+)", lab.locator(".sheet caption").inner_text())[1]


def write(lab, code, button):
    lab.get_by_role("textbox", name="Rewards").fill(code)
    lab.get_by_role("button", name=button, exact=True).click()


def test_weights_and_completions_are_changed_by_the_keyboard_and_judged(lab):
    totals, advantages = (lab.locator(f".sheet td:nth-last-child({place})") for place in (2, 1))
    reference, chosen = reference_of(lab), lab.locator(".sheet .chosen td")
    edit(lab, RIGHT.format(reference), number=2)
    expect(totals.nth(1)).to_have_text("1.5")
    said = f"1\n{reference}, read as a number, is {reference}"
    expect(chosen.nth(3)).to_have_text(said, use_inner_text=True)
    edit(lab, "no answer and no tags")
    expect(totals.first).to_have_text("0")
    before = advantages.all_inner_texts()
    correct, format_slider = lab.get_by_role("slider").nth(0), lab.get_by_role("slider").nth(1)
    format_slider.press("ArrowRight")
    expect(lab.locator(".sheet th").nth(4)).to_contain_text("× 0.3125")
    assert float(totals.nth(1).inner_text()) == pytest.approx(1.5 + 1 / 16, abs=0.01)
    assert advantages.all_inner_texts() != before
    correct.press("Home")  # 0: switched off
    expect(totals.nth(1)).to_have_text("0.562", timeout=SLOW)
    lab.get_by_role("button", name="Run", exact=True).click()
    expect(lab.get_by_role("status")).to_contain_text("FAILED", timeout=SLOW)
    expect(lab.get_by_role("status")).to_contain_text("nothing earns: no way of writing")
    lab.get_by_role("button", name="Reset").click()
    expect(chosen.nth(1)).not_to_contain_text("no answer and no tags")


def test_a_reward_that_never_ends_is_stopped(run, lab):
    """It is stopped twice, and other rewards run at once."""
    stop, shown = lab.get_by_role("button", name="Stop", exact=True), lab.get_by_role("status")
    expect(stop).to_be_disabled()
    for button in ("Run", "Adopt"):
        write(lab, ENDLESS, button)
        expect(shown).to_contain_text("Running: a reward is stopped after 600 s")
        stop.click()
        expect(shown).to_have_text("Stopped while endless was running", timeout=10_000)
        expect(stop).to_be_disabled()
        expect(lab.get_by_role("alert")).to_have_count(0)
    assert run.state("02").status == "running", "nothing is adopted"
    write(lab, "", "Run")
    expect(lab.get_by_role("slider")).to_have_count(4, timeout=SLOW)
    expect(lab.get_by_role("button", name="Run", exact=True)).to_be_enabled(timeout=SLOW)


def test_it_reads_in_either_theme(lab):
    for scheme, light in (("dark", "false"), ("light", "true")):
        lab.page.emulate_media(color_scheme=scheme)
        expect(lab.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        for node in lab.locator(".sheet th, .chosen td, mark, pre, button, select, label").all():
            assert contrast(node) > 4.5, node.inner_text()


def test_a_reward_that_raises_is_one_sentence_with_its_line(lab):
    write(lab, "@rewards.reward()\ndef careless(response):\n    return response[99:][0]", "Run")
    alert = lab.get_by_role("alert")
    expect(alert).to_contain_text("line 3 (return response[99:][0]): IndexError: string index")
    assert contrast(alert) > 4.5
    expect(lab.get_by_role("slider")).to_have_count(4)


def test_rewards_are_written_run_and_adopted(run, lab):
    """Notebook 3 trains with what was adopted."""
    write(lab, MINE, "Run")
    expect(lab.get_by_role("slider")).to_have_count(2, timeout=SLOW)
    expect(lab.locator(".sheet th").nth(3)).to_have_text("right × 1")
    for shown in ("FAILED", "several answers", "zero-advantage groups"):
        expect(lab.get_by_text(shown).last).to_be_visible(timeout=SLOW)
    if os.environ.get("GRPO_NB_SCREENSHOT"):
        lab.page.set_viewport_size({"width": 1100, "height": 1500})
        lab.page.screenshot(path=PROJECT_ROOT / "docs/reward_lab.png")
    for code, said in (("1 / 0", "line 1 (1 / 0): Zero"), ("def f(", "line 1 (def f(): Syn")):
        write(lab, code, "Run")
        expect(lab.get_by_role("alert")).to_contain_text(said)
        expect(lab.get_by_role("alert")).to_be_in_viewport()
        expect(lab.get_by_text("Traceback (most")).not_to_be_visible()
    write(lab, EXACT, "Run")
    expect(lab.get_by_role("slider")).to_have_count(1, timeout=SLOW)
    expect(lab.get_by_role("alert")).to_have_count(0)
    assert run.state("02").status == "running", "nothing is adopted"
    lab.get_by_role("slider").press("ArrowLeft")
    expect(lab.locator(".sheet th").nth(3)).to_contain_text("× 0.9375", timeout=SLOW)
    lab.get_by_role("button", name="Adopt").click()
    then = "Adopted: mine.py. 03_train_grpo trains with it"
    expect(lab.get_by_role("status")).to_have_text(then, timeout=SLOW)
    trained = start_stage("03", "demo").config.rewards
    assert trained.preset == str(run / "rewards/mine.py")
    chosen = load_preset(trained.preset, trained.reward_weights)
    assert refuse_untested(run, chosen) == "the rewards passed their test"
    assert chosen.reward_weights == [0.9375]
    run.lock().release(force=True)
    write(lab, "", "Adopt")
    expect(lab.get_by_role("status")).to_contain_text("Adopted: math", timeout=SLOW)
    assert run.config().rewards.preset == "math"
