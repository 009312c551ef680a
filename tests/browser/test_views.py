"""The views in JupyterLab: hostile text in each, and the live dashboard while its cell runs.

GRPO_NB_SCREENSHOT=<folder of a trained run> writes docs/dashboard.png again, from its metrics.
"""

import os
import re
from itertools import combinations

import pytest
from browsing import NEEDS_BROWSER, SLOW, jupyterlab, unreadable
from playwright.sync_api import expect

from grpo_nb.machine import PROJECT_ROOT

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
TRAINED = os.environ.get("GRPO_NB_SCREENSHOT")
METRICS = (
    f"{TRAINED}/train/metrics.jsonl" if TRAINED else PROJECT_ROOT / "tests/healthy_metrics.jsonl"
)
LOOK = f"""from pathlib import Path
import pandas as pd
from grpo_nb import training, views
from grpo_nb.checks import Check
lines = training.read_lines(Path("{METRICS}"))
dashboard = views.TrainingDashboard("To stop: interrupt")
dashboard"""
SAMPLE = """alerts = [Check("spike", "warning", "step 9: 2.1, 0.3 before", "lower it")]
alerts += [Check("not a number", "stop", "step 9: reward is nan", "lower the rate")]
text = "<script>document.title = 'taken over'</script> " + "so and so " * 60
scores = {"exact_match_reward": 1.0, "reward": 1.5, "advantage": 0.7}
sample = lambda step: [
    {"question": f"{step} + 1", "completion": text, **scores},
    {"question": f"{step} + 1", "completion": "worse", **scores, "reward": 0.5, "advantage": -0.7},
]
long = f"rewards/{'a_reward_with_a_name_that_is_much_too_long_' * 3}/mean"
lines = [line | {long: 0.5} for line in lines]"""
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
ALERTS = [  # the sentence on top, and the list
    "not a number, step 9: reward is nan → lower the rate",
    "warning · spike, step 9: 2.1, 0.3 before → lower it",
]
# A resumed training: the first steps are there at once, the others come while the cell runs.
TRAIN = """import time
last = len(lines) * 7 // 10
total = max(line["step"] for line in lines)
updates = [
    training.Update(line, total, sample(line["step"]), alerts if line["step"] == 9 else [])
    for line in lines[:last]
]
dashboard.begin(updates[: last // 2], total, eval_rows=64)
for update in updates[last // 2 :]:
    dashboard(update)
dashboard.say(f"step {dashboard.step + 1}: generating")
try:
    time.sleep(100)
except KeyboardInterrupt:
    dashboard(training.Update(lines[last], total, sample(last + 1), []))
    raise"""
MADE = """import pandas as pd
from IPython.display import HTML
from PIL import Image
from grpo_nb import views
text = r"It costs $5 or $6, $x^2$, \\(y\\), $$\\href{http://127.0.0.1/}{z}$$"
lines = [dict(question=text, reference=text, completion=text, answer=text, total=0.5)]
lines += [dict(lines[0], completion="48 + 24 = 72")]
table = pd.DataFrame(lines, ["base", "tuned"])
image = Image.new("RGB", (900, 600), "teal")
figures = {"model": "adapter", "95 %": "0.923 … 0.974", "share": "95 %"}
figures |= {f"some_well_named_format_{number}_reward": 0.5 for number in range(12)}
views.show_tables()"""
VIEWS = {
    "typeset": "HTML(f'<p>{text}</p>')",  # that there is something to keep out
    "table": "table",
    "side": "views.completions(table)",
    "wide": "pd.DataFrame([figures])",
    "image": "views.completions(table.assign(images=[[image]] * 2))",
    "end": "HTML(f'<p>{text}</p>')",
}


@pytest.fixture(scope="module")
def page(browser, forks, tmp_path_factory):
    """Each view of one hostile text, and a last cell that runs till a button stops it."""
    cells = [MADE, *VIEWS.values(), LOOK, REPLAY if TRAINED else SAMPLE, TRAIN]
    with jupyterlab(browser, tmp_path_factory, *cells) as page:
        yield page


@pytest.fixture(scope="module")
def shown(page):
    """{view: its cell}, rendered."""
    views = dict(zip(VIEWS, page.locator(".jp-CodeCell").all()[1:], strict=False))
    # Views are typeset in turn, so the others have had theirs when the last one has it.
    for view in ("typeset", "end"):
        expect(views[view].locator("mjx-container").first).to_be_visible(timeout=SLOW)
    return views


def test_a_formula_or_a_link_of_a_completion_stays_text(shown):
    for view, cell in shown.items():
        output = cell.locator(".jp-OutputArea")
        formulas = output.locator("mjx-container, a[href^='http://127.0.0.1/']")
        assert (formulas.count() > 1) is (view in ("typeset", "end")), view
        if view not in ("typeset", "end", "wide"):
            assert "costs $5 or $6, $x^2$, \\(y\\), $$\\href" in output.inner_text()


LAID = """nodes => nodes.map(node => {
  const text = document.createRange();
  text.selectNodeContents(node);
  const tops = [...text.getClientRects()].map(box => Math.round(box.top / 4));
  return [node.innerText, getComputedStyle(node).textAlign, new Set(tops).size]; })"""


def test_the_image_of_a_prompt_is_shown_small(shown):
    image = shown["image"].get_by_role("img", name="image").first
    expect(image).to_be_visible()
    assert image.evaluate("node => [node.naturalWidth, node.naturalHeight]") == [128, 85]


def test_tables_keep_to_the_left_and_what_is_short_stays_on_one_line(shown):
    expected = {"side": {"tuned"}, "wide": {"95 %", "0.923 … 0.974", "adapter"}}
    short = {*expected["wide"], "tuned", "reference"}
    for view in ("table", "side", "wide"):
        laid = shown[view].locator(".sheet :is(th, td, .text)").evaluate_all(LAID)
        assert {side for _, side, _ in laid} == {"left"}
        whole = {text: lines for text, _, lines in laid if text in short or "48 + 24 = 72" in text}
        assert set(whole.values()) <= {1}, whole
        assert expected.get(view, set()) <= whole.keys()


@pytest.fixture(scope="module")
def dashboard(page):
    shown = page.locator(".grpo-dashboard")
    phase = shown.get_by_text(re.compile(r"^step \d+: generating"))
    expect(phase).to_be_visible(timeout=SLOW)
    return shown


def test_numbers_alerts_and_completions_are_shown_while_the_cell_runs(page, dashboard):
    assert page.locator(".jp-InputPrompt").last.inner_text() == "[*]:"
    chart = dashboard.get_by_role("img", name=re.compile(r"reward, weighted total: \d"))
    assert chart.locator("canvas").evaluate("image => image.width") > 400
    if TRAINED:
        return
    shown = [dashboard.get_by_role("status"), *dashboard.locator(".alerts li").all()]
    assert [node.inner_text() for node in shown] == ALERTS, "each of them once"
    assert page.title() != "taken over"
    expect(dashboard.locator(".card .text").first).to_contain_text("<script>document.title")
    entropy = dashboard.get_by_role("img", name=re.compile("^entropy"))
    expect(entropy).to_be_visible()  # of the diagnostics, which an alert opens
    assert chart.locator(".mark.stop").count() == 1


BOXES = """nodes => nodes.map(node => node.getBoundingClientRect())
  .filter(box => box.width).map(box => [box.left, box.top, box.right, box.bottom])"""


@pytest.mark.parametrize("width", [900, 1440])
def test_nothing_overprints_or_leaves_the_page(page, dashboard, width):
    page.set_viewport_size({"width": width, "height": 1600})
    right = dashboard.evaluate("node => node.getBoundingClientRect().right")
    for part in (".legend > span", "figcaption", "figure", ".card", ".bar > *"):
        boxes = dashboard.locator(part).evaluate_all(BOXES)
        assert boxes and max(box[2] for box in boxes) <= right + 1, part
        for one, other in combinations(boxes, 2):
            apart = one[2] <= other[0] + 1 or other[2] <= one[0] + 1
            assert apart or one[3] <= other[1] + 1 or other[3] <= one[1] + 1, part
    page.set_viewport_size({"width": 1280, "height": 1600})


def test_it_reads_in_either_theme(page, dashboard):
    for scheme, light in (("dark", "false"), ("light", "true")):
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        nodes = dashboard.locator("b, dt, dd, figcaption, .verdict, .text, button")
        assert unreadable(nodes.filter(visible=True)) == []
    if TRAINED:
        page.set_viewport_size({"width": 1100, "height": 1500})
        dashboard.scroll_into_view_if_needed()
        dashboard.screenshot(path=PROJECT_ROOT / "docs/dashboard.png")


def test_an_interrupted_cell_is_over_and_the_slider_stays_where_it_was(page, dashboard):
    expect(dashboard.get_by_text("To stop: interrupt")).to_be_visible()
    slider, head = dashboard.get_by_role("slider", name="step"), dashboard.locator("h4")
    newest = slider.get_attribute("max")
    expect(head).not_to_contain_text("One prompt at step 1:")
    slider.fill("0")
    expect(head).to_contain_text("One prompt at step 1:")
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Interrupt Kernel").click()
    expect(page.locator(".jp-InputPrompt").last).not_to_have_text("[*]:")
    expect(dashboard.get_by_text("ended after step")).to_be_visible()
    expect(slider).to_have_attribute("max", str(int(newest) + 1))
    expect(slider).to_have_value("0")
    expect(dashboard.get_by_text("To stop: interrupt")).to_have_count(0)
