"""A person's reward that never returns, or would end the process, is named and ends nothing."""

import contextlib
import html
import time
from pathlib import Path

import pytest
from hackable import ROWS
from labs import click
from stub_trials import until
from trainings import make_run, trainer_of

from grpo_nb.rewards import call, load_rewards, surroundings
from grpo_nb.rewards.limits import LIMIT, TookTooLong, contained, limited
from grpo_nb.runs.config import resolve

HEAD = "import os, sys\nfrom grpo_nb import rewards\n"
TRLS = HEAD + "def mine(completions, **columns):\n    {}\n    return [1.0 for _ in completions]\n"
LIFTED = HEAD + "@rewards.reward()\ndef mine(response: str) -> float:\n    {}\n    return 1.0\n"
LOOP = "while True: pass"
STUBBORN = """while True:
        try:
            while True: pass
        except Exception: pass"""
COLUMNS = {"completions": ["a", "b"], "prompts": ["?", "?"]}


def loaded(tmp_path, text, seconds=0.2):
    path = tmp_path / "mine.py"
    path.write_text(text)
    chosen = {"rewards.preset": str(path), "rewards.seconds": seconds}
    return load_rewards(resolve("tiny-cpu", {}, chosen).rewards)


@pytest.mark.parametrize("shape", [TRLS, LIFTED])
@pytest.mark.parametrize("loop", [LOOP, STUBBORN])
def test_a_loop_in_python_ends_at_the_limit_and_names_the_reward(tmp_path, shape, loop):
    [func] = loaded(tmp_path, shape.format(loop)).reward_funcs
    assert getattr(func, LIMIT) == 0.2
    with pytest.raises(TookTooLong, match=r"reward mine took more than 0\.[24] s.*rewards.seconds"):
        call(func, **COLUMNS)
    [func] = loaded(tmp_path, shape.format("pass")).reward_funcs
    assert call(func, **COLUMNS) == [1.0, 1.0]


@pytest.mark.parametrize("shape", [TRLS, LIFTED])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sys.exit(0)", r"reward mine called sys.exit\(0\)"),
    ],
)
def test_what_would_end_the_process_is_an_error_that_names_the_reward(
    tmp_path, shape, line, message
):
    [func] = loaded(tmp_path, shape.format(line)).reward_funcs
    with pytest.raises(RuntimeError, match=message):
        call(func, **COLUMNS)


def test_ctrl_c_is_no_fault_of_the_reward():
    with pytest.raises(KeyboardInterrupt), contained("mine"):
        import _thread
        import signal

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            _thread.interrupt_main()
            time.sleep(5)
        finally:
            signal.signal(signal.SIGINT, before)


def wait(end):
    while time.perf_counter() < end:
        pass


def test_a_call_that_ends_at_its_limit_is_left_alone_afterwards():
    for _ in range(500):
        with contextlib.suppress(TookTooLong):
            limited("mine", 0.001, wait, time.perf_counter() + 0.001)
    assert sum(range(1000)) == 499500


def test_the_labs_page_goes_on_after_a_loop(lab):
    lab.stage.change({"rewards.seconds": 0.2})
    lab.code.value = TRLS.format(LOOP)
    click(lab, lab.run)
    shown = html.unescape(lab.errors.value)
    assert "reward mine took more than 0.2" in shown
    assert lab.status.value == "" and not lab.run.disabled
    lab.code.value = ""
    click(lab, lab.run)
    assert lab.errors.value == "" and ROWS


BEGIN = "open('begun', 'w').close()"
CAUGHT = """for _ in range(2):
        try:
            while True: pass
        except: pass"""
PARALLEL = LIFTED.replace("reward()", "reward(parallel=True)")
ENDLESS = {  # a text, and the name of what runs when it is stopped
    "a batch": (TRLS.format(f"{BEGIN}\n    {LOOP}"), "mine"),
    "one completion": (LIFTED.format(f"{BEGIN}\n    {LOOP}"), "mine"),
    "in threads": (PARALLEL.format(f"{BEGIN}\n    {LOOP}"), "mine"),
    "async": ("async " + TRLS.removeprefix(HEAD).format(f"{BEGIN}\n    {LOOP}"), "mine"),
    "caught": (TRLS.format(f"{BEGIN}\n    {CAUGHT}"), "mine"),
    "slow": (LIFTED.format(f"{BEGIN}\n    import time; time.sleep(0.3)"), "mine"),
    "the text itself": (f"{BEGIN}\n{LOOP}", "mine.py"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_the_labs_page_stops_what_never_ends_and_names_it(lab, kind, tmp_path, monkeypatch):
    """This thread is the kernel's: it is free while the reward runs, and presses the button."""
    monkeypatch.chdir(tmp_path)
    before, folder = lab.view.value, [*lab.stage.run.path.rglob("*")]
    lab.stage.change({"rewards.seconds": 600})
    lab.code.value, name = ENDLESS[kind]
    for button in (lab.run, lab.adopt):
        button.click()
        until(Path("begun").exists, 10)
        assert "Running: " in lab.status.value and lab.run.disabled
        lab.stop.click()
        until(lambda: not lab.actions.unfinished_tasks, 10)
        assert f">Stopped while {name} was running<" in lab.status.value
        assert (lab.errors.value, lab.view.value) == ("", before)
        assert lab.stop.disabled and not lab.run.disabled
        Path("begun").unlink()
    assert not (lab.stage.run / "rewards").exists() and folder == [], "nothing is adopted"
    lab.code.value = TRLS.format("pass")
    click(lab, lab.run)
    assert "mine × 1" in lab.view.value and "FAILED" in lab.status.value


@pytest.mark.parametrize("line", ["raise KeyboardInterrupt", "raise GeneratorExit"])
def test_whatever_is_raised_the_labs_thread_goes_on(lab, line):
    for text in (line, TRLS.format(line)):
        lab.code.value = text
        click(lab, lab.run)
        assert line.split()[1] in lab.errors.value
    lab.code.value = ""
    click(lab, lab.run)
    assert lab.errors.value == "" and "PASSED" in lab.status.value


def test_an_edit_that_waits_for_a_reward_stays_at_its_completion(lab):
    lab.code.value = LIFTED.format("import time; time.sleep(0.02)")
    lab.run.click()
    until(lambda: "Running: " in lab.status.value)
    lab.text.value = "an edit"
    lab.prompt.value = 1
    lab.actions.join()
    assert lab.completions_P_G[0][0] == "an edit" != lab.completions_P_G[1][0]
    assert lab.table["completion"][0] == "an edit" and lab.text.value == lab.completions_P_G[1][0]


def test_other_cells_and_a_training_in_this_kernel_are_left_alone(lab, capsys):
    lab.code.value = LIFTED.format("print('of the reward'); import time; time.sleep(0.01)")
    lab.run.click()
    until(lambda: "Running: " in lab.status.value)
    time.sleep(0.1)
    print("of a cell")
    assert surroundings.turn.locked(), "a training that begins now waits"
    lab.actions.join()
    assert capsys.readouterr().out == "of a cell\n"
    with surroundings.turn:
        for button in (lab.run, lab.adopt):
            click(lab, button)
            assert (
                "wait until the training or the other lab in this kernel has ended"
                in lab.errors.value
            )
    click(lab, lab.run)
    assert lab.errors.value == ""


def test_a_training_ends_with_an_error_that_names_the_reward(runs_dir, tmp_path):
    chosen = loaded(tmp_path, TRLS.format(LOOP), 0.05)
    trainer = trainer_of(make_run("loop", **{"grpo.max_steps": 2}), chosen=chosen)
    with pytest.raises(TookTooLong, match="reward mine took more than") as ended:
        trainer.train()
    assert "kept up to step 0; run this again" in " ".join(ended.value.__notes__)
