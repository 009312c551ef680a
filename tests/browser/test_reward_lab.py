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

from grpo_nb.pipeline.app import prepare
from grpo_nb.runs import PROJECT_ROOT, Run, write_json

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
RIGHT = "<reasoning>so</reasoning><answer>{}</answer>"
CARELESS = """import ipywidgets
@rewards.reward()
def careless_reward(response: str) -> float:
    return float(response.split("<answer>")[3])
(lab,) = [shown for shown in Out.values() if isinstance(shown, views.RewardLab)]
button = ipywidgets.Button(description="Be careless")
button.on_click(lambda _: lab.use(lab.bench.adding(careless_reward, weight=1.0)))
button"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An empty run with a small baseline; the app prepares its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("OMP_NUM_THREADS", "1")
        write_json(Run("demo") / "settings.json", {"rewards.baseline_prompts": 4})
        yield Run("demo")


@pytest.fixture(scope="module")
def app(run, forks):
    command = ["grpo_nb", "reward-lab", "--profile", "tiny-cpu", "--no-browser"]
    with served(*command, "--port", free_port(), GRPO_NB_TOKEN=TOKEN) as (printed, address):
        assert printed.startswith("01_prepare_data comes first")
        yield address


def reward_lab(page):
    lab = page.locator(".jp-OutputArea-output", has=page.get_by_text("Run probes"))
    expect(lab.locator(".sheet .chosen")).to_be_visible(timeout=SLOW)
    return lab


@pytest.fixture(scope="module")
def lab(run, app, browser, tmp_path_factory):
    """The Reward Lab in JupyterLab, all cells run, and a button of ours below them."""
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    notebook = prepare(run)
    notebook.cells.append(nbformat.v4.new_code_cell(CARELESS))
    nbformat.write(notebook, folder / "02.ipynb")
    with jupyterlab(browser, folder / "02.ipynb", settings) as page:
        run_all_cells(page)
        page.get_by_role("button", name="Be careless").wait_for()
        if os.environ.get("GRPO_NB_SCREENSHOT"):
            reward_lab(page).screenshot(path=PROJECT_ROOT / "docs/reward_lab.png")
        yield reward_lab(page)


def edit(lab, text, number=1):
    lab.get_by_role("combobox", name="Completion").select_option(str(number))
    expect(lab.locator(".sheet .chosen td").first).to_have_text(str(number))
    lab.get_by_role("textbox", name="Edit").fill(text)
    lab.page.keyboard.press("Tab")


def reference_of(lab):
    return re.search(r"reference answer (\S+)", lab.locator(".sheet caption").inner_text())[1]


def test_the_app_asks_for_the_token_and_shows_the_lab(app, browser):
    assert app.endswith(f"?token={TOKEN}")
    with browser.new_context() as stranger:
        for wrong in (app.partition("?")[0], f"{app}x"):
            assert "/login" in stranger.request.get(wrong).url
    with browser.new_page() as page:
        page.goto(app, timeout=SLOW)
        expect(reward_lab(page).get_by_role("slider")).to_have_count(4)


def test_a_weight_moved_by_the_keyboard_changes_totals_and_advantages(lab):
    totals, advantages = (lab.locator(f".sheet td:nth-last-child({place})") for place in (2, 1))
    edit(lab, RIGHT.format(reference_of(lab)), number=2)
    expect(totals.nth(1)).to_have_text("1.5")
    edit(lab, "no answer and no tags")
    expect(totals.first).to_have_text("0")
    before = advantages.all_inner_texts()
    lab.get_by_role("slider").nth(1).press("ArrowRight")
    expect(lab.locator(".sheet th").nth(4)).to_contain_text("× 0.3125")
    assert float(totals.nth(1).inner_text()) == pytest.approx(1.5 + 1 / 16, abs=0.01)
    assert advantages.all_inner_texts() != before
    lab.get_by_role("slider").nth(1).press("ArrowLeft")
    expect(totals.nth(1)).to_have_text("1.5")


def test_an_edited_completion_is_scored_again(lab):
    reference, chosen = reference_of(lab), lab.locator(".sheet .chosen td")
    for text, score in ((reference, "1"), ("12345", f"0\n12345 is not {reference}")):
        edit(lab, RIGHT.format(text))
        expect(chosen.nth(2)).to_have_text(text)
        expect(chosen.nth(3)).to_have_text(score, use_inner_text=True)
    lab.get_by_role("button", name="Reset").click()
    expect(chosen.nth(2)).not_to_have_text("12345")


def test_a_reward_is_switched_off(lab):
    edit(lab, RIGHT.format(reference_of(lab)))
    total, slider = lab.locator(".chosen td:nth-last-child(2)"), lab.get_by_role("slider").first
    expect(total).to_have_text("1.5", timeout=SLOW)
    for key, shown in (("Home", "0.5"), ("End", "2.5")):
        slider.press(key)
        expect(total).to_have_text(shown, timeout=SLOW)
    for _ in range(16):
        slider.press("ArrowLeft")
    expect(total).to_have_text("1.5", timeout=SLOW)


def test_the_probes_give_a_verdict(lab):
    lab.get_by_role("button", name="Run probes").click()
    expect(lab.get_by_text(re.compile("PASSED|FAILED"))).to_be_visible(timeout=SLOW)


def test_it_reads_in_either_theme(lab):
    for scheme, light in (("dark", "false"), ("light", "true")):
        lab.page.emulate_media(color_scheme=scheme)
        expect(lab.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        for node in lab.locator(".sheet th, .chosen td, mark, pre, button, select, label").all():
            assert contrast(node) > 4.5, node.inner_text()


def test_a_reward_that_raises_shows_its_traceback(lab):
    lab.page.get_by_role("button", name="Be careless").click()
    alert = lab.get_by_role("alert")
    expect(alert).to_contain_text('return float(response.split("<answer>")[3])')
    assert contrast(alert) > 4.5
    expect(lab.get_by_role("slider")).to_have_count(4)
