"""The live dashboard without a browser: what it draws, keeps, and asks for."""

import base64
import json
import math
import re

import numpy as np
import pytest

from grpo_nb.checks import Check
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.runs import Run
from grpo_nb.training import Buttons, Update
from grpo_nb.views import charts, training_charts
from grpo_nb.views.dashboard import TrainingDashboard

HEALTHY = (PROJECT_ROOT / "tests/healthy_metrics.jsonl").read_text(encoding="utf-8")
LINES = [json.loads(line) for line in HEALTHY.splitlines()]
SCORES = {"exact_reward": 1.0, "reward": 1.0, "advantage": 0.5}


def update(line, completions=(), alerts=()):
    return Update(line, 100, completions, alerts)


def fed(*updates):
    """A dashboard that was told all of these, and drew the last."""
    dashboard = TrainingDashboard(Buttons())
    for one in updates:
        dashboard(one)
    dashboard.draw()
    assert dashboard.errors.value == ""
    return dashboard


def said(dashboard):
    """What the picture's text says of each chart, by its title."""
    (text,) = re.findall('<img alt="charts of the training; ([^"]*)"', dashboard.curves.value)
    return dict(part.split(": ", 1) for part in text.split("; "))


def drawn(lines, title):
    """The curve of a chart, [points]; a NaN is a gap."""
    (axis,) = [a for a in charts.draw(lines).axes if a.get_title(loc="left") == title]
    return axis.get_lines()[0].get_ydata()


def completion(text, reward, **more):
    return {"question": "q", "completion": text, **SCORES, "reward": reward, **more}


def test_a_real_training_fills_its_charts_and_no_others():
    dashboard = fed(*map(update, LINES))
    titles = list(said(dashboard))
    assert titles[:4] == ["reward, weighted total", "exact match", "fuzzy match", "soft format"]
    assert not {"KL to the base [nats]", "validation"} & {*titles}
    assert titles[-1] == "step time [s]"
    png = base64.b64decode(dashboard.curves.value.partition("base64,")[2])
    assert png.startswith(b"\x89PNG")
    pace = sum(line["step_time"] for line in LINES[-20:]) / 20
    for part in ("step 60 of 100", f"{pace:.3g} s per step · about 0:00:{40 * pace:02.0f} left"):
        assert part in dashboard.header.value


def test_a_legend_names_every_curve_with_its_value_and_lies_on_none():
    seconds = {"seconds/generation": 0.9, "seconds/reward": 0.01, "seconds/update": 0.95}
    lines = [{"step": step, **seconds, "step_time": 2.0} for step in range(1, 30)]
    for step in (0, 20):
        lines.append({"step": step, "eval/exact": 0.1, "eval/accuracy": 0.5, "eval/format": 1.0})
    figure = charts.draw(lines)
    figure.canvas.draw()
    legends = [axis for axis in figure.axes if axis.get_legend()]
    assert [axis.get_title(loc="left") for axis in legends] == ["validation", "step time [s]"]
    texts = [text.get_text() for text in legends[0].get_legend().get_texts()]
    assert texts == ["exact 10%", "accuracy 50%", "format 100%"]
    for axis in legends:
        highest = max(line.get_ydata().max() for line in axis.get_lines())
        top = axis.transData.transform((0, highest))[1]
        assert axis.get_legend().get_window_extent().y0 > top
        assert max(axis.get_yticks()) <= highest + 1


def test_after_stop_the_board_says_so_and_offers_nothing_more():
    dashboard = TrainingDashboard(Buttons())
    dashboard(update(LINES[0] | {"step": 30}))
    assert "left" in dashboard.header.value
    dashboard.button_widgets["stop"].click()
    assert "stops after the step in progress" in dashboard.wishes.value
    dashboard(update(LINES[0] | {"step": 31}))
    assert "stopped after step 31, with a checkpoint" in dashboard.wishes.value
    assert "stopped</span>" in dashboard.header.value and "left" not in dashboard.header.value
    assert all(button.disabled for button in dashboard.button_widgets.values())
    dashboard.buttons.stop.clear()  # as `train` does when it goes on
    dashboard(update(LINES[0] | {"step": 32}))
    assert "left" in dashboard.header.value
    assert not any(button.disabled for button in dashboard.button_widgets.values())


@pytest.mark.parametrize("lost", [math.inf, None, "text"])
def test_a_metric_that_is_no_number_leaves_a_gap(lost):
    lines = [{"step": step, "reward": 1.0, "kl": 0.5} for step in range(1, 8)]
    lines[3] |= {"kl": lost}
    assert np.isnan(drawn(lines, "reward, weighted total")).sum() == 0
    gaps = np.isnan(drawn(lines, "KL to the base [nats]"))
    assert list(gaps) == [False, False, False, True, False, False, False]
    assert "nan" not in str(said(fed(*map(update, lines))))


def test_the_best_the_worst_and_another_completion_are_shown_escaped():
    texts = ["<b>worst</b>", "middle & co", "<script>best</script>", "a" * 300 + "<i>tail</i>"]
    scored = [completion(text, reward) for text, reward in zip(texts, (-1, 0, 2, 1), strict=True)]
    scored[0]["exact_reward"] = math.nan
    shown = fed(update(LINES[0], [{"note": "of a reward's log_extra", **line} for line in scored]))
    page = shown.completions.value
    assert re.findall("<th[^>]*>(.*?)</th>", page) == ["", "best", "worst", "random"]
    lines = [re.findall("<td[^>]*>(.*?)</td>", line) for line in page.split("<tr>")[2:]]
    said = {name: cells for name, *cells in lines}
    assert [*said] == ["question", "completion", "exact", "total", "advantage"]
    best, worst, other = said["completion"]
    assert "&lt;script&gt;" in best and "<script" not in best
    assert "&lt;b&gt;" in worst and said["exact"][1] == "None"
    assert "middle &amp; co" in other or "&lt;i&gt;" in other
    assert not re.search("<script|<i>|<b>worst", shown.completions.value)


def test_what_stops_comes_before_warnings_and_the_newest_first():
    states = {1: "warning", 2: "stop", 3: "warning", 4: "stop"}
    alerts = {step: Check("<x>", state, "e < 1", "fix > it") for step, state in states.items()}
    told = (update({"step": step}, alerts=[one]) for step, one in alerts.items())
    shown = fed(*told).listed.value
    cells = re.findall("<td[^>]*>(.*?)</td>", shown)
    assert cells[::5] == ["4", "2", "3", "1"]
    assert cells[1:5] == ["&lt;x&gt;", "stop", "e &lt; 1", "fix &gt; it"]


def test_pictures_take_a_small_share_of_the_time_and_the_last_one_is_drawn(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("grpo_nb.views.dashboard.time.monotonic", lambda: clock[0])
    dashboard, pictures = TrainingDashboard(Buttons()), []

    def slow_curves(_):
        clock[0] += 0.5
        return f"picture {dashboard.step}"

    monkeypatch.setattr(charts, "image", slow_curves)
    dashboard.curves.observe(lambda change: pictures.append(change["new"]), "value")
    for step in range(1, 101):
        clock[0] += 1
        dashboard(update({"step": step, "reward": 0.5}))
        assert f"step {step} of 100" in dashboard.header.value
    assert pictures[0] == "picture 6" and pictures[-1] == "picture 100" and len(pictures) < 5


def test_an_error_is_shown_and_the_training_goes_on():
    dashboard = TrainingDashboard(Buttons())
    dashboard.buttons.stop.set()  # the last step is drawn at once
    dashboard(update(LINES[0], ["no dict"]))
    assert "KeyError" in dashboard.errors.value
    assert "role='alert'" in dashboard.errors.value


def test_the_picture_holds_the_same_charts(runs_dir):
    held_out = [{"step": step, "eval/accuracy": 0.5, "eval/format": 0.9} for step in (20, 40)]
    lines = [*LINES[:30], LINES[30] | {"entropy": None}, *held_out, *LINES[31:]]
    picture = training_charts(Run("x"), lines)
    titles = [axis.get_title(loc="left") for axis in picture.axes if axis.axison]
    assert titles == list(said(fed(*map(update, lines))))
    points = picture.axes[titles.index("validation")].get_lines()
    assert [list(line.get_xdata()) for line in points] == [[20, 40], [20, 40]]
    assert (Run("x") / "figures/training.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="train first"):
        training_charts(Run("x"), [])
