"""Short trainings of the tiny base, for the tests of the training room."""

import torch
from accelerate.utils import AutocastKwargs

import grpo_nb
from grpo_nb import Guard, Monitor, data, models, rewards, stages, training
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import flatten, resolve

SETTINGS = {
    "data.max_rows": 26,  # 2 prompts a step of 9 to train on: a new order after each 4 steps
    "data.eval_rows": 16,
    "data.eval_share": 0.65,
    "grpo.max_steps": 12,
    "grpo.per_device_train_batch_size": 8,
    "grpo.gradient_accumulation_steps": 2,
    "grpo.save_steps": 2,
    "train.eval_steps": 5,
    "train.guard_steps": 0,  # test_guard.py's; it takes half a second
    "grpo.max_completion_length": 32,
}
OF_THE_MACHINE = ("seconds", "step_time", "memory_gib", "tokens_per_second")
MATH = rewards.load_preset("math")


def make_run(name, **settings):
    """A run whose data are prepared; each test trains it."""
    config = resolve("tiny-cpu", SETTINGS, settings)
    run = Run(name)
    count = lambda chats: [30] * len(chats)  # noqa: E731
    data.prepare_run(run, config.data, config.seed, count, MATH)
    run.write_config(config)
    return run


def trainer_of(run, policy=None, chosen=MATH, rows=None, **settings):
    """A trainer over a fresh policy (or the given one), for the run's own rows (or these)."""
    stored = flatten(run.config()) if (run / "config.yaml").exists() else {}
    config = resolve("tiny-cpu", stored, settings)
    policy = policy or models.load_policy(config)
    stage = Stage(run, "03", config)
    rows = data.load(run, "train") if rows is None else rows
    trainer = stages.build_trainer(policy, chosen, rows, stage)
    if config.train.guard_steps:
        trainer.guard = Guard(trainer, every=config.train.guard_steps)
    return trainer


def arguments_of(config, vllm=False):
    """What GRPOConfig is built from, without a policy."""
    policy = models.Policy(None, None, vllm)
    return stages.grpo_arguments(Stage(Run("arguments"), "03", config), policy, MATH)


def lines_of(run):
    """The lines of metrics that hold a step with completions."""
    lines = training.read_lines(run / "train/metrics.jsonl")
    return [line for line in lines if "reward" in line]


def comparable(run):
    """The metrics without what depends on the machine's mood."""
    return [
        {k: v for k, v in line.items() if not any(word in k for word in OF_THE_MACHINE)}
        for line in training.read_lines(run / "train/metrics.jsonl")
    ]


def stop_at(trainer, step):
    """Press the stop button as that step is logged."""
    stop = trainer.monitor.stop
    trainer.monitor.watchers.append(lambda update: update.line["step"] == step and stop.set())


def steps_that_move(one):
    """Filled in as it trains: the steps after which a trained weight is another one."""
    moved, weights = [], [p for p in one.policy.model.parameters() if p.requires_grad]
    before = [weight.detach().clone() for weight in weights]

    def look(update):
        nonlocal before
        now = [weight.detach().clone() for weight in weights]
        if not all(map(torch.equal, before, now)):
            moved.append(update.line["step"])
        before = now

    one.monitor.watchers.append(look)
    return moved


def scale_loss(trainer, scale=2.0**28):
    """A GradScaler, as a training in fp16 has it, and gradients that pass through fp16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
    trainer.accelerator.state._mixed_precision = "fp16"
    trainer.model.accelerator_scaler = scaler
    trainer.accelerator.autocast_handler = AutocastKwargs(enabled=False)  # fp16 is not a CPU's
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient.half().float())
    return scaler


def beside_a_stock_trainer(one, folder):
    """Train `trl.GRPOTrainer` with the tools beside it, on the parts of a trainer of ours."""
    import trl

    stock = trl.GRPOTrainer(
        model=one.policy.model,
        processing_class=one.policy.tokenizer,
        reward_funcs=list(MATH.reward_funcs),
        args=one.args,
        train_dataset=one.train_dataset,
    )
    states = {check.name: check.state for check in grpo_nb.preflight(stock)}
    guard, correct = Guard(stock, every=2), MATH.correct_func.__name__
    monitor = Monitor(stock, folder=folder, correct=correct, show=False)
    stock.train()
    lines = training.read_lines(folder / "metrics.jsonl")
    return {
        "trainer": [kind.__name__ for kind in type(stock).__mro__],
        "checks": states,
        "looks": [look._asdict() for look in guard.looks],
        "failure": monitor.failure,
        "steps": [line for line in lines if "loss" in line],
    }
