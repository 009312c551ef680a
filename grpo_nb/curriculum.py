"""The difficulty filter: train on prompts that the model solves sometimes, easy ones first.

A prompt that is always or never solved gives its group no advantage: its completions cost
time and teach nothing. The pilot that judges the prompts is the one notebook 2 scores.
"""

from typing import Any

from grpo_nb import chat, data, pilot
from grpo_nb.bench import Bench
from grpo_nb.data import difficulty
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Stage, write_json


def by_difficulty(stage: Stage, preset: RewardSet, report: dict[str, Any]) -> dict[str, Any]:
    """Judge `data.difficulty_prompts` prompts, drop those out of the band, and order the rest.

    Args:
        stage: Stage 01, after `data.prepare`.
        preset: Its first reward says whether a completion passed.
        report: What `data.prepare` gave.

    Returns:
        The report with "difficulty", written to data/report.json too; as it was where no
        prompt is to be judged.

    Raises:
        ValueError: No prompt lies in the band.
    """
    config = stage.config.data
    if not config.difficulty_prompts:
        return report
    rows = data.load(stage.run, "train")
    tried = pilot.sample(stage.run, rows[: config.difficulty_prompts], stage.config)
    tokenizer = chat.load_tokenizer(stage.config.model.model_path)
    table = Bench(preset, tokenizer=tokenizer).table(tried.rows, tried.completions_P_G)
    judged = pilot.pass_rates(tried, table, preset)
    rates = dict(zip(judged["question"], judged["pass_rate"], strict=True))
    kept, found = difficulty.keep_band(rows, rates, config.min_pass_rate, config.max_pass_rate)
    if config.order == "easy_to_hard":
        kept = difficulty.easy_to_hard(kept, rates)
    data.replace_train(stage.run, kept)
    report = {**report, "train_rows": len(kept), "difficulty": {**found, "judged": len(rates)}}
    write_json(stage.run / "data/report.json", report)
    return report
