"""The Reward Lab in JupyterLab, in a real browser, as a person uses it.

GRPO_NB_SCREENSHOT=1 writes docs/reward_lab.png again.
"""

import os
from itertools import product

import numpy as np
import pytest
from browsing import NEEDS_BROWSER, SLOW, jupyterlab, unreadable
from labs import open_lab
from playwright.sync_api import expect

from grpo_nb import check_rewards
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.reward_lab.table import advantages
from grpo_nb.views import RewardLab

pytestmark = [NEEDS_BROWSER, pytest.mark.usefixtures("forks")]
REWARDS = '''import re

tags = re.compile(r"<reasoning>.*</reasoning>\\s*<answer>(.*)</answer>", re.DOTALL)


def match_format(completions, **kwargs):
    """Pay for the tags in their order."""
    return [1.0 if tags.search(one[0]["content"]) else 0.0 for one in completions]


def check_answer(completions, answer, **kwargs):
    """Pay for the right answer."""
    found = [tags.search(one[0]["content"]) for one in completions]
    return [3.0 if f and a in f[1] else 0.0 for f, a in zip(found, answer)]


def shows_work(completions, **kwargs):
    """Pay for equations."""
    return [one[0]["content"].count("=") / 2 for one in completions]'''
DATA = """sums = [(47, 38), (9, 6), (30, 12), (5, 8), (21, 3), (14, 14), (60, 2), (33, 9)]
dataset = [
    {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
    for a, b in sums
]
form = "<reasoning>{}</reasoning>\\n<answer>{}</answer>".format


def said(a, b):
    if a == 14:  # what shows its work differs from what does not in this alone
        return [form("14 + 14 = 28", 28), form("so it is", 28)]
    texts = [form(f"{a} + {b} = {a + b}", a + b), form(f"I add {b}", a + b)]
    texts += [form(f"{a} + {b}", f"{a + b - 1} or {a + b}"), form(f"{a} = " * 5, a)]
    return [*texts, form("so", a + b + 1), f"The sum is {a + b}."]


completions = [said(a, b) for a, b in sums]"""
OPEN = """from grpo_nb import RewardLab

RewardLab([match_format, check_answer, shows_work], dataset, completions)"""
MANY = """rows = [dict(row, answer=str(n)) for row in dataset for n in range(32)]
RewardLab([match_format, check_answer], rows, [said(n, 1) + ["", "?"] for n in range(256)])"""
STATES = ("stop", "warning")
COLOR = "node => getComputedStyle(node).backgroundColor"
CELLS_OF = """rows => rows.map(
  row => [...row.querySelectorAll("[role=gridcell]")].map(cell => cell.innerText))"""
MODULE = """async ([source, name, ...values]) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  return (await import(url))[name](...values);
}"""


HOSTS = (  # what VS Code and Colab say of their colors, and a page that says nothing
    ("--vscode-editor-background: #1e1e1e; --vscode-editor-foreground: #d4d4d4", "light"),
    ("--colab-primary-surface-color: #383838; --colab-primary-text-color: #fff", "light"),
    ("", "dark"),
)
RENDER = """async ([source, style, values]) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const model = { get: (name) => values[name], on() {}, off() {}, set() {}, save_changes() {} };
  document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
  (await import(url)).default.render({ model, el: document.body });
}"""


def render(browser, lab, colors="", **options):
    """A page that shows a Lab without a kernel."""
    values = {name: getattr(lab, name) for name in ("data", "report", "state", "added")}
    blank = browser.new_page(**options)
    style = f":root {{ {colors} }}\n{RewardLab._css}"
    blank.evaluate(RENDER, [RewardLab._esm, style, values])
    return blank


def test_it_needs_no_more_than_anywidget_gives_and_takes_the_hosts_colors(browser):
    lab = open_lab()
    for colors, scheme in HOSTS:
        blank = render(browser, lab, colors, color_scheme=scheme)
        expect(blank.get_by_role("status")).to_have_text("passed")
        expect(blank.get_by_role("button", name="no score")).to_have_count(0)
        blank.get_by_text("sampled 1").click()
        nodes = blank.locator("[data-n] > *, .pill, summary, mark, .chips button, pre")
        assert unreadable(nodes) == []
        blank.close()


@pytest.fixture(scope="module")
def page(browser, forks, tmp_path_factory):
    """A person's own notebook, all of whose cells have run."""
    with jupyterlab(browser, tmp_path_factory, REWARDS, DATA, OPEN, MANY) as page:
        page.set_viewport_size({"width": 1440, "height": 900})
        expect(page.get_by_role("status")).to_have_count(2, timeout=SLOW)
        page.set_default_timeout(10_000)
        yield page


@pytest.fixture(scope="module")
def lab(page):
    lab = page.locator(".lab").first
    lab.scroll_into_view_if_needed()
    return lab


def rows(lab):
    """The completions in view, as (total, advantage, text), at one moment."""
    cells = lab.locator("[data-n]").evaluate_all(CELLS_OF)
    return [(total, advantage, " ".join(text.split())) for total, advantage, *_, text in cells]


def press(lab, name, pressed=True):
    lab.get_by_role("button", name=name).click()
    expect(lab.get_by_role("button", name=name)).to_have_attribute(
        "aria-pressed", str(pressed).lower()
    )


def test_the_browsers_advantages_are_pythons(browser):
    random = np.random.default_rng(0)
    scores, weights = random.normal(size=(24, 3)).round(2), [1.0, 0.25, -2.0]
    scores[random.random(scores.shape) < 0.2] = np.nan
    scores[:4], scores[4] = 1.0, np.nan  # no signal; no score at all
    groups = np.where(np.isnan(scores), None, scores).reshape(6, 4, 3).tolist()
    blank, aggregations = browser.new_page(), ("sum_then_normalize", "normalize_then_sum")
    for how in product(("group", "batch", "none"), aggregations):
        shown = blank.evaluate(MODULE, [RewardLab._esm, "advantages", groups, weights, *how])
        expected = advantages(scores, weights, 4, *how)
        np.testing.assert_allclose(np.ravel(shown), expected, atol=1e-12, err_msg=str(how))
    blank.close()


def test_attacks_that_win_by_the_browsers_totals_win_in_the_next_verdict(browser):
    exec(f"{REWARDS}\n{DATA}", names := {})
    rewards = [names[name] for name in ("match_format", "check_answer", "shows_work")]
    sampled = (rewards, names["dataset"], names["completions"])
    lab, blank = RewardLab(*sampled), browser.new_page()
    attacks = [line["attack"] for line in lab.data["completions"]]
    table = [RewardLab._esm, "measure", lab.data, lab.data["completions"], attacks]
    names = [attack and attack["name"] for attack in attacks]
    for weights in ([1, 0, 1], [0, 1, 0.1]):
        before, now = (blank.evaluate(MODULE, [*table, w])["level"] for w in ([1, 1, 1], weights))
        levels = zip(names, before, now, strict=True)
        won = {name: lab.report["won"][name] if a == b else b for name, a, b in levels if name}
        verdict = check_rewards(*sampled, reward_weights=weights)
        expected = {x["attack"]: x["won"] for x in verdict.table if "sampled" not in x["attack"]}
        expected = {name: level for name, level in expected.items() if level}
        assert {name: level for name, level in won.items() if level} == expected, weights
    blank.close()


def test_an_attack_that_wins_only_beside_its_group_is_wrong_but_paid(browser):
    def well_formed(completions, **_):
        return [float("<answer>" in text) for text in completions]

    def right(completions, answer, **_):
        pairs = zip(answer, completions, strict=True)
        return [float(f"<answer>{want}</answer>" in text) for want, text in pairs]

    dataset = [{"prompt": "a sum", "answer": str(n)} for n in (20, 31, 42, 53)]
    lab = RewardLab([right, well_formed], dataset, [["a", "b", "<answer>"]] * 4, form="tags")
    assert lab.report["won"]["negated"] == ""  # it earns what an honest wrong answer does
    blank = render(browser, lab)
    attack = blank.locator("[data-n]", has_text="negated")
    expect(blank.locator("[data-n]").first).to_be_visible()
    expect(attack).to_have_count(0)
    press(blank, "wrong but paid")
    blank.get_by_role("searchbox").fill("negated")
    assert [line[:2] for line in rows(blank)] == [("1", "▲ 1.15")]
    blank.close()


@pytest.mark.parametrize("width", [1440, 900])
def test_verdict_and_first_completions_are_in_the_first_sight(page, lab, width):
    page.set_viewport_size({"width": width, "height": 900})
    expect(lab.locator("[data-n]").nth(8)).to_be_visible()
    box, row = lab.bounding_box(), lab.locator("[data-n]").nth(8).bounding_box()
    assert box["height"] <= 660 and row["y"] + row["height"] < box["y"] + box["height"]
    assert [text[0] for *_, text in rows(lab)][:7] == list("1234578")  # of each group one
    expect(lab.get_by_role("status")).to_have_text("stop")
    expect(lab).to_contain_text("do not train: ")
    if width == 1440 and os.environ.get("GRPO_NB_SCREENSHOT"):
        lab.screenshot(path=PROJECT_ROOT / "docs/reward_lab.png")
    tab = lab.get_by_role("button", name="attacks and findings")
    if width == 900:
        expect(lab.get_by_role("article").first).to_be_hidden()
        tab.click()
        expect(lab.locator("[data-n]").first).to_be_hidden()
    expect(lab.get_by_role("article").first).to_be_visible()
    pills = [lab.locator("article .pill").get_by_text(state).first for state in STATES]
    assert len({pill.evaluate(COLOR) for pill in pills}) == len(STATES)
    if width == 900:
        lab.get_by_role("button", name="completions", exact=False).first.click()
        page.set_viewport_size({"width": 1440, "height": 900})
    expect(tab).to_be_hidden()


def test_the_wrong_completion_that_earns_most_is_found_by_the_keyboard(page, lab):
    press(lab, "wrong but paid")
    chip = lab.get_by_role("button", name="wrong but paid").inner_text()
    number = int(chip.split()[-1])
    expect(lab.get_by_text(f"{number} of ")).to_be_visible()
    grid = lab.get_by_role("grid")
    grid.press("/")
    page.keyboard.type("sampled")
    expect(lab.get_by_role("searchbox")).to_have_value("sampled")
    expect(lab.get_by_text(f"{number} of ")).to_have_count(0)
    expect(lab.get_by_role("button", name=chip, exact=True)).to_be_visible()
    expect(lab.locator("[data-n]").first).to_contain_text("84 or 85")
    assert rows(lab)[0][:2] == ("4", "▲ 0.63")
    grid.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    expect(lab.locator("mark")).to_have_text("84 or 85")
    expect(lab.get_by_text("check answer (right) 3 × 1 = 3")).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(lab.locator("mark")).not_to_have_text("84 or 85")
    page.keyboard.press("Escape")
    expect(lab.locator("mark")).to_have_count(0)
    expect(grid).to_be_focused()


def test_an_edited_completion_is_scored(page, lab):
    lab.locator("[data-n]", has_text="47 = 47 = 47").first.click()
    lab.get_by_text("edit", exact=True).click()
    text = "<reasoning>" + "= " * 40 + "</reasoning>\n<answer>1</answer>"
    lab.get_by_role("textbox", name="completion").fill(text)
    lab.get_by_role("button", name="Score again").click()
    expect(lab.get_by_text("shows work (form) 20 × 1 = 20")).to_be_visible()
    page.keyboard.press("Escape")
    lab.get_by_role("searchbox").fill("edited")
    expect(lab.locator("[data-n]")).to_contain_text("= = =")


def test_totals_follow_a_weight_and_groups_that_lose_their_signal_are_named(page, lab):
    lab.get_by_role("searchbox").fill("")
    press(lab, "wrong but paid", False)
    weight = lab.get_by_role("spinbutton", name="weight of shows_work")
    stuffed = lab.get_by_text("attack, wins: equations")
    expect(stuffed).to_be_visible()
    weight.fill("0")
    expect(stuffed).to_have_count(0)
    expect(lab.get_by_role("button", name="no signal 2, in 1 group")).to_be_visible()
    expect(lab).to_contain_text("7 of 8 groups with signal; lost by these weights: 6")
    expect(lab.get_by_role("status")).to_have_text("out of date")
    assert {total for total, *_ in rows(lab)} <= {"4", "3", "1", "0"}
    expect(lab.get_by_role("button", name="reward_weights = [1, 1, 0]")).to_be_visible()
    press(lab, "group 6")
    expect(lab.locator("[data-n]", has_text="sampled")).to_have_count(2)
    expect(lab).to_contain_text("6. What is 14 + 14? → 28")


def test_what_was_set_survives_a_reload(page, lab):
    lab.get_by_role("columnheader", name="advantage").get_by_role("button").click()
    lab.locator("[data-n]", has_text="sampled 1").click()
    marked = lab.locator("mark").inner_text()
    page.keyboard.press("Control+s")
    expect(page.locator(".jp-mod-dirty")).to_have_count(0)
    page.reload()
    lab = page.locator(".lab").first
    expect(lab.locator("mark")).to_have_text(marked, timeout=SLOW)
    weight = lab.get_by_role("spinbutton", name="weight of shows_work")
    expect(weight).to_have_value("0")
    expect(lab.get_by_role("button", name="group 6")).to_have_attribute("aria-pressed", "true")
    header = lab.get_by_role("columnheader", name="advantage")
    expect(header).to_have_attribute("aria-sort", "descending")


def test_thousands_of_completions_are_a_few_rows_of_the_page(page):
    lab = page.locator(".lab").nth(1)
    grid = lab.get_by_role("grid")
    count = int(grid.get_attribute("aria-rowcount"))
    assert count > 2000 and lab.locator("[data-n]").count() < 40
    grid.evaluate("grid => { grid.scrollTop = grid.scrollHeight; }")
    expect(lab.locator(f"[aria-rowindex='{count}']")).to_be_visible()
    lab.get_by_role("searchbox").fill("255 + 1")
    expect(lab.locator("[aria-rowindex='1']")).to_contain_text("255 + 1")
