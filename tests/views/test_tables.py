"""Tables: what a completion says is shown, and never taken for markup; images are small and few."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
from pictures import ROWS
from PIL import Image

from grpo_nb.views import completions
from grpo_nb.views.tables import IMAGE_SIDE, SHOWN_CHARACTERS, SHOWN_IMAGES, table

HOSTILE = "<script>alert('1')</script><a href=x onclick=\"f()\">&amp;</table>' onload='g()"
NOTEBOOK = 300_000  # bytes, at most
URI = re.compile(r"<img alt='image' src='data:image/png;base64,([^']+)'>")


def shown(page):
    return [
        Image.open(io.BytesIO(base64.b64decode(uri))).convert("RGB") for uri in URI.findall(page)
    ]


def test_nothing_that_a_model_or_a_name_says_becomes_markup():
    said = dict.fromkeys(("question", "completion", "answer", HOSTILE), HOSTILE)
    for frame in (pd.DataFrame([said], [HOSTILE]), completions(pd.DataFrame([said], [HOSTILE]))):
        page, found = table(frame), set()
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, given, found=found: found.update([tag], dict(given))
        parser.feed(page)
        assert not found & {"script", "a", "onclick", "onload"}
        assert page.count("</table>") == 1 and "&lt;script&gt;" in page


def test_long_texts_are_cut_and_what_is_missing_is_named():
    page = table(pd.DataFrame({"completion": ["$" * 100_000, "a"], "x_reward": [0.5, None]}))
    assert page.count("$") == SHOWN_CHARACTERS - 1 and "$…" in page
    assert "<th>x</th>" in page and "<td>None</td>" in page


def test_completions_are_shown_side_by_side_with_all_that_is_known_of_them():
    frame = pd.DataFrame({"question": ["a", "b", "c"], "completion": ["one two", "", "<b>"]})
    assert completions(frame).shape == (2, 4)
    frame = frame.assign(answer=["two", None, None], total=[1.0, 0.5, 0.0], correct=True)
    frame = frame.assign(**{"brief_reward": 0.25, "brief_reward/reason": ["long", "", ""]})
    page = completions(frame.query("total != 0.5"))
    assert list(page) == ["", 0, 2]
    assert page.iloc[:, 0].tolist() == [
        *("question", "completion", "answer", "total", "correct", "brief", "brief reward/reason")
    ]
    assert page[0].tolist() == ["a", "one two", "two", 1.0, True, 0.25, "long"]
    assert len(completions(frame.query("total > 9")).columns) == 1


def test_however_many_and_large_the_images_are_the_pages_are_small():
    noise = np.random.default_rng(0).integers(0, 256, (6, 700, 900, 3), np.uint8)
    images = [Image.fromarray(each) for each in noise]  # nothing compresses worse
    frame = pd.DataFrame([{"question": "?", "completion": "!", "images": images}] * 4)
    page = table(completions(frame))
    assert len(shown(page)) == SHOWN_IMAGES * 4 and len(page) < NOTEBOOK
    assert all(max(image.size) == IMAGE_SIDE for image in shown(page))
    assert images[0].size == (900, 700), "the images themselves stay as they are"
    frame = pd.DataFrame([{"completion": "!", "images": row["images"]} for row in ROWS[:3]])
    assert len(shown(table(frame))) == 3 and "PIL" not in table(frame)
