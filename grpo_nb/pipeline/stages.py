"""Run stages 01 to 03, with one function for each; notebooks 1 to 3 do the same, cell by cell.

    stage = runs.start_stage("01", "mine")
    stages.prepare_data(stage)

The quickstart and the launcher call these functions. Notebook 4 is stage 04, which runs in a
process of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpo_nb
from grpo_nb import data, environments, models, reward_lab, rewards, training
from grpo_nb.checks import Checks
from grpo_nb.models import template
from grpo_nb.reward_lab import RewardTest, Verdict, difficulty
from grpo_nb.runs import Stage
from grpo_nb.training import ranks


def prepare_data(stage: Stage, policy: models.Policy | None = None) -> Checks:
    """Prepare the data, check them, and finish stage 01.

    Args:
        stage: Stage 01.
        policy: A loaded policy, for measuring the difficulty of prompts; None loads the base.

    Returns:
        The checks, which are also in the manifest.
    """
    model = stage.config.model
    tokenizer = models.load_tokenizer(model.model_name, stage.config.grpo.chat_template_kwargs)
    tools = environments.tools_of(stage.config, tokenizer)
    preset = reward_lab.in_template(stage, tokenizer)
    config = stage.config.data
    count = partial(template.count_tokens, tokenizer, tools=tools)
    report = data.prepare_run(stage.run, config, stage.config.seed, count, preset)
    report = difficulty.by_difficulty(stage, preset, report, policy and policy.engine)
    rows = data.load(stage.run, "train", max_rows=1000)  # enough for these checks
    checks = data.checks(report, config)
    checks.append(template.check_template(tokenizer, rows[0]["prompt"]))
    environment = environments.of(stage.config)
    checks += environments.check_rows(environment, rows, tokenizer, config.max_prompt_tokens)
    stage.record_checks(checks)
    stage.finish("data")
    return checks


def test_rewards(stage: Stage, policy: models.Policy | None = None) -> tuple[RewardTest, Verdict]:
    """Test the rewards of the cell `%%rewards`, or else those of the run, and finish stage 02.

    Args:
        stage: Stage 02.
        policy: A loaded policy, which is warmed up and samples the baseline; None loads the base.
    """
    preset = rewards.load_rewards(stage.config.rewards)
    print(training.warm_up(policy, stage) if policy else training.warm_up_base(stage))
    test = reward_lab.open_test(stage, preset, policy and policy.engine, stage.progress)
    test = reward_lab.adopt(test)
    verdict = reward_lab.judge(test)
    reward_lab.save(test, verdict)
    stage.finish("rewards")
    return test, verdict


def train_grpo(stage: Stage, begin: Callable[[Any], None], force: bool = False) -> str:
    """Train with tested rewards, and finish stage 03; several processes may share the work.

    Args:
        stage: Stage 03.
        begin: Called with the `training.RunTrainer` before its first step, for example to watch it.
        force: Whether to train even if the rewards or a check failed.

    Returns:
        A sentence for the user.
    """
    config = stage.config
    preset = rewards.load_rewards(config.rewards)
    print(reward_lab.refuse_untested(stage.run, preset, force))
    policy = models.load_policy(config)
    print(training.warm_up(policy, stage))
    rows = data.load(stage.run, "train")
    trainer = training.build_trainer(policy, preset, rows, stage)
    print(trainer.plan, trainer.paths, sep="\n")
    checks = grpo_nb.preflight(trainer, checkpoints=config.grpo.save_total_limit)
    ranks.from_main(lambda: stage.record_checks(checks))
    print(checks)
    checks.refuse(force)
    if config.train.guard_steps:
        grpo_nb.Guard(trainer, every=config.train.guard_steps)
    begin(trainer)
    trainer.train()
    outputs = ("train/adapter", "train/metrics.jsonl", "train/alerts.jsonl")
    return ranks.from_main(lambda: stage.finish(*outputs))
