"""Running a run again from its manifest."""

import io
import json
import shutil

import pytest
from rich.console import Console

from grpo_nb.__main__ import main
from grpo_nb.pipeline import reproduce
from grpo_nb.runs import Run


@pytest.fixture
def copied(demo_run, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path))
    for name in ("demo", "other"):
        shutil.copytree(demo_run.path, tmp_path / name)
    return Run("demo"), Run("other")


def test_a_run_is_reproduced_from_what_it_recorded(copied, capsys):
    first, _ = copied
    (first / "settings.json").unlink()  # config.yaml is enough
    assert main(["reproduce", "demo", "--as", "same"]) == 0
    printed = capsys.readouterr().out
    assert "reproduced" in printed
    assert "NOT" not in printed
    again = Run("same")
    assert again.config() == first.config()
    adapter = "train/adapter/adapter_model.safetensors"
    assert again.files(adapter) == first.files(adapter)
    assert main(["reproduce", "demo", "--as", "other"]) == 2
    assert "is there already: give another name with --as" in capsys.readouterr().err


def test_the_first_step_that_differs_is_named(copied):
    first, other = copied
    path = other / "train/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["reward"] += 0.01  # the first line is a validation
    lines[1]["step_time"] += 100
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = json.loads((other / "eval/report.json").read_text())
    report["greedy"]["merged"]["accuracy"] += 0.1
    (other / "eval/report.json").write_text(json.dumps(report))
    differ = [line for line in reproduce.compare(first, other, 1e-3) if not line.equal]
    assert [line.what for line in differ] == [
        "metrics, first at step 3: reward",
        "evaluation greedy.merged.accuracy",
    ]
    text = io.StringIO()
    assert not reproduce.show(differ, Console(file=text, width=120))
    assert "NOT reproduced" in text.getvalue()
    assert all(line.equal for line in reproduce.compare(first, other, 0.5))


def test_versions_and_files_explain_but_data_counts(copied):
    first, other = copied
    versions = other.manifest()["03"]["versions"] | {"trl": "9.9"}
    other.record("03", {"versions": versions, "switches": {"VLLM_USE_V1": "0"}})
    differ = [line for line in reproduce.compare(first, other, 1e-3) if not line.equal]
    assert [(line.what, line.again, line.counts) for line in differ] == [
        ("UNSLOTH_*, VLLM_*", "{'VLLM_USE_V1': '0'}", False),
        ("trl", "9.9", False),
    ]
    assert reproduce.show(differ, Console(file=io.StringIO()))
    other.record("01", {"outputs": {}})
    lost = [line.what for line in reproduce.compare(first, other, 1e-3) if line.counts]
    assert "data/train.parquet" in lost
    shown = reproduce.show(reproduce.compare(first, other, 1e-3), Console(file=io.StringIO()))
    assert not shown


def test_an_unfinished_run_is_refused(copied, capsys):
    first, _ = copied
    first.record("04", {"status": "failed"})
    assert main(["reproduce", "demo"]) == 2
    assert "has not finished 04_merge_and_infer" in capsys.readouterr().err
