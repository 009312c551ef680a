"""Do stage 01 or 02 by one function, for the quickstart.

    stage = runs.start("01", "mine")
    stages.prepare_data(stage)

Notebooks 1 and 2 do the same, cell by cell.
"""

from functools import partial

from grpo_nb import data, environments, models, reward_lab, rewards, stages
from grpo_nb.checks import Checks
from grpo_nb.models import template
from grpo_nb.reward_lab import RewardTest, Verdict
from grpo_nb.runs import Stage


def prepare_data(stage: Stage) -> Checks:
    """Prepare the data, check them, and finish stage 01; return the checks."""
    model = stage.config.model
    tokenizer = models.load_tokenizer(model.model_name, stage.config.grpo.chat_template_kwargs)
    tools = environments.tools_of(stage.config, tokenizer)
    preset = stages.in_template(stage, tokenizer)
    config = stage.config.data
    count = partial(template.count_tokens, tokenizer, tools=tools)
    report = data.prepare_run(stage.run, config, stage.config.seed, count, preset)
    rows = data.load(stage.run, "train", max_rows=1000)  # enough for these checks
    checks = data.checks(report, config)
    checks.append(template.check_template(tokenizer, rows[0]["prompt"]))
    checks += environments.check_rows(environments.of(stage.config), rows)
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
    print(stages.warm_up(policy, stage) if policy else stages.warm_up_base(stage))
    test = reward_lab.open_test(stage, preset, policy and policy.engine, stage.progress)
    test = stages.adopt(test)
    verdict = reward_lab.judge(test)
    reward_lab.save(test, verdict)
    stage.finish("rewards")
    return test, verdict
