"""The Environment Lab's callbacks, driven without a browser; tests/browser drives them with one."""

import html
import re

import pytest
from hackable import ROWS
from scripted_model import played, rows_of, tokenizer

from grpo_nb import environments, views
from grpo_nb.models.engine import Sample
from grpo_nb.reward_lab import Bench, RewardTest, bench_of
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.views.environment_lab import OWN, EnvironmentLab, turns_of


def guess(n):
    return {"name": "guess", "arguments": {"n": n}}


def scripts(row):
    """Found at once; both ends at a time, and no more; a call that nobody can read."""
    low = row["low"]
    ends = [[guess(low), guess(low + 7)], "Done."]
    return [[guess(row["secret"]), "Done."], ends, ['<tool_call>\n{"name": guess}', "Done."], [""]]


def opened(environment, rows, scripts, **settings):
    config = resolve("tiny-cpu", {"task": "guess", "data.environment": environment, **settings})
    tried = played(environments.of(config), rows[:2], scripts)
    bench = bench_of(config, load_preset("environment"), tokenizer())
    return views.lab(RewardTest(Stage(Run("lab"), "02", config), rows, tried, bench))


@pytest.fixture(scope="module")
def rows():
    return rows_of("guess", 16)


@pytest.fixture(scope="module")
def guesses(rows):
    lab = opened("guess", rows, scripts)
    assert lab.errors.value == ""
    return lab


@pytest.fixture
def lab(guesses):
    """As it opens: at the first episode of the first row."""
    guesses.number.value = 1
    guesses.number.value = 0
    return guesses


def shown(lab):
    """(role, turn, whether it is grey) of each line, and what stands above them."""
    page = html.unescape(lab.view.value)
    lines = re.findall(r"<tr( class=chosen)?>(<td.*?)</tr>", page, re.DOTALL)
    cells = [(re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL), grey) for grey, line in lines]
    told = re.sub("<[^>]*>", "", re.search("<caption>(.*?)</caption>", page, re.DOTALL)[1])
    return [(a, re.sub("<[^>]*>", "", b), bool(grey)) for (a, b), grey in cells], told


def choose(lab, start):
    [place] = [value for label, value in lab.player.options if label.startswith(start)]
    lab.player.value = place


def write(lab, text):
    lab.box.value = text
    lab.play.click()


def test_a_task_without_an_environment_has_the_reward_lab():
    stage = Stage(Run("lab"), "02", resolve("tiny-cpu", {}))
    tried = Baseline(ROWS[:1], [[Sample("7", 2, False)] * 2])
    lab = views.lab(RewardTest(stage, ROWS, tried, Bench(load_preset("math"))))
    assert isinstance(lab, views.RewardLab)


def test_it_opens_with_the_findings_and_who_played_each_row(lab):
    assert isinstance(lab, EnvironmentLab)
    assert "scripted policies find no fault" in lab.findings.value
    labels = [label for label, _ in lab.player.options]
    assert labels[0] == f"rollout 1 (reward 1, advantage {lab.group['advantage'][0]:+.2f})"
    assert {"scripted: idle", "scripted: oracle", OWN} <= set(labels)
    lab.number.value = 1
    assert lab.player.value == 0 and lab.row["question"] in lab.view.value


def test_an_episode_is_shown_turn_by_turn_with_what_is_masked(lab, rows):
    choose(lab, "rollout 2")
    sample, low = lab.baseline.samples_P_G[0][1], rows[0]["low"]
    lines, told = shown(lab)
    assert [(role, text) for role, text, _ in lines] == [
        ("system, user", f"Find the secret number in at most 4 guesses.\n{rows[0]['question']}"),
        ("assistant", f"guess(n={low})\nguess(n={low + 7})"),
        ("tool, tool", "→ higher\n→ right"),
        ("assistant", "Done."),
    ]
    assert [grey for *_, grey in lines] == [True, False, True, False]
    assert f"\n{len(sample.ids)} of 128 tokens; grey: masked" in told
    gain = lab.group["advantage"][1]
    assert "rollout 2" in told and "ended: answered" in told
    assert f"reward 1, mean of the group 0.5, advantage {gain:+.2f}" in told
    assert lab.box.value == f'[{{"name": "guess", "arguments": {{"n": {low}}}}}, ' + (
        f'{{"name": "guess", "arguments": {{"n": {low + 7}}}}}]\n"Done."'
    )


def test_what_the_model_reads_is_that_of_its_episode(lab):
    tokenizer = lab.bench.tokenizer
    for number, sample in enumerate(lab.baseline.samples_P_G[0]):
        lab.player.value = number
        read = re.search(
            "</summary><div class='text'>(.*)</div></details>", lab.view.value, re.DOTALL
        )[1]
        text = html.unescape(re.sub("<[^>]*>", "", read))
        assert text.endswith(tokenizer.decode(sample.ids)), number


def test_scripted_policies_play_when_they_are_chosen(lab, rows):
    choose(lab, "scripted: oracle")
    lines, told = shown(lab)
    assert "reward 1, mean of the group 0.6" in told, "as one more of the group"
    assert turns_of(lab.box.value) == environments.load("guess").solution(rows[0])
    assert lines[-1][:2] == ("assistant", "(says nothing)")
    for label, player in lab.player.options:
        lab.player.value = player
        assert lab.errors.value == "", label
    choose(lab, "scripted: random calls")
    assert "ended: turn limit" in shown(lab)[1]


def test_a_changed_call_is_played_on_the_real_environment(lab, rows):
    low = rows[0]["low"]
    choose(lab, "rollout 2")
    write(lab, lab.box.value.replace(str(low + 7), str(low + 1)))
    lines, told = shown(lab)
    assert lab.player.value == OWN and OWN in told and lab.errors.value == ""
    assert [text for role, text, *_ in lines if role != "assistant"][1:] == ["→ higher\n→ higher"]
    assert "reward 0, mean of the group 0.4, advantage -" in told
    write(
        lab, f'{{"name": "gess", "arguments": {{}}}}\n{{"name": "guess", "arguments": ["{low}"]}}'
    )
    results = [text for role, text, *_ in shown(lab)[0] if role == "tool"]
    assert len(results) == 2 and all(text.startswith("→ {'error': ") for text in results)
    write(lab, "")
    assert shown(lab)[0][-1][:2] == ("assistant", "(says nothing)")


FAULTS = {
    "line 2 is not a turn: guess(4)": '"a text"\nguess(4)',
    'line 1 is not a turn: {"name": "guess"}': '{"name": "guess"}',
    "line 1 is not a turn: 4": "4",
    "line 1 is not a turn: [4]": "[4]",
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_line_that_is_no_turn_is_named(lab, said):
    before = lab.view.value
    write(lab, FAULTS[said])
    errors = html.unescape(lab.errors.value.partition("<details>")[0])
    assert said in errors and 'a call {"name": ' in errors
    assert lab.view.value == before and not lab.play.disabled
    write(lab, '"a text"')
    assert lab.errors.value == ""


MINE = '''"""Mine."""
import threading

class Shop:
    """Buy <b>fruit</b>."""

    tool_seconds, done = 0.05, False

    def reset(self, price: int) -> str:
        self.bought = False
        return " <i>now</i>"

    def buy(self, what: str) -> str:
        """Buy it.

        Args:
            what: A fruit.
        """
        if what == "pear":
            threading.Event().wait()
        self.bought = self.done = self.bought or what == "apple"
        return "<script>alert(1)</script>"

    def get_reward(self) -> float:
        return float(self.bought)

    @classmethod
    def solve(cls, **row) -> list:
        return [{"name": "buy", "arguments": {"what": "apple"}}]
'''


def test_a_call_beyond_the_limit_earns_nothing(tmp_path):
    file, buy = tmp_path / "mine.py", {"name": "buy", "arguments": {"what": "plum"}}
    file.write_text(MINE.replace("done = 0.05, False", "max_turns = 0.05, 2"))
    rows = [
        {"question": "Go", "answer": "", "price": 1, "prompt": [{"role": "user", "content": "Go"}]}
    ]
    wins = [buy, buy, {"name": "buy", "arguments": {"what": "apple"}}]
    lab = opened(f"{file}:Shop", rows, lambda _: [wins, [*wins[1:], "so"]])
    assert lab.group["total"].tolist() == [0, 1]
    assert "ended: turn limit" in shown(lab)[1] and shown(lab)[0][-1][0] == "assistant"
    write(lab, lab.box.value)
    assert "reward 0" in shown(lab)[1] and "ended: turn limit" in shown(lab)[1]


def test_a_class_of_ones_own_is_read_again_and_its_words_are_escaped(tmp_path):
    file, buy = tmp_path / "mine.py", {"name": "buy", "arguments": {"what": "apple"}}
    file.write_text(MINE)
    rows = [{"question": f"At <u>{n}</u>", "answer": "", "price": n} for n in range(16)]
    rows = [row | {"prompt": [{"role": "user", "content": row["question"]}]} for row in rows]
    lab = opened(f"{file}:Shop", rows, lambda _: [[buy, "<b>done</b>"], ["no"]])
    assert lab.errors.value == ""
    assert "scripted policies find no fault" not in lab.findings.value
    assert "state leaks" in lab.findings.value
    for text in ("<script>alert", "<u>0", "<i>now", "<b>done"):
        assert text not in lab.view.value + lab.findings.value
        assert html.escape(text) in lab.view.value
    write(lab, '{"name": "buy", "arguments": {"what": "pear"}}\n"so"')
    assert "ended: a call hung" in shown(lab)[1]
    file.write_text(MINE.replace("self.bought = False", "self.bought = self.done = False"))
    lab.test.click()
    assert lab.errors.value == "" and "no fault" in lab.findings.value
    file.write_text(MINE.replace("return float(self.bought)", "return 7"))
    lab.test.click()
    assert "get_reward() gave 7" in html.unescape(lab.findings.value + lab.errors.value)
