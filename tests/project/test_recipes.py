"""docs/recipes.md, run as it stands, with the sizes that it gives itself."""

import json
import re
import shutil

import pytest
import yaml
from judge_server import serving, verdict
from pages import blocks, run_shell, write_files

from grpo_nb.data.rows import read_rows
from grpo_nb.machine import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs/recipes.md"
# Run in tests of their own: trials by test_sweep.py, the server by test_serve.py; what is cut
# off goes on in test_resume.py; two processes train in test_ranks.py. The staged training starts
# from a copy of the demo run.
ELSEWHERE = ("--ray local", "report runs/rates", "--name format")


@pytest.fixture(scope="module")
def place(tmp_path_factory, demo_run, forks):
    """A folder with the page's files and the run that `make demo` leaves."""
    folder = tmp_path_factory.mktemp("recipes")
    write_files(PAGE, folder)
    for name in ("demo", "format"):
        shutil.copytree(demo_run.path, folder / "runs" / name)
    return folder


@pytest.fixture(scope="module")
def judge_url():
    with serving() as server:
        server.script = [fair]
        yield server.url


def fair(body):
    """Grade by the reference answer, as a judge must to pass its tests."""
    said = body["messages"][1]["content"]
    quotes = dict(re.findall(r"<<<([A-Z ]+)>>>\n(.*?)\n<<<END \1>>>", said, re.DOTALL))
    right = f"<answer>{quotes['REFERENCE ANSWER']}</answer>"
    return verdict(8 if right in quotes["COMPLETION A"] else 2)


def steps(place):
    """Of the training: the lines of its metrics that are steps."""
    path = place / "runs/mine/train/metrics.jsonl"
    read = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in read if "reward" in line]


def csv_is_prepared_and_rewards_passed(place, said):
    assert "rewards    passed" in said
    rows = read_rows(place / "runs/mine/data/train.parquet")
    assert (len(rows), {row["level"] for row in rows}) == (40 - 8, {"0", "1"})


def factors_move(place, said):
    last = steps(place)[-1]
    assert 0.9 < last["soft_format_reward/factor"] < 1.2
    assert last["rewards/incremental_format_reward/mean"] <= 0.99


def the_second_run_starts_from_the_first(place, said):
    config = yaml.safe_load((place / "runs/correctness/config.yaml").read_text())
    assert config["settings"]["policy.adapter"] == ["format", "set"]
    assert (place / "runs/correctness/train/adapter/adapter_model.safetensors").is_file()


def judge_scores(place, said):
    report = json.loads((place / "runs/judged/rewards/report.json").read_text())
    grades = [line["clear"] / report["weights"]["clear"] for line in report["probes"]]
    assert report["passed"] and 0.2 <= min(grades) < 0.5 < max(grades) <= 0.8
    assert not [check for check in report["checks"] if check["name"].startswith("clear: ")]


def code_is_tested(place, said):
    report = json.loads((place / "runs/coder/rewards/report.json").read_text())
    assert report["passed"] and "code_execution_reward" in report["weights"]


def trials_are_listed(place, said):
    assert said.count("rates-00") == 6


CHECKS = {
    "Your own CSV": csv_is_prepared_and_rewards_passed,
    "Adaptive weights": factors_move,
    "Staged training": the_second_run_starts_from_the_first,
    "An LLM as judge": judge_scores,
    "Code tasks": code_is_tested,
    "A sweep": trials_are_listed,
}


def test_the_page_has_these_recipes():
    assert list(dict.fromkeys(block.section for block in blocks(PAGE, "bash"))) == list(CHECKS)


@pytest.mark.parametrize("title", list(CHECKS))
def test_a_recipe_does_what_it_says(title, place, judge_url):
    """In the page's order: the recipes on rewards and training go on with one run."""
    own = "".join(block.text for block in blocks(PAGE, "bash") if block.section == title)
    lines = own.replace("\\\n", " ").splitlines()
    kept = [line for line in lines if not any(part in line for part in ELSEWHERE)]
    CHECKS[title](place, run_shell("\n".join(kept), place, JUDGE_URL=judge_url))
