"""Trainings of the tiny base by Unsloth's GPU trainer: `python scenarios.py FOLDER`.

Writes FOLDER/report.json. All of them share one process, for importing Unsloth takes ten seconds
and patches TRL for good.
"""

import contextlib
import functools
import gc
import json
import math
import os
import sys
from pathlib import Path

import pretended

FOLDER = Path(sys.argv[1])
pretended.import_unsloth(FOLDER / "compiled")
os.environ["GRPO_NB_RUNS"] = str(FOLDER)
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest  # noqa: E402
import torch  # noqa: E402
import trl  # noqa: E402
from trainings import (  # noqa: E402
    MATH,
    beside_a_stock_trainer,
    comparable,
    lines_of,
    make_run,
    scale_loss,
    steps_that_move,
    stop_at,
    trainer_of,
)
from unsloth import FastLanguageModel  # noqa: E402

import grpo_nb  # noqa: E402
from grpo_nb import environments, models, rewards, stages, training  # noqa: E402
from grpo_nb.models import dense  # noqa: E402, F401 (it is told of a GPU, as the training is)
from grpo_nb.rewards import reward_set  # noqa: E402
from grpo_nb.runs import Run, Stage  # noqa: E402
from grpo_nb.runs.config import flatten, resolve  # noqa: E402

models.weights.has_bf16 = lambda: False  # fp32, whatever this CPU computes in
SETTINGS = pretended.SETTINGS | {"grpo.max_steps": 4}
VALIDATED = {"train.eval_steps": 2}


def policy(config):
    """As Unsloth's loader leaves one, but with transformers' own forward."""
    plain = config.policy.model_copy(update={"backend": "transformers"})
    model = models.load_policy(config.model_copy(update={"policy": plain})).model
    model.max_seq_length = config.model.max_seq_length
    model._unsloth_gradient_checkpointing = True
    model.enable_input_require_grads()
    model.for_training = functools.partial(FastLanguageModel.for_training, model)
    model.for_inference = functools.partial(FastLanguageModel.for_inference, model)
    return models.Policy(model, models.load_tokenizer(config.model.model_name), False, "unsloth")


def start(name, rewards=MATH, **settings):
    run, settings = Run(name), SETTINGS | settings
    if not run.path.exists():
        make_run(name, **{"data.sft_rows": 16, "data.max_rows": 64})
    config = resolve("tiny-cpu", flatten(run.config()), settings)
    loaded = policy(config)
    pretended.claim_in("grpo_nb.training")
    pretended.claim_in("grpo_nb.models.dense")
    stages.warm_up(loaded, Stage(run, "03", config))
    return trainer_of(run, loaded, rewards, **settings)


def steps(trainer):
    """Train; the lines of its steps."""
    trainer.train()
    return lines_of(trainer.stage.run)


def states(trainer):
    return {check.name: check.state for check in grpo_nb.preflight(trainer)}


def answers(policy, rows):
    groups = policy.generate([row["prompt"] for row in rows], max_completion_length=32)
    return [group[0].text for group in groups]


def weights(run, name="train/adapter"):
    return (run / name / "adapter_model.safetensors").read_bytes().hex()


class Layer:
    """Looks at a decoder layer: whether each pass with gradients checkpoints it."""

    def __init__(self, model):
        self.checkpointed = []
        model.get_base_model().model.layers[0].register_forward_pre_hook(self.look)

    def look(self, layer, arguments):
        if torch.is_grad_enabled():
            self.checkpointed.append(layer.gradient_checkpointing and layer.training)

    def seen(self):
        found, self.checkpointed = self.checkpointed, []
        return found


def a_training():
    """From load to adapter; validation and preflight before it."""
    fresh = start("fresh", **VALIDATED)
    rows = fresh.validation_rows
    seen = {"answers before the trainer": answers(policy(fresh.stage.config), rows)}
    one = start("whole", **VALIDATED)
    seen["trainer"] = [kind.__name__ for kind in type(one).__mro__]
    layer = Layer(one.policy.model)
    seen["checks"] = states(one)
    seen["checkpointed"] = {"preflight": layer.seen()}
    seen["answers after it"] = answers(one.policy, rows)
    seen["steps"] = steps(one)
    seen["checkpointed"]["training"] = layer.seen()
    lines = training.read_lines(one.folder / "metrics.jsonl")
    seen["validated"] = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    return seen


def cut_off():
    """Stopped after two steps and gone on with, it ends as the undisturbed one did."""
    first = start("cut", **VALIDATED)
    stop_at(first, 2)
    with contextlib.suppress(KeyboardInterrupt):
        first.train()
    again = start("cut", **VALIDATED)
    again.train()
    runs = Run("whole"), Run("cut")
    same = {"note": again.plan, "metrics": [comparable(run) for run in runs]}
    return same | {"adapters": len({weights(run) for run in runs})}


def warm_up():
    settings = {"train.sft_steps": 6, "grpo.max_steps": 1}
    warm = start("warm", **settings)
    warm.train()
    about = json.loads((warm.stage.run / "rewards/warm_up/about.json").read_text())
    return about | {"moved": weights(warm.stage.run, "rewards/warm_up") != weights(warm.stage.run)}


def a_reward_that_is_down():
    """Alone in its set, it gives None in one step, and something infinite in another."""

    def down(completions, trainer_state, **_):
        given = {1: None, 2: math.inf}
        return [given.get(trainer_state.global_step, len(one[0]["content"])) for one in completions]

    alone = reward_set([(down, 1.0)])
    one = start("down", alone)
    moved = steps_that_move(one)
    return {"steps": steps(one), "moved": moved}


def overflow():
    """fp16's first loss scales are too high for the gradient, here for more than three steps."""
    one = start("fp16", **{"grpo.max_steps": 8})
    scaler = scale_loss(one)
    seen = {"checks": states(one), "scale after the preflight": scaler.get_scale()}
    moved = steps_that_move(one)
    return seen | {"steps": steps(one), "moved": moved, "scale": scaler.get_scale()}


def arguments():
    """What Unsloth's GRPOConfig makes of ours, by the loss and whether the rest of it is set."""
    found, run = {}, Run("arguments")
    policy = models.Policy(None, None, False)
    for loss in ("dapo", "bnpo", "dr_grpo", "cispo"):
        for extra in ({}, {"grpo.epsilon_high": 0.3, "grpo.mask_truncated_completions": False}):
            settings = SETTINGS | {"grpo.loss_type": loss} | extra
            stage = Stage(run, "03", resolve("tiny-cpu", settings))
            given = stages.grpo_arguments(stage, policy, MATH)
            args = trl.GRPOConfig(**given)
            table = stages.effective(args, given, stage.config).set_index("argument")
            table = table[table["from"].str.startswith("changed")]
            changes = table["from"] + " to " + table["value"].astype(str)
            found[loss + " set" * bool(extra)] = changes.to_dict()
    return found


def changed_arguments():
    """A second trainer over the same args, which the first has written to."""
    one = start("changed")
    args, stage = one.args, one.stage
    args.unsloth_num_chunks, args.vllm_sampling_params, args.temperature = 2, None, 0.9
    rows = one.train_dataset.to_list()
    return {"plan": stages.build_trainer(one.policy, MATH, rows, stage, args).plan}


def an_environment():
    """Episodes of the guessing game: what a tool says is masked from the loss."""
    task = {"task": "guess", "data.system_prompt": environments.load("guess").system_prompt}
    task |= {"grpo.max_completion_length": 96, "train.guard_steps": 4}
    make_run("plays", **task, **{"data.max_rows": 64})
    one = start("plays", rewards.load_preset("environment"), **task)
    checks, masks, loss = states(one), [], one.compute_loss

    def look(model, inputs, **options):
        masks.append(inputs["tool_mask"].float().mean().item())
        return loss(model, inputs, **options)

    one.compute_loss = look
    return {"checks": checks, "steps": steps(one), "masks": masks}


def a_guard():
    """Samples of the base without the adapter."""
    sample = stages.RunTrainer._generate_single_turn

    def without_the_adapter(self, *args):
        with self.model.disable_adapter():
            return sample(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as stopped:
        patch.setattr(stages.RunTrainer, "_generate_single_turn", without_the_adapter)
        start("guarded", **{"grpo.max_steps": 1, "train.guard_steps": 1}).train()
    return str(stopped.value)


def a_stock_trainer():
    """Beside the trainer of a notebook of Unsloth's, which knows no run."""
    one = start("stock", **VALIDATED, **{"grpo.max_steps": 3})
    return beside_a_stock_trainer(one, FOLDER / "beside")


SCENARIOS = (
    *(arguments, changed_arguments, a_training, cut_off, warm_up, a_reward_that_is_down),
    *(overflow, an_environment, a_stock_trainer, a_guard),
)


if __name__ == "__main__":
    assert stages.RunTrainer  # imports all that stays
    gc.collect()
    gc.freeze()  # Unsloth collects garbage at each step: half a second each time
    pretended.report(FOLDER, SCENARIOS)
