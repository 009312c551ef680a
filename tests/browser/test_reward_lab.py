"""The Reward Lab in a real browser: in JupyterLab, and as the app that `reward-lab` serves.

GRPO_NB_SCREENSHOT=1 writes docs/reward_lab.png again."""

import os
import re

import nbformat
import pytest
from browsing import (
    NEEDS_BROWSER,
    SLOW,
    TOKEN,
    contrast,
    free_port,
    jupyterlab,
    run_all_cells,
    served,
)
from playwright.sync_api import expect

from grpo_nb.pipeline.app import SERVED, prepare
from grpo_nb.reward_lab import refuse_untested
from grpo_nb.rewards import load_preset
from grpo_nb.runs import PROJECT_ROOT, Run, start_stage
from grpo_nb.runs.config import resolve

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
RIGHT = "<reasoning>so</reasoning><answer>{}</answer>"
MINE = """def right(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(f">{want}<" in text) for want, text in zip(answer, texts)]

@rewards.reward()
def brief(response: str) -> float:
    return float(len(response) <= 80)
"""
ENDLESS = """def endless(completions, **kwargs):
    while True:
        pass
"""
SET = {"rewards.baseline_prompts": 4, "rewards.seconds": 600}
HOLD = f"from grpo_nb.runs import start_stage\nstage = start_stage('02', 'demo', {SET})"
EXACT = "reward_funcs = [rewards.numeric_correctness_reward]"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An empty run with a small baseline; the app prepares its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("OMP_NUM_THREADS", "1")
        Run("demo").write_config(resolve("tiny-cpu", SET))
        yield Run("demo")


@pytest.fixture(scope="module")
def app(run, forks):
    command = ["grpo_nb", "reward-lab", "--profile", "tiny-cpu", "--no-browser"]
    with served(*command, "--port", free_port(), GRPO_NB_TOKEN=TOKEN) as (printed, address):
        assert printed.startswith("01_prepare_data comes first")
        yield address


def reward_lab(page):
    lab = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Adopt"))
    expect(lab.locator(".sheet .chosen")).to_be_visible(timeout=SLOW)
    return lab


@pytest.fixture(scope="module")
def lab(run, app, browser, tmp_path_factory):
    """The Reward Lab in JupyterLab, with the run's preset, below a cell that holds the run."""
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    prepare(run)
    notebook = nbformat.read(run / SERVED, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(HOLD))
    nbformat.write(notebook, folder / "lab.ipynb")
    with jupyterlab(browser, folder / "lab.ipynb", settings) as page:
        run_all_cells(page)
        yield reward_lab(page)


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


def stop_and_go_on(lab):
    """Stop a reward that never ends, twice, and run others at once."""
    stop, shown = lab.get_by_role("button", name="Stop", exact=True), lab.get_by_role("status")
    expect(stop).to_be_disabled()
    for button in ("Run", "Adopt"):
        write(lab, ENDLESS, button)
        expect(shown).to_contain_text("Running: a reward is stopped after 600 s")
        stop.click()
        expect(shown).to_have_text("Stopped while endless was running", timeout=10_000)
        expect(stop).to_be_disabled()
        expect(lab.get_by_role("alert")).to_have_count(0)
    write(lab, MINE, "Run")
    expect(lab.locator(".sheet th").nth(3)).to_have_text("right × 1", timeout=SLOW)
    expect(shown).to_contain_text("FAILED", timeout=SLOW)


@pytest.fixture(scope="module")
def page(app, browser):
    """The app's page, as it is opened first."""
    with browser.new_page() as page:
        page.goto(app, timeout=SLOW)
        yield page


def test_the_app_asks_for_the_token_and_shows_the_lab(app, browser, page):
    assert app.endswith(f"?token={TOKEN}")
    with browser.new_context() as stranger:
        for wrong in (app.partition("?")[0], f"{app}x"):
            assert "/login" in stranger.request.get(wrong).url
    expect(reward_lab(page).get_by_role("slider")).to_have_count(4)
    expect(page.get_by_role("heading")).to_have_text(re.compile("^The Reward Lab of run demo"))
    box = page.get_by_role("textbox", name="Rewards").bounding_box()
    assert box["y"] < 200, "at the top"


def test_a_reward_that_never_ends_is_stopped_on_the_page(run, page):
    stop_and_go_on(reward_lab(page))
    assert run.state("02").status == "not started", "nothing is adopted"


def test_a_reward_is_written_run_and_adopted_on_the_page(run, app, browser, page):
    """Closed and opened again, the page shows what was adopted, and so does notebook 3."""
    lab = reward_lab(page)
    write(lab, MINE, "Run")
    expect(lab.get_by_role("slider")).to_have_count(2, timeout=SLOW)
    expect(lab.locator(".sheet th").nth(3)).to_have_text("right × 1")
    for shown in ("FAILED", "several answers", "zero-advantage groups"):
        expect(lab.get_by_text(shown).last).to_be_visible(timeout=SLOW)
    assert run.state("02").status == "not started", "a look changes nothing"
    if os.environ.get("GRPO_NB_SCREENSHOT"):
        page.set_viewport_size({"width": 1100, "height": 1500})
        page.screenshot(path=PROJECT_ROOT / "docs/reward_lab.png")
    for code, said in (("1 / 0", "line 1 (1 / 0): Zero"), ("def f(", "line 1 (def f(): Syn")):
        write(lab, code, "Run")
        expect(lab.get_by_role("alert")).to_contain_text(said)
        expect(lab.get_by_role("alert")).to_be_in_viewport()
        expect(lab.get_by_text("Traceback (most")).not_to_be_visible()
    write(lab, EXACT, "Run")
    expect(lab.get_by_role("slider")).to_have_count(1, timeout=SLOW)
    expect(lab.get_by_role("alert")).to_have_count(0)
    lab.get_by_role("slider").press("ArrowLeft")
    expect(lab.locator(".sheet th").nth(3)).to_contain_text("× 0.9375", timeout=SLOW)
    lab.get_by_role("button", name="Adopt").click()
    then = "Adopted: mine.py. 03_train_grpo trains with it"
    expect(lab.get_by_role("status")).to_have_text(then, timeout=SLOW)
    trained = start_stage("03", "demo").config.rewards
    chosen = load_preset(trained.preset, trained.reward_weights)
    assert refuse_untested(run, chosen) == "the rewards passed their test"
    assert chosen.reward_weights == [0.9375]
    run.lock().release(force=True)
    page.close()
    with browser.new_page() as again:
        again.goto(app, timeout=SLOW)
        lab = reward_lab(again)
        expect(lab.get_by_role("textbox", name="Rewards")).to_have_value(EXACT)
        expect(lab.locator(".sheet th").nth(3)).to_contain_text("× 0.9375", timeout=SLOW)
        write(lab, "", "Adopt")
        expect(lab.get_by_role("status")).to_contain_text("Adopted: math", timeout=SLOW)
    assert run.config().rewards.preset == "math"


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
    expect(lab.get_by_role("status")).to_contain_text("in total, and a wrong completion earns")
    lab.get_by_role("button", name="Reset").click()
    expect(chosen.nth(1)).not_to_contain_text("no answer and no tags")


def test_a_reward_that_never_ends_is_stopped_in_the_notebook(lab):
    stop_and_go_on(lab)
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


def test_what_is_written_in_the_notebook_is_adopted_while_its_kernel_holds_the_run(run, lab):
    write(lab, EXACT, "Adopt")
    expect(lab.get_by_role("status")).to_contain_text("Adopted: mine.py.", timeout=SLOW)
    assert run.config().rewards.preset == str(run / "rewards/mine.py")
    assert run.state("02").status == "done"
