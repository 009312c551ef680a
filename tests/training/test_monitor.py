"""A monitor beside a trainer of TRL's that is built as anybody builds one."""

import math
import shutil
import signal

import nbformat
import pytest
import torch
from datasets import Dataset
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_nb import Guard, Monitor
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import use_torch_head
from grpo_nb.training import newest_checkpoint, read_lines

BASE = str(PROJECT_ROOT / "data/tiny_base")
ROWS = Dataset.from_list([{"prompt": f"{n} + 2 = ", "answer": str(n + 2)} for n in range(10, 74)])


def says(completions, answer, **kwargs):
    return [float(a in text) for a, text in zip(answer, completions, strict=True)]


def short(completions, **kwargs):
    return [3.0 - len(text) / 10 for text in completions]


def stock(folder, reward_funcs=(says, short), eval_dataset=None, **arguments):
    """A trainer as in TRL's documentation; it saves no checkpoint."""
    from trl import GRPOConfig, GRPOTrainer

    use_torch_head()  # TRL's own needs a GPU
    torch.manual_seed(0)
    usual = {"max_steps": 4, "save_strategy": "no", "learning_rate": 1e-4, "logging_steps": 3}
    usual |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    args = GRPOConfig(str(folder), report_to=[], use_cpu=True, bf16=False, **usual | arguments)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    funcs = list(reward_funcs)
    rows = {"train_dataset": ROWS, "eval_dataset": eval_dataset}
    return GRPOTrainer(model, funcs, args=args, **rows, processing_class=tokenizer)


def lines_of(folder, name="metrics.jsonl"):
    return read_lines(folder / "monitor" / name)


def test_each_step_is_a_line_in_a_file_and_in_the_terminal(tmp_path, capsys):
    trainer = stock(tmp_path)
    Monitor(trainer, show=False)  # a cell that runs twice
    monitor, guard = Monitor(trainer), Guard(trainer)
    trainer.add_callback(monitor)  # it has added itself
    trainer.add_callback(guard)
    trainer.train()
    callbacks = trainer.callback_handler.callbacks
    assert [c for c in callbacks if isinstance(c, Monitor | Guard)] == [monitor, guard]
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # whatever logging_steps says
    assert {"reward", "rewards/says/mean", "frac_reward_zero_std", "grad_norm"} <= lines[0].keys()
    told = capsys.readouterr().out
    assert "step 4/4: reward " in told
    assert told.count("guard: the engine samples from this policy (score ") == 1
    assert monitor.failure == "" and monitor.alerts == []
    rows, names = monitor.completions(), {"question", "completion", "says", "short", "reward"}
    assert len(rows) == 8 and names <= rows[0].keys()
    assert monitor.watch.expected.rewards["short"][2] > 2, "nobody declared more than 1"


CELLS = """
import sys
sys.path[:0] = ["tests", "tests/training"]
from pathlib import Path
from grpo_nb import Guard, Monitor
from test_monitor import says, short, stock
from trl.trainer import utils
trainer = stock(Path(FOLDER), [says, short])
utils._ChunkedLogProbFunction = None  # TRL 1.15's does not run without a GPU
monitor = Monitor(trainer, correct="says")
trainer.train()
assert not monitor.failure, monitor.failure
board = monitor.dashboard
assert board.now["phase"] == "finished after step 4" and board.correct == "says"
assert not board.error and "completions" in board.groups
# %%
def fails(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 2:
        raise KeyError("no such column")
    return [0.5] * len(completions)
trainer = stock(Path(FOLDER), [fails])
with Monitor(trainer) as monitor:
    trainer.train()
# %%
phase = monitor.dashboard.now["phase"]
assert phase == "ended after step 2", phase
"""


def test_in_a_notebook_the_dashboard_is_shown_and_says_how_a_training_ended(tmp_path, forks):
    sources = CELLS.replace("FOLDER", repr(str(tmp_path))).split("# %%")
    cells = list(map(nbformat.v4.new_code_cell, sources))
    cells[1].metadata["tags"] = ["raises-exception"]
    resources = {"metadata": {"path": str(PROJECT_ROOT)}}
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    assert "widget-view" in str(cells[0].outputs) and len(lines_of(tmp_path)) == 2


def at(step, act):
    def acts(completions, trainer_state, **kwargs):
        if trainer_state.global_step + 1 == step:
            act()
        return short(completions)

    return acts


def fail():
    raise KeyError("no such column")


def test_an_interrupt_or_an_error_inside_with_loses_no_step(tmp_path):
    """Of a stock trainer that would save nothing; the resumed one ends as one that ran through."""
    whole = stock(tmp_path / "whole", [short])
    whole.train()
    stops = at(2, lambda: signal.raise_signal(signal.SIGINT))
    said = r"after step 2; the training is kept .*`with` goes on with trainer.train\(resume_from"
    trainer = stock(tmp_path, [stops])
    with pytest.raises(KeyboardInterrupt, match=said), Monitor(trainer, show=False):
        trainer.train()
    first = newest_checkpoint(tmp_path)
    assert first == str(tmp_path / "checkpoint-2")
    trainer.args.max_steps = 3
    trainer.train(resume_from_checkpoint=first)  # as the message says, and without `with`
    assert trainer.state.global_step == 3
    shutil.rmtree(tmp_path / "checkpoint-3", ignore_errors=True)
    trainer = stock(tmp_path, [at(4, fail)])
    with pytest.raises(KeyError) as error, Monitor(trainer, show=False):
        trainer.train(resume_from_checkpoint=first)
    again = f"trainer.train(resume_from_checkpoint='{tmp_path / 'checkpoint-3'}')"
    kept = f"the training is kept up to step 3; the same `with` goes on with {again}"
    assert error.value.__notes__ == [kept]
    state = tmp_path / "checkpoint-3/trainer_state.json"
    state.write_text(state.read_text()[:-9])  # a kill while it was written
    assert newest_checkpoint(tmp_path) == first and newest_checkpoint(tmp_path / "no") is None
    last = stock(tmp_path, [short])
    monitor = Monitor(last, show=False)
    last.train(resume_from_checkpoint=newest_checkpoint(tmp_path))
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4], "each once"
    assert len(monitor.watch.lines) == 4
    assert all(map(torch.equal, weights_of(whole), weights_of(last)))


def test_a_checkpoint_of_an_earlier_training_is_not_taken_for_one_of_this(tmp_path):
    stock(tmp_path, [short], max_steps=2, save_strategy="steps", save_steps=2).train()
    states = [tmp_path / f"checkpoint-{step}/trainer_state.json" for step in (2, 1)]
    before = states[0].read_bytes()
    for step in (3, 2):  # one step more than the checkpoint's, then one step less
        with pytest.raises(KeyError) as error:
            trainer = stock(tmp_path, [at(step, fail)])
            with Monitor(trainer, show=False):
                trainer.train()
        assert f"kept up to step {step - 1};" in error.value.__notes__[0]
    assert states[0].read_bytes() != before and states[1].is_file()


def weights_of(trainer):
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def test_an_update_without_scores_is_skipped_and_three_end_the_training(tmp_path, capsys):
    nothing = lambda completions, **kwargs: [None] * len(completions)  # noqa: E731
    trainer = stock(tmp_path, [nothing], max_steps=9)
    before = weights_of(trainer)
    with pytest.raises(RuntimeError, match="3 generations in a row"), Monitor(trainer):
        trainer.train()
    told = capsys.readouterr().out
    why = "no completion has a score, for every reward gave None or NaN"
    assert f"step 1: {why}; no update is made" in told
    assert trainer.state.global_step == 3 and "training ends: no completion has a score" in told
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_one_generation_without_scores_ends_no_training_however_many_steps_it_has(tmp_path, capsys):
    nothing_at_first = lambda completions, trainer_state, **kwargs: (  # noqa: E731
        short(completions) if trainer_state.global_step else [None] * len(completions)
    )
    trainer = stock(tmp_path, [nothing_at_first], max_steps=8, num_iterations=4)
    with Monitor(trainer, show=False):
        trainer.train()
    assert trainer.state.global_step == 8
    assert capsys.readouterr().out.count("no update is made") == 4


def test_an_infinite_score_costs_the_updates_of_its_generation_alone(tmp_path, capsys):
    def infinite_once(completions, trainer_state, **kwargs):
        first = [math.inf] if trainer_state.global_step == 0 else [1.0]
        return first + short(completions)[1:]

    trainer = stock(tmp_path, [infinite_once], steps_per_generation=2, shuffle_dataset=False)
    with Monitor(trainer, show=False) as monitor:
        trainer.train()
    assert "not a number" in [alert.name for alert in monitor.alerts]
    assert capsys.readouterr().out.count("an infinite score; no update is made") == 2
    assert trainer.state.global_step == 4
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


def test_scores_of_a_validation_skip_no_update(tmp_path, capsys):
    held_out = Dataset.from_list([{"prompt": "1 + 1 = ", "answer": "held out"}] * 8)

    def none_held_out(completions, answer, **kwargs):
        return [None if a == "held out" else s for a, s in zip(answer, short(completions))]  # noqa: B905

    options = {"eval_strategy": "steps", "eval_steps": 1, "num_iterations": 2}
    trainer = stock(tmp_path, [none_held_out], held_out, **options)
    with Monitor(trainer, show=False) as monitor:
        trainer.train()
    assert "no update is made" not in capsys.readouterr().out and not monitor.failure


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path, capsys):
    trainer = stock(tmp_path, max_steps=3)
    Monitor(trainer, show=False)
    step = trainer.training_step

    def poisoned(*args, **kwargs):
        loss = step(*args, **kwargs)
        if trainer.state.global_step == 1:
            next(trainer.model.parameters()).grad.fill_(math.nan)
        return loss

    trainer.training_step = poisoned
    trainer.train()
    told = capsys.readouterr().out
    assert "step 2: the gradient is not finite (NaN or inf); no update is made" in told
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


@pytest.mark.parametrize(("halt", "last"), [("never", 6), ("grave", 2)])
def test_a_grave_alert_is_told_and_ends_the_training_where_that_is_asked(tmp_path, halt, last):
    def broken(completions, trainer_state, **kwargs):
        return [math.nan if trainer_state.global_step == 1 else 0.5] * len(completions)

    heard = []
    trainer = stock(tmp_path, [says, broken], max_steps=6)
    monitor = Monitor(trainer, halt=halt, notify=heard.append, show=False)
    trainer.train()
    assert trainer.state.global_step == last
    assert [a.name for a in monitor.alerts if a.state == "stop"][:1] == ["not a number"]
    assert heard == monitor.alerts and len(lines_of(tmp_path, "alerts.jsonl")) == len(heard)
    assert "lower learning_rate" in heard[0].fix, "as TRL calls it"


def test_a_monitor_that_fails_says_so_once_and_stands_aside(tmp_path, capsys):
    trainer = stock(tmp_path)
    monitor = Monitor(trainer, notify=None)
    monitor.watch = None
    monitor._widen = None
    trainer.train()
    told = capsys.readouterr().out
    assert trainer.state.global_step == 4 and told.count("the monitor stands aside") == 1
    assert "TypeError" in monitor.failure


def test_what_makes_no_sense_is_refused_and_leaves_the_monitor_that_was_there(tmp_path):
    trainer = stock(tmp_path)
    monitor = Monitor(trainer, show=False)
    with pytest.raises(ValueError, match="unknown reward 'sais': did you mean 'says'"):
        Monitor(trainer, show=False, correct="sais")
    with pytest.raises(ValueError, match="give 'never' or 'grave'"):
        Monitor(trainer, show=False, halt="always")
    assert monitor in trainer.callback_handler.callbacks


def test_validations_by_trls_own_eval_dataset_are_lines_too(tmp_path):
    """Training is as without a monitor."""
    ends, options = [], {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    for show in (None, False):
        trainer = stock(tmp_path, eval_dataset=ROWS.select(range(5)), max_steps=4, **options)
        monitor = Monitor(trainer, correct="says", show=False) if show is False else None
        trainer.train()
        ends.append(weights_of(trainer))
    assert not monitor.failure and monitor.watch.expected.eval_rows == 5
    lines = [line for line in lines_of(tmp_path) if "eval/reward" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line["eval/accuracy"] == line["eval/rewards/says/mean"] for line in lines)
    assert [line["step"] for line in lines_of(tmp_path) if "loss" in line] == [1, 2, 3, 4]
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
