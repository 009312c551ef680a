"""A finished run is read from whatever it left, and what is said of it is true."""

import json
import math
import os
import re

import nbformat
import numpy as np
import pandas as pd
import pytest
from test_health import run

from grpo_nb import autopsy
from grpo_nb.__main__ import main
from grpo_nb.training.health import DIFFERENCE
from grpo_nb.training.logs import read_log

RIGHT, FORM = "rewards/right/mean", "rewards/soft_format_reward/mean"
SILENT = "frac_reward_zero_std"


def stock(lines):
    """Lines as TRL logs them, without metrics of ours."""
    ours = ("eval/", "right/", "soft_format_reward/")
    return [{k: v for k, v in line.items() if not k.startswith(ours)} for line in lines]


SOUND = stock(run(0, 120, 2, first=0.3, last=0.8, speed=60))
STUCK = [line | {RIGHT: 0.0, "reward": 0.5 * line[FORM]} for line in SOUND]


def states(result, *kinds):
    return [check.name for check in result.findings if check.state in kinds]


# -- what can be read


def as_state(lines, folder, step=None):
    place = folder / f"checkpoint-{step or len(lines)}"
    place.mkdir(parents=True)
    state = {"global_step": len(lines), "max_steps": 200, "log_history": lines}
    (place / "trainer_state.json").write_text(json.dumps(state))
    return folder


def as_lines(lines, folder):
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def as_notebook(lines, folder, **names):
    titles = {"step": "Step", "loss": "Training Loss"} | names
    keys = [key for key in lines[0] if key not in ("grad_norm", "step_time", "entropy")]
    heads = "".join(f"<th>{titles.get(key, key).replace('/', ' / ')}</th>" for key in keys)
    rows = ["".join(f"<td>{line.get(key)}</td>" for key in keys) for line in lines]
    table = f"<thead><tr>{heads}</tr></thead>{''.join(f'<tr>{row}</tr>' for row in rows)}"
    html = f"<div>[120/250 1:00]</div><table>{table}</table>"
    outputs = [nbformat.v4.new_output("stream", text="Total batch size (8 x 2 x 1) = 16")]
    outputs.append(nbformat.v4.new_output("display_data", {"text/html": html}))
    code = "args = GRPOConfig(num_generations = 8, # a group\n  max_completion_length = 64)"
    cells = [nbformat.v4.new_code_cell(code)]
    cells.append(nbformat.v4.new_code_cell("trainer.train()", outputs=outputs))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "their.ipynb")
    return folder / "their.ipynb"


def as_printed(lines, folder):
    """As transformers prints it to a terminal, between states of its progress bar."""
    logged = [{k: v for k, v in line.items() if k != "step"} for line in lines]
    bars = [f"\r 1%| {n}/120 [0{n}:10<17:06, 2.1s/it]" for n in range(1, 121)]
    printed = [f"{bar}\n{line}" for bar, line in zip(bars, logged, strict=True)]
    path = folder / "train.log"
    path.write_text("\n".join(["Loading shards: 2/2 [00:02<00:00]", *printed]))
    return path


def as_csv(lines, folder):
    """As a tracker exports it: every second row is of something else."""
    rows = [{**line, "clock": n} for n, line in enumerate(lines)]
    apart = [row for line in rows for row in (line, {"clock": line["clock"], "step": line["step"]})]
    pd.DataFrame(apart).to_csv(folder / "history.csv", index=False)
    return folder / "history.csv"


def as_cut_lines(lines, folder):
    path = as_lines(lines, folder)
    path.write_text(path.read_text() + '{"step": 121, "rew')
    return path


def as_history(lines, folder):
    """As JSON of a person's own, with other names and one list for each metric."""
    columns = {key: [line[key] for line in lines] for key in lines[0]}
    columns["reward_mean"] = columns.pop("reward")
    (folder / "history.json").write_text(json.dumps(columns))
    return folder / "history.json"


def as_verl(lines, folder):
    names = {"reward": "critic/rewards/mean", "step": "training/global_step"}
    names |= {"loss": "actor/pg_loss", "completions/clipped_ratio": "response_length/clip_ratio"}
    pairs = [[f"{names.get(k, k)}:np.float64({v})" for k, v in line.items()] for line in lines]
    text = [f"(TaskRunner pid=7) step:{n} - {' - '.join(each)}" for n, each in enumerate(pairs, 1)]
    (folder / "verl.log").write_text("\n".join(["loading", *text]))
    return folder / "verl.log"


def as_table(lines, folder):
    return pd.DataFrame(lines)


FORMATS = [as_state, as_lines, as_notebook, as_printed, as_csv, as_cut_lines, as_history, as_verl]
FORMATS.append(as_table)


@pytest.mark.parametrize("written", FORMATS)
@pytest.mark.parametrize(("lines", "grave"), [(SOUND, []), (STUCK, ["constant reward"])])
def test_every_format_of_a_log_gets_the_same_judgement(written, lines, grave, tmp_path):
    result = autopsy(written(lines, tmp_path), completions_per_step=16)
    assert states(result, "stop", "warning") == grave
    assert result.log.rewards == ["right", "soft_format_reward"]
    assert len(result.log.steps) == 120 and result.log.lines[-1]["step"] == 120
    source = "a table: 120 lines" if written is as_table else str(tmp_path)
    assert result.passed and str(result).startswith(source)


def test_steps_that_were_trained_again_replace_the_first_ones():
    again = [line | {"reward": 0.0} for line in SOUND[40:80]]
    log = read_log([*SOUND[:60], *again])
    assert [line["step"] for line in log.lines] == list(range(1, 81))
    assert [line["reward"] for line in log.lines[40:]] == [0.0] * 40


def test_older_names_are_read(tmp_path):
    old = {"completions/mean_length": "completion_length", RIGHT: "rewards/right"}
    lines = [{f"train/{old.get(k, k)}": v for k, v in line.items()} for line in SOUND]  # W&B's
    log = read_log(lines)
    assert RIGHT in log.lines[0] and "completions/mean_length" in log.lines[0]
    log = read_log(as_notebook(SOUND, tmp_path, **old))
    assert "completions/mean_length" in log.lines[5] and log.rewards[0] == "right"
    facts = {"num_generations": 8, "max_completion_length": 64, "completions": 16}
    assert log.facts == facts | {"max_steps": 250, "logging_steps": 1}


def test_what_was_not_logged_in_a_table_is_no_zero(tmp_path):
    lines = [line | {"kl": "No Log"} for line in SOUND]
    lines[0] = lines[0] | {"kl": 0.0}
    log = read_log(as_notebook(lines, tmp_path))
    assert not any("kl" in line for line in log.lines)


def test_of_two_trainings_in_a_folder_the_newer_is_read(tmp_path):
    for number, (step, lines) in enumerate([(50, STUCK), (100, STUCK), (20, SOUND)]):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "log_history": lines[:step]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        os.utime(folder / "trainer_state.json", (number, number))
    assert len(read_log(tmp_path).steps) == 20
    os.utime(tmp_path / "checkpoint-50/trainer_state.json", (9, 9))  # copied later
    assert len(read_log(tmp_path).steps) == 100


def test_of_several_trainings_that_were_printed_the_last_is_read(tmp_path):
    path = as_printed(SOUND, tmp_path)
    path.write_text(f"{path.read_text()}\n{{'train_runtime': 9.1}}\n{{'eval_loss': 1}}\n" * 2)
    assert len(read_log(path).steps) == len(SOUND)


def test_printed_lines_apart_from_their_progress_bar_are_counted(tmp_path):
    """Where standard error was written first, all bars come before the lines."""
    path = as_printed([line | {"kl": math.nan} for line in SOUND], tmp_path)
    rows = path.read_text().split("\n")
    path.write_text("\n".join(sorted(rows, key=lambda row: "{" in row)))
    log = read_log(path)
    assert [line["step"] for line in log.lines] == list(range(1, 121))
    assert log.facts["max_steps"] == 120 and math.isnan(log.lines[0]["kl"])


def test_the_cap_of_completions_is_seen_where_all_are_cut_again_and_again():
    key = "completions/mean_length"
    lines = [line | {key: 64.0 if n % 4 else 61.5} for n, line in enumerate(SOUND)]
    lines = [{k: v for k, v in line.items() if "clipped" not in k} for line in lines]
    assert read_log(lines).facts["max_completion_length"] == 64
    assert "truncation" in states(autopsy(lines, completions_per_step=16), "warning")
    assert read_log(SOUND).facts["max_completion_length"] == 0
    letters = [line | {key: 3.0} for line in lines]  # all answers are as long, and end
    assert read_log(letters).facts["max_completion_length"] == 0


def test_the_newest_checkpoint_that_is_whole_is_read(tmp_path):
    as_state(SOUND[:60], tmp_path, 60)
    as_state(SOUND, tmp_path, 120)
    (tmp_path / "checkpoint-150").mkdir()
    (tmp_path / "checkpoint-150/trainer_state.json").write_text('{"global_step": 150, "log_')
    assert len(read_log(tmp_path).steps) == 120
    assert len(read_log(tmp_path / "checkpoint-60").steps) == 60


@pytest.mark.parametrize("count", [6, 8, 32])
def test_the_number_of_completions_is_seen_in_the_shares(count):
    rng = np.random.default_rng(0)
    cut = rng.binomial(count, 0.3, 120) / count
    lines = [line | {"completions/clipped_ratio": float(c)} for line, c in zip(SOUND, cut)]  # noqa: B905
    assert read_log(lines).facts["completions"] == count


@pytest.mark.parametrize(
    ("what", "error", "refusal"),
    [
        ("none", FileNotFoundError, "does not exist: give TRL's output folder"),
        ("empty", FileNotFoundError, "has no checkpoint-"),
        ("log.rst", ValueError, "has no line with `reward`, but nothing: give"),
        ("broken.json", ValueError, "cannot be read"),
        ("other.jsonl", ValueError, "has no line with `reward`, but loss, step"),
    ],
)
def test_what_is_no_log_is_refused(what, error, refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.rst").write_text("")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.jsonl").write_text('{"step": 1, "loss": 0.5}\n' * 9)
    with pytest.raises(error, match=refusal):
        autopsy(tmp_path / what)


# -- what is said


def test_a_reward_that_was_seen_once_in_few_completions_is_no_collapse():
    """Eight completions a step, of which two were right in the third step, and none since."""
    rewards = [0.25 if step == 3 else 0.0 for step in range(1, 31)]
    lines = [{"step": n, "reward": r, "reward_std": r} for n, r in enumerate(rewards, start=1)]
    result = autopsy(lines, completions_per_step=8)
    assert states(result, "stop") == []


def learns(seed, groups):
    """Right in 5 % at first and 60 % at the end of 60 steps."""
    return stock(run(seed, 60, groups, first=0.05, last=0.6, speed=25))


def rises_slowly(seed, chances):
    """One group a step, of rewards 1 or 0."""
    rng, lines = np.random.default_rng(seed), []
    for step, right in enumerate(chances, start=1):
        scores = rng.random((1, 8)) < rng.beta(2 * right, 2 - 2 * right, (1, 1))
        line = {"reward": scores.mean(), "reward_std": scores.std(), SILENT: scores.std() == 0}
        lines.append({"step": step, "loss": 0.0, **{k: float(v) for k, v in line.items()}})
    return lines


def of_uneven_prompts(seed):
    """The spread within groups, as older versions log it, says little of a step's noise."""
    rng = np.random.default_rng(seed)
    means = np.linspace(4, 6, 300) + rng.normal(0, 2.3, 300)
    return [{"step": n, "reward": m, "reward_std": 1.2} for n, m in enumerate(means, 1)]


def takes_off(seed, key):
    """A curve that stays low although it is five times as high from the middle on."""
    jump = np.where(np.arange(200) < 100, 0.004, 0.02)
    return stock(run(seed, 200, 4, first=0.3, last=0.7, speed=60, **{key: jump}))


SOUND_RUNS = [  # of some seeds, and the completions of a step
    *((learns, range(12), 8 * groups, {"groups": groups}) for groups in (1, 2, 8)),
    (rises_slowly, range(6), 8, {"chances": np.linspace(0.3, 0.6, 500)}),
    (rises_slowly, range(6), 8, {"chances": np.linspace(0.5, 0.7, 800)}),
    (of_uneven_prompts, range(6), 64, {}),
    *((takes_off, [1], 32, {"key": key}) for key in ("kl", "grad_norm")),
]


@pytest.mark.parametrize(("lines", "seeds", "completions", "options"), SOUND_RUNS)
def test_no_sound_run_is_accused_of_anything_grave(lines, seeds, completions, options):
    for seed in seeds:
        result = autopsy(lines(seed, **options), completions_per_step=completions)
        assert states(result, "stop", "warning") == [], seed


def test_a_solved_run_whose_format_pays_half_a_point_has_nothing_left_to_learn():
    rise = 1 - np.exp(-np.arange(400) / 40)
    lines = stock(run(2, 400, 4, first=0.3, last=0.995, speed=30, **{SILENT: 0.2 + 0.75 * rise}))
    lines = [line | {FORM: 0.5, "reward": line[RIGHT] + 0.5} for line in lines]
    lines[0] |= {FORM: 0.25, "reward": lines[0][RIGHT] + 0.25}
    for correct in ("", "right"):
        result = autopsy(lines, completions_per_step=32, correct=correct)
        assert states(result, "stop", "warning") == ["nothing left to learn"]
    assert "of what the rewards paid at most" in str(autopsy(lines, completions_per_step=32))


def test_weights_are_found_in_the_totals():
    rise = 1 - np.exp(-np.arange(400) / 40)
    more = {SILENT: 0.2 + 0.75 * rise, "entropy": 0.5 - 0.49 * rise}
    lines = stock(run(2, 400, 4, first=0.3, last=0.995, speed=30, **more))
    for line, share in zip(lines, 0.5 + 0.5 * rise, strict=True):
        line |= {FORM: share, "reward": line[RIGHT] + 0.125 * share}
    result = autopsy(lines, completions_per_step=32)
    assert states(result, "stop") == [] and "nothing left to learn" in states(result, "warning")
    weights = {"right": 1, "soft_format_reward": 0.125}
    assert result.log.facts["weights"] == pytest.approx(weights, abs=1e-3)


def test_what_is_over_is_a_note_with_its_last_step():
    early = np.where(np.arange(200) < 60, 0.5, 0.02)
    lines = stock(run(1, 200, 4, first=0.3, last=0.7, speed=60))
    lines = [line | {"completions/clipped_ratio": cut} for line, cut in zip(lines, early)]  # noqa: B905
    (note,) = autopsy(lines, completions_per_step=32).findings
    assert (note.name, note.state) == ("truncation", "note")
    assert re.search(r"for the last time at step (6\d)", note.evidence)


RAMP = np.linspace(0, 1, 200)
ONE_PEAK = np.where(np.arange(200) == 120, 8.0, 0.02)
FAULTS = {
    "kl grows": {"kl": 0.02 + 4.5 * RAMP**2.4},
    "entropy collapse": {"entropy": 0.6 * np.exp(-6 * RAMP)},
    "little signal": {"frac_reward_zero_std": 0.93 - 0.02 * RAMP},
    "not a number": {"grad_norm": np.where(RAMP > 0.5, math.nan, 0.4)},
    "reward falls": {"reward": np.where(RAMP > 0.5, 0.4, 1.0)},
    "spike, alone": {"kl": ONE_PEAK},
    "little signal, growing": {"frac_reward_zero_std": 0.1 + 0.7 * RAMP},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_curves_is_named(fault):
    lines = stock(run(1, 200, 4, first=0.3, last=0.7, speed=60, **FAULTS[fault]))
    found = states(autopsy(lines, completions_per_step=32), "stop", "warning")
    assert fault.partition(",")[0] in found


def test_a_reward_earned_late_is_called_constant_by_no_one_who_saw_the_end():
    late = [line | {RIGHT: 0.0 if line["step"] < 60 else 0.4} for line in SOUND]
    assert "constant reward" not in states(autopsy(late, completions_per_step=16), "warning")


def test_checks_that_were_skipped_name_what_the_log_lacks_and_fixes_speak_of_trl():
    result = autopsy(STUCK, completions_per_step=16)
    assert result.skipped == [DIFFERENCE, "eval/accuracy"]
    assert f"not logged, and so not judged: {DIFFERENCE}, eval/accuracy" in str(result)
    lines = [line | {"completions/clipped_ratio": 0.6} for line in SOUND]
    (check,) = autopsy(lines).findings[:1]
    assert "raise max_completion_length" in check.fix


def test_the_reward_that_says_what_is_right_may_be_named():
    fewer = [line | {"eval_rewards/right/mean": 0.9 - line["step"] / 200} for line in SOUND]
    assert "reward hacking" in states(autopsy(fewer, correct="right"), "stop")
    double = [line | {"eval_rewards/right/mean": 1.8 - line["step"] / 100} for line in SOUND]
    double = [line | {RIGHT: 2 * line[RIGHT]} for line in double]
    (alert,) = [c for c in autopsy(double, correct="right").findings if c.state == "stop"]
    assert re.search(r"held-out (8|9)\d% → ", alert.evidence)  # of the 2 that it pays
    with pytest.raises(ValueError, match="unknown reward 'wrong': known names: right, soft_"):
        autopsy(SOUND, correct="wrong")


def test_too_few_steps_give_a_note_which_says_how_many_more_would_tell():
    (note,) = autopsy(SOUND[:20], completions_per_step=16).findings
    assert (note.name, note.state) == ("no rise yet", "note")
    assert "it takes 168 more steps to tell" in note.evidence


# -- completions


def test_the_completions_that_earned_most_are_shown(tmp_path):
    """Of five steps with two groups each."""
    as_state(SOUND, tmp_path)
    (tmp_path / "completions").mkdir()
    for step in range(1, 6):
        texts = [f"<answer>{step}.{n}</answer>" for n in range(8)]
        columns = {
            "step": step,
            "prompt": [[{"role": "user", "content": f"{n // 4} + 1?"}] for n in range(8)],
            "completion": [[{"role": "assistant", "content": text}] for text in texts],
            "right": [0.0, 1.0] * 4,
            "soft_format_reward": 1.0,
            "advantage": 0.0,
        }
        path = tmp_path / f"completions/completions_{step:05d}.parquet"
        pd.DataFrame(columns).to_parquet(path)
    result = autopsy(tmp_path)
    assert result.log.facts["completions"] == 8
    best = [f"<answer>{step}.{n}</answer>" for step in (4, 5) for n in (1, 3, 5, 7)]
    shown = result.best[result.best["total"] == result.best["total"].max()]
    assert sorted(shown["completion"]) == best and set(shown["prompt"]) == {"0 + 1?", "1 + 1?"}
    page = result.save(tmp_path / "autopsy.html").read_text(encoding="utf-8")
    assert "earned most" in page and "&lt;answer&gt;5.7" in page and "<img alt=" in page


# -- the command


def test_the_command_says_what_it_finds(tmp_path, capsys):
    path = as_lines(SOUND, tmp_path)
    assert main(["autopsy", str(path), "--html", str(tmp_path / "a.html")]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{path}: 120 lines, to step 120") and "a.html is written" in told
    path = as_lines([line | {"frac_reward_zero_std": 1.0} for line in STUCK], tmp_path)
    assert main(["autopsy", str(path)]) == 1
    assert main(["autopsy", str(tmp_path / "none")]) == 2
