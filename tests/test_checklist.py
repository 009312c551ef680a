"""The checklist: each check by a change that turns it, each stage of a run, each damaged file."""

import json
import random
import shutil
import subprocess

import pytest
import yaml
from filelock import FileLock

from grpo_nb import machine as versions
from grpo_nb.__main__ import main
from grpo_nb.pipeline import checklist
from grpo_nb.runs import NOTEBOOKS, Run, config, sha256, write_json
from grpo_nb.training import append_line, read_lines
from grpo_nb.training.health import Alert

METRICS = "train/metrics.jsonl"


def recorded(run):
    """Record every file in the manifest as it is now, as if its stage had just written it."""
    manifest = run.manifest()
    for entry in manifest.values():
        for kind in ("inputs", "outputs"):
            known = [path for path in entry[kind] if (run / path).exists()]
            entry[kind] = {path: sha256(run / path) for path in known}
        entry.pop("config", None)
    write_json(run / "manifest.json", manifest)


def rewrite(run, relative, change):
    """Change a JSON file, the lines of metrics, or config.yaml in place."""
    path = run / relative
    if path.suffix == ".jsonl":
        lines = read_lines(path)
        change(lines)
        path.unlink()
        for line in lines:
            append_line(path, line)
        return
    read, write = {".yaml": (yaml.safe_load, yaml.safe_dump), ".json": (json.loads, json.dumps)}[
        path.suffix
    ]
    content = read(path.read_text())
    change(content)
    path.write_text(write(content))


@pytest.fixture(scope="module")
def healthy(demo_run, tmp_path_factory):
    """A copy of the demo whose training went on for 12 steps, and whose evaluation is clear."""
    root = tmp_path_factory.mktemp("healthy")
    unread = shutil.ignore_patterns("notebooks", "figures", "checkpoint-*", ".lock")
    shutil.copytree(demo_run.path, root / "demo", ignore=unread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(root))
        run = Run("demo")

    def longer(lines):
        first = next(line for line in lines if "reward" in line)
        validated = {**next(line for line in lines if "eval/format" in line), "eval/format": 0.95}
        steps = [{**first, "step": i, "reward": i / 12 + i % 2 / 10} for i in range(1, 13)]
        lines[:] = [{**step, "frac_reward_zero_std": 0.5} for step in steps] + [validated]

    rewrite(run, METRICS, longer)
    rewrite(run, "eval/report.json", lambda report: compared(report).update(verdict="better"))
    rewrite(run, "manifest.json", lambda m: [e.update(git_commit="a" * 40) for e in m.values()])
    (run / "train/health.jsonl").write_text("")
    recorded(run)
    return run


@pytest.fixture
def run(healthy, runs_dir):
    shutil.copytree(healthy.path, runs_dir / "demo")
    return Run("demo")


def compared(report):
    return next(one for one in report["comparisons"] if one["after"] == "merged")


def lines_of(run, key, value):
    rewrite(
        run, METRICS, lambda lines: [line.update({key: value}) for line in lines if key in line]
    )


def states(run):
    return {line["check"]: line["state"] for line in checklist.examine(run)}


def failed(run):
    return {check for check, state in states(run).items() if state == "fail"}


def found(run, check):
    return next(line for line in checklist.examine(run) if line["check"] == check)


ALERT = Alert(9, "reward hacking", "error", "held-out accuracy falls", "90% → 40%", "read")
CHANGES = {
    "dataset": lambda r: rewrite(r, "data/report.json", lambda d: d.update(gold_parse_rate=0.9)),
    "no leakage": lambda r: shutil.copy(r / "data/eval.parquet", r / "data/train.parquet"),
    "rewards": lambda r: rewrite(
        r, "config.yaml", lambda c: c.update({"rewards.reward_weights": "1, 1, 1, 1"})
    ),
    "base model": lambda r: rewrite(
        r, "rewards/report.json", lambda d: d["pilot"].update({"pass@1": 0.0})
    ),
    "prompt length": lambda r: rewrite(
        r, "config.yaml", lambda c: c.update({"data.max_prompt_tokens": 16})
    ),
    "completion length": lambda r: rewrite(
        r, "config.yaml", lambda c: c.update({"train.max_completion_length": 8})
    ),
    "memory": lambda r: rewrite(
        r, "train/preflight.json", lambda d: d["checks"][-1].update(result="stop")
    ),
    "tracking": lambda r: rewrite(r, METRICS, lambda lines: lines.pop(4)),
    "reward rises": lambda r: rewrite(
        r, METRICS, lambda lines: [x.update(reward=-x["reward"]) for x in lines if "reward" in x]
    ),
    "signal": lambda r: lines_of(r, "frac_reward_zero_std", 1.0),
    "alerts": lambda r: append_line(r / "train/health.jsonl", ALERT._asdict()),
    "format": lambda r: lines_of(r, "eval/format", 0.4),
    "truncation": lambda r: lines_of(r, "completions/clipped_ratio", 0.6),
    "merge": lambda r: rewrite(
        r, "model/parity.json", lambda d: d.update(passed=False, faults=["KL 0.5 > 0.001"])
    ),
    "baseline": lambda r: rewrite(r, "eval/report.json", lambda d: d.update(prompts=3)),
    "better": lambda r: rewrite(
        r, "eval/report.json", lambda d: compared(d).update(verdict="not distinguishable")
    ),
    "reproducible": lambda r: rewrite(
        r, "manifest.json", lambda m: m["03"].update(git_commit="a" * 40 + "-dirty")
    ),
}


def test_a_finished_run_passes_every_check_that_a_file_can_answer(run, capsys):
    assert {check for check, state in states(run).items() if state != "pass"} == {"samples"}
    assert main(["checklist", "demo"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(checklist.CHECKS) - 1} pass, 1 look" in printed
    assert "train/*/completions/" in printed


@pytest.mark.parametrize("check", CHANGES)
def test_a_change_fails_its_check_and_no_other(run, check):
    CHANGES[check](run)
    recorded(run)
    assert failed(run) == {check}
    assert found(run, check)["evidence"]


def test_an_alert_whose_cause_is_gone_is_over_and_one_whose_cause_holds_is_not(run):
    def steps(silent):
        def longer(lines):
            step, validated = lines[0], lines[-1]
            lines[:] = [{**step, "step": i, "frac_reward_zero_std": silent(i)} for i in range(60)]
            lines += [{**validated, "step": 59}]

        rewrite(run, METRICS, longer)

    alert = ALERT._asdict() | {"rule": "nothing learnt", "evidence": "98% without signal"}
    append_line(run / "train/health.jsonl", alert)
    steps(lambda i: 0.98 if i < 20 else 0.3)
    line = found(run, "alerts")
    assert line["state"] == "pass"
    assert "1 grave, 0 warnings; all grave ones are over: step 9 error" in line["evidence"]
    steps(lambda i: 0.98)
    assert found(run, "alerts")["state"] == "fail"


def test_parameters_set_in_a_notebook_do_not_make_a_run_dirty_and_code_does(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    files = [tmp_path / name for name in ("notebooks/01.ipynb", "grpo_nb/a.py", "data/b.csv")]
    for file in files:
        file.parent.mkdir()
        file.write_text("one")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(versions, "PROJECT_ROOT", tmp_path)
    clean = versions.git_commit()
    assert len(clean) == 40
    files[0].write_text("two")
    assert versions.git_commit() == clean
    for file in files[1:]:
        file.write_text("two")
        assert versions.git_commit() == f"{clean}-dirty"
        file.write_text("one")
    assert versions.git_commit() == clean
    monkeypatch.setattr(versions, "PROJECT_ROOT", tmp_path.parent)
    assert versions.git_commit() == "unknown"


def test_a_graded_score_that_rose_without_more_whole_answers_is_for_a_person(run):
    graded = {"verdict": "better", "graded": True, "mcnemar_p": 1.0}
    rewrite(run, "eval/report.json", lambda report: compared(report).update(graded))
    recorded(run)
    assert found(run, "better")["state"] == "look"
    graded |= {"mcnemar_p": 0.01, "gained": 9, "lost": 1}
    rewrite(run, "eval/report.json", lambda report: compared(report).update(graded))
    recorded(run)
    assert found(run, "better")["state"] == "pass"


@pytest.mark.parametrize("check", ["rewards", "alerts", "merge"])
def test_the_evidence_says_what_was_found(run, check):
    CHANGES[check](run)
    said = {
        "rewards": "the rewards or their weights are not those that were tested",
        "alerts": "step 9 error: reward hacking (90% → 40%)",
        "merge": "KL 0.5 > 0.001",
    }
    assert said[check] in found(run, check)["evidence"]


@pytest.mark.parametrize(
    ("relative", "expected"),
    [
        ("data/report.json", {"notebooks 1 and 2", "notebook 3", "recorded"}),
        ("train/adapter/adapter_model.safetensors", {"notebook 3", "recorded"}),
        ("model/merged/config.json", {"recorded"}),
    ],
)
def test_a_file_that_changed_is_no_longer_the_recorded_one(run, relative, expected):
    with (run / relative).open("ab") as file:
        file.write(b"\n")
    assert failed(run) == expected
    assert relative in found(run, "recorded")["evidence"]


def remove(run, *stages):
    """Take a run back to before these stages."""
    for stage, folders in {"02": "rewards", "03": "train", "04": "model eval"}.items():
        for folder in folders.split() if stage in stages else []:
            shutil.rmtree(run / folder)
    rewrite(run, "manifest.json", lambda m: [m.pop(stage) for stage in stages])


def test_after_notebook_1_alone_its_checks_pass_and_the_rest_is_to_come(run):
    remove(run, "02", "03", "04")
    now = states(run)
    done = {"dataset", "no leakage", "prompt length", "reproducible"}
    assert now == dict.fromkeys(now, "not yet") | dict.fromkeys(done, "pass")
    assert found(run, "notebooks 1 and 2")["action"].endswith("run --name demo --from 02")
    assert main(["checklist", "demo"]) == 0


def test_before_the_training(run):
    remove(run, "03", "04")
    now = states(run)
    sections = {line["check"]: line["section"] for line in checklist.examine(run)}
    before = [check for check, section in sections.items() if section == "before"]
    assert {c for c in before if now[c] != "pass"} == {"memory", "tracking"}
    assert {now[c] for c in sections if sections[c] != "before"} == {"not yet", "pass"}


@pytest.fixture
def training(run):
    """In the middle of its training, after the first steps."""
    remove(run, "04")
    rewrite(run, "manifest.json", lambda m: m["03"].update(status="running", outputs={}))
    rewrite(run, METRICS, lambda lines: lines.__delitem__(slice(5, None)))
    return run


def test_a_training_in_another_process_is_waited_for(training):
    with FileLock(training / ".lock"):
        now = states(training)
        assert found(training, "notebook 3")["evidence"] == "03_train_grpo running"
        assert found(training, "notebook 3")["action"] == "wait"
    assert failed(training) == {"notebook 3"}  # it ended, and did not say that it was done
    assert {now[c] for c in ("notebook 3", "reward rises", "merge")} == {"not yet"}
    assert {now[c] for c in ("memory", "tracking", "signal", "truncation")} == {"pass"}


def test_a_training_in_this_process_is_running(training):
    training.lock()
    assert states(training)["notebook 3"] == "not yet"
    assert training.is_locked, "asking took the lock away"
    training.lock().release()


def test_a_killed_training_fails_with_the_command_that_goes_on(training, capsys):
    with (training / METRICS).open("a") as file:
        file.write('{"step": 6, "rew')  # torn
    line = found(training, "notebook 3")
    assert (line["state"], line["evidence"][:21]) == ("fail", "03_train_grpo cut off")
    assert line["action"] == "python -m grpo_nb run --name demo --from 03"
    assert states(training)["tracking"] == "pass"
    assert main(["checklist", str(training.path)]) == 1


def test_a_notebook_that_failed_says_why(run):
    remove(run, "04")
    error = {"status": "failed", "error": "RuntimeError: the gradient was not a number"}
    rewrite(run, "manifest.json", lambda m: m["03"].update(error))
    assert "the gradient was not a number" in found(run, "notebook 3")["evidence"]


def test_where_every_weight_was_trained_there_is_nothing_to_merge(run):
    write_json(run / "model/parity.json", {"mode": "full fine-tuning", "base": "b", "passed": True})
    recorded(run)
    assert states(run)["merge"] == "n/a"
    assert not failed(run)


def test_without_validation_format_does_not_apply(run):
    rewrite(run, METRICS, lambda lines: lines.pop())
    recorded(run)
    assert states(run)["format"] == "n/a"


@pytest.fixture
def settings():
    return config.resolve("tiny-cpu", {})


def rising(settings, rewards):
    seen = checklist.Seen(Run("none"), settings, {}, dict.fromkeys(NOTEBOOKS, "done"))
    return checklist._rise(seen, [{"stage": "grpo", "reward": reward} for reward in rewards])[0]


def test_noise_seldom_passes_for_a_rise_and_a_rise_is_seen_through_noise(settings):
    draw = random.Random(0)
    flat = [rising(settings, [draw.gauss(0, 1) for _ in range(60)]) for _ in range(400)]
    assert 1 <= flat.count("pass") <= 20  # 2.3 % of 400 are 9
    steep = [rising(settings, [i / 30 + draw.gauss(0, 1) for i in range(60)]) for _ in range(100)]
    assert steep.count("pass") > 90
    fallen = [rising(settings, [-i / 30 + draw.gauss(0, 1) for i in range(60)]) for _ in range(100)]
    assert fallen.count("pass") == 0


def test_one_lucky_last_step_is_no_rise(settings):
    assert rising(settings, [0.2, 0.3, 0.25, 0.35] * 15 + [0.9]) == "fail"
    assert rising(settings, [0.2, 0.3, 0.25, 0.35] * 5 + [0.9]) == "not yet"
    assert rising(settings, [0.1, 0.9]) == "not yet"


def test_only_the_last_training_stage_is_looked_at(settings):
    seen = checklist.Seen(Run("none"), settings, {}, dict.fromkeys(NOTEBOOKS, "done"))
    lines = [{"stage": "format", "reward": 0.01 * i} for i in range(60)]
    lines += [{"stage": "correctness", "reward": -0.01 * i} for i in range(60)]
    assert checklist._rise(seen, lines)[0] == "fail"


FILES = [
    *("data/report.json", "data/eval.parquet", "data/train.parquet", "rewards/report.json"),
    *("train/preflight.json", METRICS, "train/health.jsonl", "model/parity.json"),
    *("eval/report.json", "manifest.json", "config.yaml"),
]


@pytest.mark.parametrize("damage", ["half", "binary", "another shape"])
@pytest.mark.parametrize("relative", FILES)
def test_a_damaged_file_is_named_and_no_traceback(run, capsys, relative, damage):
    path = run / relative
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        content = content or json.dumps(ALERT._asdict()).encode()
        content = content[: len(content) // 2] + b"\n"
    damaged = {
        "half": content[: len(content) // 2],
        "binary": b"\xff\x00\n",
        "another shape": b"[]\n",
    }
    path.write_bytes(damaged[damage])
    if relative == "config.yaml" and damage == "half":
        path.write_text("train.max_steps: {")
    assert main(["checklist", "demo", "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)
    assert any(line["state"] == "fail" and relative in line["evidence"] for line in lines)


def test_a_reward_file_that_raises_is_a_failed_check(run):
    (run / "mine.py").write_text("def mine(:")
    place = str(run / "mine.py")
    rewrite(run, "config.yaml", lambda c: c.update({"rewards.preset": place}))
    assert failed(run) == {"rewards"}
    assert "SyntaxError" in found(run, "rewards")["evidence"]
    assert found(run, "rewards")["action"] == "run 02_test_rewards again"


@pytest.mark.parametrize("relative", ["data/report.json", METRICS, "eval/report.json"])
def test_a_file_that_a_finished_stage_wrote_has_to_be_there(run, relative):
    (run / relative).unlink()
    evidence = [line["evidence"] for line in checklist.examine(run) if line["state"] == "fail"]
    assert f"{relative} was removed" in evidence


def test_json_holds_every_line(run, capsys):
    assert main(["checklist", str(run.path), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert lines == checklist.examine(run)
    assert [line["section"] for line in lines] == [section for section, *_ in checklist.CHECKS]
    assert {line["state"] for line in lines} <= {"pass", "fail", "n/a", "not yet", "look"}


@pytest.mark.parametrize("path", ["nothing", "/nothing/at/all", "data"])
def test_what_is_no_run_ends_with_2(runs_dir, capsys, path):
    assert main(["checklist", path]) == 2
    assert "is no run" in capsys.readouterr().err
