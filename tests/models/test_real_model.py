"""A real language model, SmolLM2 of 135 M parameters, through warm-up, training and merge.

`make test` makes its weights from a Python package; where they are missing, a line says so.
"""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_nb
from grpo_nb import data, export, models, stages, training
from grpo_nb.files import project_path
from grpo_nb.models import template
from grpo_nb.models.dense import DenseEngine
from grpo_nb.reward_lab import bench_of
from grpo_nb.reward_lab.table import passed
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.training import guard

SMOLLM2 = project_path(".venv/smollm2")
pytestmark = pytest.mark.skipif(
    not (SMOLLM2 / "config.json").is_file(),
    reason="no .venv/smollm2: make .venv/smollm2/config.json",
)
SETTINGS = {
    "task": "json_extraction",
    "model.model_name": str(SMOLLM2),
    "train.sft_steps": 6,
    "train.sft_learning_rate": 5e-4,
    "grpo.max_steps": 2,
    "grpo.per_device_train_batch_size": 8,
    "grpo.gradient_accumulation_steps": 1,
    "grpo.max_completion_length": 40,
    "grpo.learning_rate": 1e-4,
    "train.eval_steps": 0,
    "export.parity_prompts": 4,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The policy before, after the warm-up and after the training; its run; what was measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setattr(guard, "COMPLETIONS", 8)  # a look at 32 takes 15 s here
        stage = Stage(Run("real"), "03", resolve("smollm2-cpu", SETTINGS))
        run, config = stage.run, stage.config
        policy = models.load_policy(config)
        chosen = stages.in_template(stage, policy.tokenizer)
        count = partial(template.count_tokens, policy.tokenizer)
        data.prepare_run(run, config.data, config.seed, count, chosen)
        run.write_config(config)
        held_out = data.load(run, "eval")[:12]
        bench = bench_of(config, chosen, policy.tokenizer)

        def right() -> float:
            prompts = [row["prompt"] for row in held_out]
            groups = policy.generate(prompts, max_completion_length=40)
            table = bench.table(held_out, [[one.text for one in group] for group in groups])
            return passed(table, chosen).mean()

        shares = [right()]
        sentence = stages.warm_up(policy, stage)
        shares.append(right())
        trainer = stages.build_trainer(policy, chosen, data.load(run, "train"), stage)
        grpo_nb.preflight(trainer).refuse()
        trainer.guard = grpo_nb.Guard(trainer, every=config.train.guard_steps)
        trainer.train()
        yield SimpleNamespace(trainer=trainer, shares=[*shares, right()], sentence=sentence)


def test_it_is_loaded_with_its_template_and_ends_its_turns(trained):
    policy = trained.trainer.policy
    assert isinstance(policy.engine, DenseEngine)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    text = template.render(policy.tokenizer, prompt)
    end = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert text.endswith(end)
    others = [[{"role": "user", "content": f"What is {n} + 1?"}] for n in (1, 2, 3)]
    groups = policy.generate([prompt, *others], max_completion_length=64, adapter=False)
    assert "Paris" in groups[0][0].text
    # Not all of them: in bf16, rounding decides whether so small a model repeats itself.
    ends = {answer.ids[-1] for [answer] in groups if not answer.truncated}
    assert policy.tokenizer.convert_ids_to_tokens(list(ends)) == ["<|im_end|>"]


def test_the_warm_up_teaches_the_form_and_the_training_keeps_it(trained):
    base, warm, final = trained.shares
    assert base == 0 and warm >= 0.3 and final >= warm - 0.17
    assert trained.sentence.startswith("6 SFT warm-up steps: loss")


def test_the_guard_was_silent_and_the_steps_were_real(trained):
    lines = training.read_lines(trained.trainer.folder / "metrics.jsonl")
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert any(line["grad_norm"] > 0 for line in steps)
    scores = [look.score for look in trained.trainer.guard.looks]
    assert len(scores) >= 2 and np.abs(scores).max() < 4.7


def test_the_merged_model_is_the_policy(trained):
    run, config = trained.trainer.stage.run, trained.trainer.stage.config
    folder, check = export.merge_run(Stage(run, "04", config))
    assert check.state == "ok", check.evidence
    assert json.loads((run / "model/parity.json").read_text())["kl"] < 0.05
    assert (folder / "model.safetensors").stat().st_size > 2e8
