"""docs/SKILL.md, from its first command to its last, as a coding assistant would run them."""

import json
import shutil

import yaml
from pages import blocks, run_shell, write_files

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.runs import NOTEBOOKS

PAGE = PROJECT_ROOT / "docs/SKILL.md"


def test_the_front_matter_names_it_and_says_when_to_use_it():
    _, front, text = PAGE.read_text(encoding="utf-8").split("---\n", 2)
    about = yaml.safe_load(front)
    assert set(about) == {"name", "description"}
    assert "Use when" in about["description"] and len(about["description"]) < 1024
    assert text.strip().startswith("# ")


def test_every_command_runs_in_order_and_leaves_what_the_page_says(tmp_path, demo_run, forks):
    shutil.copytree(demo_run.path, tmp_path / "runs/demo")
    said = {}
    write_files(PAGE, tmp_path)
    for block in blocks(PAGE, "bash"):
        # four steps need not make a model better
        codes = (0, 1) if "grpo_nb checklist" in block.text else (0,)
        said[block.section[0]] = run_shell(block.text, tmp_path, codes)
    assert "rewards.py" in said["2"]
    assert "rewards    passed" in said["4"] and "'pass@1'" in said["4"]
    step = json.loads(said["6"].splitlines()[-2])
    assert {"reward", "frac_reward_zero_std", "completions/clipped_ratio"} <= set(step)
    assert "reedy" in said["7"]
    report = json.loads((tmp_path / "runs/try/rewards/report.json").read_text())
    assert report["weights"]["digits_reward"] == 0.125
    assert "try" in said["8"] and "demo" in said["8"]
    table = PAGE.read_text(encoding="utf-8").partition("| file in")[2]
    for line in table.splitlines()[2:]:
        for name in line.split("|")[1].replace("`", "").split(","):
            assert (tmp_path / "runs/try" / name.strip()).exists(), name
    manifest = json.loads((tmp_path / "runs/try/manifest.json").read_text())
    assert [manifest[stage]["status"] for stage in NOTEBOOKS] == ["done"] * 4
