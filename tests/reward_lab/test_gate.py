"""The verdict on a run's rewards, and whether stage 03 lets them train."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
from hackable import lifted

from grpo_nb import data, environments, reward_lab, runs, stages
from grpo_nb.files import project_path
from grpo_nb.models import Sample
from grpo_nb.reward_lab import RewardTest, baseline
from grpo_nb.rewards import load_preset, reward_set

SMALL = {"data.max_rows": 24}
MATH = load_preset("math")
STALE = "the rewards or their weights are not those that were tested"


@pytest.fixture
def lab(runs_dir):
    """Stage 02 of a run whose data stage 01 really prepared, with a baseline."""
    stage = runs.start("01", "gate", SMALL, profile="tiny-cpu")
    data.prepare_run(stage.run, stage.config.data, 0, lambda prompts: [10] * len(prompts))
    stage.finish("data")
    stage = runs.start("02", "gate", {"rewards.baseline_completions": 2})
    rows = data.load(stage.run, "train")
    said = [[Sample(MATH.reference(row), 9, False), Sample("?", 2, False)] for row in rows[:4]]
    tried = baseline.Baseline(rows[:4], said)
    return SimpleNamespace(stage=stage, run=stage.run, rows=rows, baseline=tried)


def lab_test(lab, preset=MATH, stage=None):
    return RewardTest(stage or lab.stage, lab.rows, lab.baseline, reward_lab.Bench(preset))


def judged(lab, preset):
    verdict = reward_lab.judge(lab_test(lab, preset))
    reward_lab.save(lab_test(lab, preset), verdict)
    return verdict


def refused(lab, preset, problem):
    with pytest.raises(ValueError, match=f"{problem}.* run 02_test_rewards.ipynb again"):
        reward_lab.refuse_untested(lab.run, preset)
    assert problem in reward_lab.refuse_untested(lab.run, preset, force=True)


def test_a_verdict_that_passed_lets_stage_03_start_with_the_same_rewards_alone(lab):
    refused(lab, MATH, "rewards/report.json is missing")
    verdict = judged(lab, MATH)
    assert verdict.passed
    kept = lab.run.manifest()["02"]["checks"]
    assert kept == [check._asdict() for check in verdict.checks]
    names = [check.name for check in verdict.checks if check.state == "ok"]
    assert names == ["rewards", "base model", "completion length"]
    lab.stage.finish("rewards")
    rewards = runs.start("03", "gate").config.rewards
    assert reward_lab.refuse_untested(lab.run, load_preset(rewards.preset, rewards.reward_weights))
    refused(lab, load_preset("math", "1, 0.5, 0.25, 0"), STALE)
    looser = MATH.reward_funcs[0].configured(MATH.names[0], relative=0.5)
    refused(lab, MATH._replace(reward_funcs=[looser, *MATH.reward_funcs[1:]]), STALE)


def test_a_failed_verdict_says_what_won_and_what_the_reference_reads(lab):
    never = reward_set([(lifted(lambda response, answer: False, "never"), 1.0)])
    first, *more = judged(lab, never).failures
    nothing = "nothing earns: no way was found in which an answer earns more than another"
    assert first.startswith(nothing)
    assert f"such as {lab.rows[0]['answer']!r} (answer)" in first
    refused(lab, never, f"and {len(more)} more in rewards/report.json")
    judged(lab, reward_set([(lifted(lambda response, answer: answer in response, "found"), 1.0)]))
    report = json.loads((lab.run / "rewards/report.json").read_text())
    assert report["failures"][0].startswith("mentioned: ") and "`found` pays 1" in str(report)
    shown = {line["attack"]: line["completion"] for line in report["probes"]}
    assert shown["empty completion"] == "''"


def test_a_base_that_earns_nothing_is_not_blamed_on_the_rewards(lab):
    silent = [[Sample("?", 2, False)] * 2 for _ in lab.baseline.rows]
    lab.baseline = lab.baseline._replace(samples_P_G=silent)
    said = "the rewards are fine; the base does not solve this: right in 0.0% of its samples"
    verdict = judged(lab, MATH)
    assert str(verdict).startswith(f"FAILED, train after a remedy: {said}")
    helps = "an SFT warm-up .data.sft_rows = 64 .*or another base .* begin again with 01_prepare"
    with pytest.raises(ValueError, match=f"{said}.* What helps: {helps}"):
        reward_lab.refuse_untested(lab.run, MATH)
    assert said in reward_lab.refuse_untested(lab.run, MATH, force=True)
    assert "has to wait: see the fix of base model" in lab.stage.finish("rewards")


MINE = """from grpo_nb import rewards
def helper(response): return 0.5 * len(response[:1])
@rewards.reward()
def mine(response: str, answer: str) -> float: return 0.5 * helper(response) * (answer in response)
"""


@pytest.mark.parametrize("line", ["0.5 * len", "0.5 * helper"])
def test_a_changed_source_of_a_users_file_is_refused(lab, tmp_path, line):
    path = tmp_path / "json.py"  # which does not stand in the way of the library's
    path.write_text(MINE)
    judged(lab, load_preset(str(path)))
    refused(lab, load_preset(str(path)), "failed")
    path.write_text(MINE.replace(line, f"0 + {line}"))
    refused(lab, load_preset(str(path)), STALE)


WORLD = """from pathlib import Path
class World:
    \'\'\'Name the number.\'\'\'
    def reset(self):
        self.won = self.done = False
    def name(self, number: int) -> str:
        \'\'\'Name it.

        Args:
            number: The number.
        \'\'\'
        self.won, self.done = number == 4, True
        return "done"
    def get_reward(self) -> float:
        return float(self.won)
    @classmethod
    def solve(cls, **row):
        return [{"name": "name", "arguments": {"number": 4}}]
"""


def test_an_environment_is_compared_by_its_file(lab, tmp_path):
    path = tmp_path / "world.py"
    path.write_text(WORLD)
    lab.stage.change({"data.environment": f"{path}:World"})
    environment, preset = environments.load(f"{path}:World"), load_preset("environment")
    bench = reward_lab.Bench(preset, environment=environment)
    said = baseline.Baseline(lab.rows[:2], [[Sample("", 1, False)] * 2] * 2)
    test = RewardTest(lab.stage, lab.rows, said, bench)

    def picky(completions, environments, **_):
        return [1 / (1 - each.get_reward()) for each in environments]

    verdict = reward_lab.judge(test.using(preset.adding(picky, 0.0)))
    assert "raises: ZeroDivisionError" in str(verdict), "on an episode"
    reward_lab.save(test, reward_lab.judge(test))
    # The base of this fixture never plays, so that there is nothing to learn.
    report = json.loads((lab.run / "rewards/report.json").read_text())
    (lab.run / "rewards/report.json").write_text(json.dumps(report | {"passed": True}))
    assert reward_lab.refuse_untested(lab.run, preset) == "the rewards passed their test"
    path.write_text(path.read_text() + "secret = 5")
    refused(lab, preset, "the environment is not the one that was tested")


BAKED = """
def doubled(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [2.0 * (f"<answer>{expected}</answer>" in text) for expected, text in zip(answer, texts)]
"""


@pytest.mark.parametrize("declared", ["", "doubled.range = (0.0, 2.0)"])
def test_a_plain_reward_with_its_weight_in_the_score_is_attacked_as_it_is(lab, declared):
    path = lab.run / "own.py"
    path.write_text(BAKED + declared)
    (failure, *_) = failures = judged(lab, load_preset(str(path))).failures
    assert failure.startswith("several answers: ") and "`doubled` pays 2" in failure
    assert json.loads((lab.run / "rewards/report.json").read_text())["failures"] == failures
    doubled = (load_preset(str(path)).reward_funcs[0], 0.25)
    verdict = judged(lab, reward_set([(MATH.reward_funcs[0], 1.0), doubled]))
    assert verdict.passed and verdict.probes["doubled"].max() == 0.5  # times its weight


OWN = """import re
from dataclasses import dataclass

TAG = re.compile("<answer>(.*?)</answer>")


def last(text):
    return TAG.findall(text)[-1:]


@rewards.reward()
def brief(response: str) -> float:
    return float(len(response) < 90)


def right(completions, answer, **kwargs):
    print("scoring")
    return [2.0 * (last(c[0]["content"]) == [a]) for c, a in zip(completions, answer)]


@dataclass
class Judge:
    least: "int"

    async def __call__(self, completions, **kwargs):
        return [float(len(completion[0]["content"]) > self.least) for completion in completions]


judge = Judge(1)
"""
LISTED = "reward_funcs, reward_weights = [judge, brief, right], [0.125, 0.25, 1]\n"
FORM = "def reference(row): return f\"<answer>{row['answer']}</answer>\"\n"
SHOW = """from grpo_nb import rewards, runs; from grpo_nb import reward_lab as bench
preset = rewards.load_preset(runs.Run("gate").config().rewards.preset)
given = {"answer": ["4"], "prompts": ["?"]}
scores = [rewards.call(func, completions=[[{"content": "<answer>4</answer>"}]], **given)
    for func in preset.reward_funcs]
print(preset.names, preset.reward_weights, preset.full, scores, bench.fingerprint(preset))"""
EXACT = "reward_funcs = [rewards.numeric_correctness_reward]\n"


def adopted(lab, source):
    return stages.adopt(lab_test(lab), source).bench.preset


def test_a_cell_of_rewards_with_all_that_they_need_is_trained_as_it_was_tested(lab, capsys):
    preset = adopted(lab, OWN)
    assert (preset.names, preset.correct) == (["brief", "right", "judge"], "right")
    assert (preset.reward_weights, preset.full) == ([1.0] * 3, 2.0)
    assert capsys.readouterr().out == ""  # what rewards print, a hundred times
    preset = adopted(lab, OWN + LISTED)  # edited, and run again
    assert (preset.names, preset.reward_weights) == (["judge", "brief", "right"], [0.125, 0.25, 1])
    assert preset.correct == "right"
    judged(lab, preset)
    lab.stage.finish("rewards")
    assert preset.reference(lab.rows[0]) == MATH.reference(lab.rows[0])
    shown = subprocess.check_output([sys.executable, "-c", SHOW], text=True).splitlines()[-1]
    scores = [[1.0], [1.0], [2.0]]
    expected = (preset.names, preset.reward_weights, 2.0, scores, reward_lab.fingerprint(preset))
    assert shown == " ".join(map(str, expected))
    again = load_preset(runs.start("03", "gate").config.rewards.preset)
    assert reward_lab.refuse_untested(lab.run, again, True)


def test_a_cell_may_bring_its_own_form_and_an_emptied_one_leaves_the_preset(lab):
    assert adopted(lab, OWN + FORM).reference({"answer": 4}) == "<answer>4</answer>"
    path = lab.stage.config.rewards.preset
    assert lab.run.settings()["rewards.preset"] == path == str(lab.run / "rewards/mine.py")
    assert adopted(lab, OWN).reference(lab.rows[0]) == MATH.reference(lab.rows[0])
    again = runs.start("02", "gate")
    stages.adopt(lab_test(lab, stage=again), "# nothing\n")
    assert again.config.rewards.preset == "math"


def in_cell(notebook):
    cells = nbformat.read(project_path(f"notebooks/{notebook}.ipynb"), as_version=4).cells
    (cell,) = [c for c in cells if "your-reward-here" in c.metadata.get("tags", [])]
    magic, text = cell.source.split("\n", 1)
    assert magic == "%%rewards"
    return re.sub("^# ?", "", text, flags=re.M)  # as Ctrl-/ leaves the lines below the first


@pytest.mark.parametrize("notebook", ["00_quickstart", "02_test_rewards"])
def test_the_example_passes_and_the_one_marked_so_fails_by_the_attack_that_it_names(lab, notebook):
    text = in_cell(notebook)
    assert judged(lab, adopted(lab, text)).passed
    head, mark, failing = text.partition("fail on purpose, see why: it pays for silence.\n")
    assert mark
    verdict = judged(lab, adopted(lab, head + "\n" + re.sub("^# ?", "", failing, flags=re.M)))
    assert any(failure.startswith("nothing written: ''") for failure in verdict.failures)


WRONG = {
    "line 2 .*: NameError: .*'re'.*; what the rewards need": "\nre.compile('x')",
    r"^line 2 \(1 / 0\): ZeroDivisionError: division by zero$": "\n1 / 0",
    r"^line 1 \(!pip install x\): SyntaxError: invalid": "!pip install x\ndef f(completions): ...",
    r"^line 2 \(sys.exit\(3\)\): SystemExit: 3$": "import sys\nsys.exit(3)",
    r"\[\] is not a list of rewards to train with: write": "def helper(text): return 1",
    "1 reward_weights for 3 reward_funcs, which are judge, brief, right": f"{OWN}{LISTED}"
    "reward_weights = [1]",
    "is not a list of rewards to train with": f"{OWN}reward_funcs = ['right']",
    "'both'. is not a list of rewards": f"{OWN}both = rewards.gated(brief, by=brief)",
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_cell_that_cannot_be_trained_is_refused_and_changes_nothing(lab, problem):
    with pytest.raises(ValueError, match=problem):
        adopted(lab, WRONG[problem])
    assert lab.stage.config.rewards.preset == "math"
    assert not (lab.run / "rewards/mine.py").exists()


NOTEBOOK = """import json, sys
from IPython.core.interactiveshell import InteractiveShell
from grpo_nb import reward_lab
from grpo_nb.stages.rewards_cell import RewardsCell
taken = []
for cells in json.loads(sys.argv[1]):
    InteractiveShell.clear_instance()
    shell, own = InteractiveShell.instance(), RewardsCell()
    own.register()
    errors = [shell.run_cell(cell, store_history=True).error_in_exec for cell in cells]
    try:
        text = own.adopted_text()
    except ValueError as error:
        text = f"refused: {error}"
    taken.append([text, [repr(error) for error in errors if error]])
print(json.dumps(taken))"""
MAGIC, FIRST = "%%rewards\n", "def f(completions, **_): return 1"
SECOND, SCRATCH = "def g(completions, **_): return 2", "x = g([])\ndef helper(text): return 3"
NOTED, USED = "# Your rewards, gone again", "reward_funcs = [f]"
CELLS = {  # cells as they were run, and the place of the one that is taken, or what is said
    "the last one, whose functions other cells call": ([MAGIC + FIRST, MAGIC + SECOND, SCRATCH], 1),
    "emptied": ([MAGIC + FIRST, MAGIC + NOTED], 1),
    "a class": ([f"{MAGIC}class A:\n  def __call__(self, completions): ...\na = A()"], 0),
    "none": (["x = 1"], ""),
    "other functions": (["import json\ndef helper(text): return 3\nfuncs = [json.loads]"], ""),
    "pasted over the magic": ([MAGIC + NOTED, f"{FIRST}\n{USED}"], "refused: f, reward_funcs: "),
    "pasted over the magic, again": ([MAGIC + FIRST, FIRST], "refused: f: defined in a cell that"),
    "lifted": (["import grpo_nb.rewards as r\n@r.reward()\ndef f(response): ..."], "refused: f: "),
    "put right": ([FIRST, MAGIC + FIRST], 1),
}


def test_the_cell_is_the_one_that_was_run_last_and_rewards_outside_of_it_are_not_passed_over():
    command = [sys.executable, "-c", NOTEBOOK, json.dumps([cells for cells, _ in CELLS.values()])]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    all_taken = json.loads(printed.splitlines()[-1])
    for (text, errors), (case, (cells, expected)) in zip(all_taken, CELLS.items(), strict=True):
        assert errors == [], case
        if isinstance(expected, int):
            assert text == cells[expected].replace(MAGIC, "# %%rewards\n") + "\n", case
        else:
            assert text.startswith(expected) and bool(text) == bool(expected), case


def test_a_cell_is_kept_as_it_is_and_what_was_measured_beside_it(lab):
    text = f"from __future__ import annotations\n\n{OWN}"
    assert adopted(lab, text).full == 2.0
    assert (lab.run / "rewards/mine.py").read_text(encoding="utf-8") == text
    about = json.loads((lab.run / "rewards/mine.about.json").read_text())
    assert (about["form"], about["ranges"]) == ("math", {"right": [0.0, 2.0]})
    assert adopted(lab, EXACT).names == MATH.names[:1]
    assert json.loads((lab.run / "rewards/mine.about.json").read_text())["ranges"] == {}


def test_what_a_file_of_rewards_pays_is_measured_and_known_to_later_stages(lab, tmp_path):
    lab.stage.change({"rewards.preset": str(path := tmp_path / "paid.py")})
    for pay in (2.0, 0.5):  # the second reward of the file, which is edited in between
        path.write_text(OWN.replace("2.0 *", f"{pay} *"))
        preset = adopted(lab, "")
        assert (preset.full, preset.correct) == (pay, "right")
        config = runs.Run("gate").config().rewards  # as later stages read it
        assert load_preset(config.preset, about=config.about).full == pay
