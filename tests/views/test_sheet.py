"""The score sheet: what a completion says is shown, and never taken for markup."""

import html
import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import Scored, numeric_correctness_reward, reward, reward_set
from grpo_nb.views.tables import SHOWN_CHARACTERS, completions, highlight, score_sheet

HOSTILE = "<script>alert('1')</script><a href=x onclick=\"f()\">&amp;</table>' onload='g()"


@reward()
def gives(response: str) -> Scored:
    return Scored(None if response == "2" else 0.5, f"because of {HOSTILE}")


def sheet_of(*completions):
    preset = reward_set([(numeric_correctness_reward, 1.0), (gives.configured(HOSTILE), 0.5)])
    row = {"prompt": [], "question": f"1 + 1? {HOSTILE}", "answer": "2"}
    return score_sheet(Bench(preset).table([row], [completions]), preset)


def test_nothing_that_a_model_or_a_name_says_becomes_markup():
    page, found = sheet_of(f"{HOSTILE}<answer>{HOSTILE}</answer>", "2"), set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, given: found.update([tag], dict(given))
    parser.feed(page)
    assert found & {"mark", "script", "a", "onclick", "onload"} == {"mark"}
    assert page.count("</table>") == 1
    assert html.escape(HOSTILE, quote=False) in page


def test_none_no_signal_no_answer_and_cuts_are_shown():
    page = sheet_of("2", "2")
    assert page.count("<td>None<small>because of") == 2
    assert "zero advantage" in page and "zero advantage" not in sheet_of("2", "3")
    page = sheet_of("<answer>" + "$" * 100_000, "")
    assert page.count("$") == SHOWN_CHARACTERS - 9  # the tag, and the …
    assert page.count("<i>none</i>") == 2 and "$…" in page


TEXTS = [
    ("<reasoning>4+4=8</reasoning><answer>4</answer>", "4", "</span><mark>4</mark><span"),
    ("<answer>4</answer> (4 apples)", "4", "</span><mark>4</mark><span"),  # where it was read
    ("<answer>a <b></answer>", "a <b>", "<mark>a &lt;b&gt;</mark>"),
    (r"<answer>\boxed{7}</answer>", r"\boxed{7}", r"<mark>\boxed{7}</mark>"),
    ("no answer", None, ""),
]


@pytest.mark.parametrize(("text", "answer", "marked"), TEXTS)
def test_the_answer_is_marked_once(text, answer, marked):
    shown = highlight(text, answer)
    assert marked in shown
    assert shown.count("<mark>") == bool(answer)
    assert html.unescape(re.sub(r"</?(?:mark|span)[^>]*>", "", shown)) == text


def test_completions_are_shown_side_by_side_with_all_that_is_known_of_them():
    frame = pd.DataFrame({"question": ["a", "b", "c"], "completion": ["one two", "", "<b>"]})
    assert completions(frame).count("<td") == 2 * 4
    frame = frame.assign(answer=["two", None, None], total=[1.0, 0.5, 0.0], correct=True)
    frame = frame.assign(**{"brief_reward": 0.25, "brief_reward/reason": ["long", "", "<i>"]})
    page = completions(frame.query("total != 0.5"))
    heads = re.findall("<th[^>]*>(.*?)</th>", page)
    assert heads == ["", "0", "2"] and "<mark>two</mark>" in page
    texts = [re.sub("<[^>]*>", " ", cell).split() for cell in re.findall("<td.*?>(.*?)</td>", page)]
    assert [" ".join(text) for text in texts] == [
        *("question", "a", "c", "completion", "one two", "&lt;b&gt;", "answer", "two", "none"),
        *("total", "1", "0", "correct", "True", "True", "brief", "0.25 long", "0.25 &lt;i&gt;"),
    ]
    said = dict.fromkeys(("question", "completion", "answer"), HOSTILE)
    hostile = pd.DataFrame([said], [HOSTILE])
    assert "<script" not in completions(hostile) and "<mark>&lt;script" in completions(hostile)
    assert "no such completion" in completions(frame.query("total > 9"))
