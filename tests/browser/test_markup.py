"""What a model wrote is text in JupyterLab, also where it looks like a formula or a link.

Tables keep to the left there, and what is short stays whole.
"""

import os

import nbformat
import pytest
from browsing import NEEDS_BROWSER, SLOW, jupyterlab, run_all_cells
from playwright.sync_api import expect

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
MADE = """import pandas as pd
from IPython.display import HTML, display
from grpo_nb import rewards
from grpo_nb import reward_lab as bench
from grpo_nb import views
from grpo_nb.views import chat
from grpo_nb.rewards import forms, prompts
text = r"It costs $5 or $6, $x^2$, \\(y\\), $$\\href{http://127.0.0.1/}{z}$$"
row = {"prompt": prompts.build_prompt(text), "question": text, "answer": text}
preset = rewards.load_preset("qa")
sum = forms.TAGS.write("48 + 24 = 72", "72")
table = bench.Bench(preset).table([row], [[text, forms.TAGS.write(text, text), sum]])
said = {"base": chat.Said(text, text), "tuned": chat.Said(sum, "72")}
figures = {"model": "adapter", "95 %": "0.923 … 0.974", "share": "95 %"}
figures |= {f"some_well_named_format_{number}_reward": 0.5 for number in range(12)}"""
VIEWS = {
    "typeset": "HTML(f'<p>{text}</p>')",  # that there is something to keep out
    "sheet": "views.score_sheet(table, preset)",
    "table": "views.table(table[['question', 'reference', 'completion', 'answer']])",
    "chat": "chat.answers_page(row, said)",
    "browser": "views.CompletionBrowser(table)",
    "wide": "views.table(pd.DataFrame([figures]))",
    "end": "HTML(f'<p>{text}</p>')",
}


@pytest.fixture(scope="module")
def shown(browser, forks, tmp_path_factory):
    """The outputs of a notebook with each view of one hostile text, rendered."""
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    cells = [nbformat.v4.new_code_cell(code) for code in (MADE, *VIEWS.values())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "markup.ipynb")
    with jupyterlab(browser, folder / "markup.ipynb", settings) as page:
        run_all_cells(page)
        views = dict(zip(VIEWS, page.locator(".jp-CodeCell").all()[1:], strict=False))
        # Views are typeset in turn, so the others have had theirs when the last one has it.
        for view in ("typeset", "end"):
            expect(views[view].locator("mjx-container").first).to_be_visible(timeout=SLOW)
        if path := os.environ.get("GRPO_NB_MARKUP_PICTURE"):
            page.screenshot(path=path, full_page=True)
        yield views


@pytest.mark.parametrize("view", VIEWS)
def test_a_formula_or_a_link_of_a_completion_stays_text(shown, view):
    formulas = (
        shown[view].locator(".jp-OutputArea").locator("mjx-container, a[href^='http://127.0.0.1/']")
    )
    if view in ("typeset", "end"):
        assert formulas.count() > 1
        return
    expect(formulas).to_have_count(0)
    if view == "wide":
        return
    assert (
        "costs $5 or $6, $x^2$, \\(y\\), $$\\href"
        in shown[view].locator(".jp-OutputArea").inner_text()
    )


LAID = """node => {
  const text = document.createRange();
  text.selectNodeContents(node);
  const tops = [...text.getClientRects()].map(box => Math.round(box.top / 4));
  return [node.innerText, getComputedStyle(node).textAlign, new Set(tops).size]; }"""


@pytest.mark.parametrize("view", ["sheet", "table", "chat", "browser", "wide"])
def test_tables_keep_to_the_left_and_what_is_short_stays_on_one_line(shown, view):
    cells = shown[view].locator(".sheet :is(th, td, caption, .text)").all()
    laid = [cell.evaluate(LAID) for cell in cells]
    assert {side for _, side, _ in laid} == {"left"}
    short = {"tuned", "95 %", "0.923 … 0.974", "adapter", "reference answer"}
    whole = {text: lines for text, _, lines in laid if text in short or "48 + 24 = 72" in text}
    assert set(whole.values()) <= {1}, whole
    if view == "wide":
        assert whole.keys() == {"95 %", "0.923 … 0.974", "adapter"}
    if view == "chat":
        assert any("48 + 24 = 72" in text for text in whole) and "tuned" in whole


def test_the_browser_shows_prompt_reference_answer_and_scores_of_the_selected(shown):
    lines = shown["browser"].locator(".sheet tr")
    heads = [line.locator(":is(th, td)").first.inner_text() for line in lines.all()]
    told = ["", "prompt", "reference answer", "completion", "answer read"]
    assert heads[:6] == [*told, "exact match"] and "total" in heads
    for place in (1, 2):
        expect(lines.nth(place)).to_contain_text("It costs $5 or $6")
