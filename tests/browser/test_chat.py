"""The chat in JupyterLab: a question typed, Enter, and both answers."""

import nbformat
import pytest
from browsing import NEEDS_BROWSER, SLOW, contrast, jupyterlab, run_all_cells
from playwright.sync_api import expect

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
OPEN = """from grpo_nb import runs
from grpo_nb import views
views.ChatPanel(views.Chat(runs.Run("moved")))"""


@pytest.fixture(scope="module")
def panel(moved_run, forks, browser, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("settings")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(OPEN)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "chat.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(moved_run.path.parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        with jupyterlab(browser, folder / "chat.ipynb", settings) as page:
            run_all_cells(page)
            shown = page.locator(
                ".jp-OutputArea-output", has=page.get_by_role("button", name="Ask")
            )
            expect(shown).to_be_visible(timeout=SLOW)
            yield shown


def ask(panel, question, reference=""):
    panel.get_by_role("textbox", name="Reference").fill(reference)
    field = panel.get_by_role("textbox", name="Question")
    field.fill(question)
    field.press("Enter")
    expect(panel.locator(".sheet caption")).to_contain_text(question, timeout=SLOW)
    expect(panel.get_by_role("button", name="Ask")).to_be_enabled(timeout=SLOW)


def test_enter_asks_base_and_tuned(panel):
    ask(panel, "What is 47 + 38?", "85")
    table = panel.locator(".sheet")
    first = table.locator("td:first-child").all_inner_texts()
    assert first == ["base", "tuned"]
    completions = table.locator(".text").all_inner_texts()
    assert len(completions) == 2
    assert completions[0] != completions[1]
    expect(table.locator("th", has_text="numeric correctness")).to_have_count(1)


def test_it_reads_in_either_theme(panel):
    for scheme, light in (("dark", "false"), ("light", "true")):
        panel.page.emulate_media(color_scheme=scheme)
        expect(panel.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        for node in panel.locator(".sheet th, .sheet td, mark, b, button, label").all():
            assert contrast(node) > 4.5, node.inner_text()


def test_a_question_without_gold_shows_no_scores_and_markup_as_text(panel):
    ask(panel, "<b id=injected>What is 3 + 4?</b>")
    expect(panel.locator("#injected")).to_have_count(0)
    expect(panel.locator(".sheet th")).to_have_count(3)


def test_an_error_is_shown_and_goes_with_the_next_question(panel):
    panel.get_by_role("textbox", name="Question").fill("")
    panel.get_by_role("button", name="Ask").click()
    expect(panel.get_by_role("alert")).to_contain_text("type a question first")
    ask(panel, "What is 5 + 6?")
    expect(panel.get_by_role("alert")).to_have_count(0)
