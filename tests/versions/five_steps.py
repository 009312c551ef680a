"""Train five steps with TRL's own trainer and the tools beside it.

`environments.py` runs this with the python of each version's environment.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import grpo_nb
from grpo_nb import Guard, Monitor, autopsy, preflight

BASE = str(Path(__file__).parents[2] / "data/tiny_base")
STEPS = 5
ROWS = [{"prompt": f"{n} + 2 = ", "answer": str(n + 2)} for n in range(10, 74)]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PlainHead:
    """TRL 1.15's LM head in plain torch: its own needs a GPU, and Unsloth is not here."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, *_):
        logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
        log_p, is_top1 = logits.log_softmax(-1), logits.argmax(-1) == targets
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, targets[:, None])[:, 0], entropy, None, None, is_top1


if trl.__version__.startswith("1.15."):
    from trl.trainer import utils

    utils._ChunkedLogProbFunction = PlainHead


def says(completions, answer, **kwargs):
    return [float(a in text) for a, text in zip(answer, completions, strict=True)]


def short(completions, **kwargs):
    return [3.0 - len(text) / 10 for text in completions]


def policy():
    """The tiny base with an adapter that has learnt something."""
    model = AutoModelForCausalLM.from_pretrained(BASE).float()
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def trainer_of(folder, reward_funcs=(says, short), rows=ROWS, **arguments):
    """A trainer as in TRL's documentation."""
    usual = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    usual |= {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 12}
    usual |= {"learning_rate": 1e-3, "log_completions": True, "report_to": [], "use_cpu": True}
    args = GRPOConfig(str(folder), bf16=False, disable_tqdm=True, **usual | arguments)
    # Its class is known to transformers 5 only; this one loads the same file everywhere.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        BASE, model_input_names=["input_ids", "attention_mask"]
    )
    rows = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    return GRPOTrainer(policy(), list(reward_funcs), args, rows, processing_class=tokenizer)


def weights_of(trainer):
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def lines_of(monitor):
    texts = (monitor.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(text) for text in texts]


def steps_of(lines):
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A whole training with all tools."""
    trainer = trainer_of(tmp_path_factory.mktemp("watched"))
    checks, guard = preflight(trainer), Guard(trainer, every=2)
    monitor = Monitor(trainer, show=False)
    trainer.train()
    seen = {"trainer": trainer, "checks": checks, "guard": guard, "monitor": monitor}
    return SimpleNamespace(**seen, lines=lines_of(monitor))


@pytest.mark.parametrize("module", [grpo_nb, trl, transformers])
def test_what_is_installed_here_is_used(module):
    assert Path(module.__file__).is_relative_to(sys.prefix)


def test_preflight_finds_nothing_to_stop_for(watched):
    states = {check.name: check.state for check in watched.checks}
    assert {"context", "memory", "gradient", "time"} <= states.keys()
    assert "stop" not in states.values(), watched.checks


def test_each_step_is_a_line_with_its_rewards(watched):
    assert watched.monitor.failure == ""
    lines = steps_of(watched.lines)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    names = {"reward", "rewards/says/mean", "rewards/short/mean", "frac_reward_zero_std"}
    assert all(names | {"completions/mean_length", "grad_norm"} <= line.keys() for line in lines)
    rows = watched.monitor.completions()
    assert len(rows) == 16 and rows[0]["question"].endswith("+ 2 = ")


def test_the_guard_looks_and_finds_the_policys_own_samples(watched):
    assert len(watched.guard.looks) >= 4  # before steps 1, 3 and 5, and at the end
    assert all(abs(look.score) < 4.7 and look.tokens > 100 for look in watched.guard.looks)
    assert watched.guard.looks[-1].change > 1


@pytest.mark.parametrize("what", ["trainer", "folder"])
def test_an_autopsy_reads_the_run(watched, what):
    trainer = watched.trainer
    diagnosis = autopsy(trainer if what == "trainer" else trainer.args.output_dir)
    assert [line["step"] for line in diagnosis.log.steps] == [1, 2, 3, 4, 5]
    assert diagnosis.log.rewards == ["says", "short"]
    assert diagnosis.log.facts["completions"] == 16


def test_the_tools_change_nothing_of_the_training(watched, tmp_path):
    plain = trainer_of(tmp_path)
    before = weights_of(plain)
    plain.train()
    assert not all(map(torch.equal, before, weights_of(plain)))
    assert all(map(torch.equal, weights_of(plain), weights_of(watched.trainer)))


def test_a_resumed_training_gives_the_same(watched, tmp_path):
    whole, folder = steps_of(watched.lines), Path(watched.trainer.args.output_dir)
    trainer = trainer_of(folder)
    monitor = Monitor(trainer, show=False)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert monitor.failure == ""
    lines = steps_of(lines_of(monitor))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for key in ("reward", "rewards/says/mean", "completions/mean_length", "loss", "grad_norm"):
        assert [line[key] for line in lines] == [line[key] for line in whole], key
    assert all(map(torch.equal, weights_of(trainer), weights_of(watched.trainer)))


def test_the_guard_stops_a_training_whose_samples_leave_the_adapter_out(tmp_path):
    trainer = trainer_of(tmp_path)
    generate = trainer.model.generate

    def without_adapter(*arguments, **options):
        with trainer.model.disable_adapter():
            return generate(*arguments, **options)

    trainer.model.generate = without_adapter
    Guard(trainer, every=2)
    with pytest.raises(RuntimeError, match="do not come from the policy"):
        trainer.train()


def test_a_placebo_is_paid_and_a_reward_that_is_not_a_number_raises_an_alert(tmp_path):
    def broken(completions, trainer_state, **kwargs):
        return [math.nan if trainer_state.global_step == 1 else 0.5] * len(completions)

    trainer = trainer_of(tmp_path, grpo_nb.placebo([says, broken], 4), max_steps=2)
    monitor = Monitor(trainer, show=False)
    trainer.train()
    assert "not a number" in {alert.name for alert in monitor.alerts} and monitor.failure == ""
    assert len(steps_of(lines_of(monitor))) == 2


def test_a_trained_model_is_sampled_evaluated_and_merged(watched, tmp_path):
    model, tokenizer = watched.trainer.model, watched.trainer.processing_class
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS[:8]]

    def right(completions, answer, **kwargs):
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return says(texts, answer)

    short_ones = {"max_completion_length": 8}
    groups = grpo_nb.sample(model, tokenizer, chats, 2, prompts=4, **short_ones)
    assert [len(group) for group in groups] == [2] * 4
    models = {"now": (model, tokenizer), "again": (model, tokenizer)}
    result = grpo_nb.evaluate(models, chats, right, samples=1, **short_ones)
    assert "not distinguishable" in str(result)
    if transformers.__version__.startswith("5."):  # the tokenizer's class, see `trainer_of`
        adapter = Path(watched.trainer.args.output_dir) / "checkpoint-4"
        check = grpo_nb.merge(BASE, adapter, tmp_path / "merged", chats, load_in_4bit=False)
        assert check.state == "ok"


def test_prepared_rows_are_trained_on(tmp_path):
    lines = [{"question": row["prompt"], "answer": row["answer"]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenizer = trainer_of(tmp_path / "a").processing_class
    prepared = grpo_nb.prepare(str(tmp_path / "rows.jsonl"), tokenizer)

    def right(completions, answer, prompts, **kwargs):
        assert all([turn["role"] for turn in prompt] == ["system", "user"] for prompt in prompts)
        return says([one[0]["content"] for one in completions], answer)

    trainer_of(tmp_path / "b", [right], prepared.train_dataset, max_steps=1).train()
    assert len(prepared.eval_dataset) == 12
