"""The reward bench: what each completion earns, and whether the gold wins."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.advantages import group_advantages, weighted_totals
from grpo_nb.prompts import Completion, completion_text
from grpo_nb.rewards import RewardSet, call
from grpo_nb.runs import Run, atomic_path, write_json

Row = dict[str, Any]
TIE = 1e-6  # totals this close are equal but for rounding


def score(preset: RewardSet, rows: Sequence[Row], completions: Sequence[Completion]) -> np.ndarray:
    """Raw scores, [completions, rewards], NaN for None; called as TRL calls rewards.

    Args:
        preset: The rewards.
        rows: One dataset row for each completion (repeated per generation).
        completions: Strings or message lists.
    """
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    prompts = [row["prompt"] for row in rows]
    arguments = {"prompts": prompts, "completions": completions, **columns}
    scores = [call(func, **arguments) for func in preset.reward_funcs]
    return np.array(scores, dtype=float).T


def score_table(
    preset: RewardSet,
    rows: Sequence[Row],
    completions_P_G: Sequence[Sequence[Completion]],
    scale_rewards: str = "group",
) -> pd.DataFrame:
    """One line a completion: question, answer, each score, total, advantage.

    Args:
        preset: Rewards and weights.
        rows: [prompts] dataset rows.
        completions_P_G: [prompts][group] completions.
        scale_rewards: As in TRL.
    """
    group = len(completions_P_G[0])
    repeated = [row for row in rows for _ in range(group)]
    flat = [completion for completions in completions_P_G for completion in completions]
    scores = score(preset, repeated, flat)
    totals = weighted_totals(scores, np.array(preset.reward_weights))
    table = pd.DataFrame(
        {
            "question": [row["question"] for row in repeated],
            "gold": [row["answer"] for row in repeated],
            "completion": [completion_text(completion) for completion in flat],
        }
    )
    table[preset.names] = scores
    table["total"] = totals
    table["advantage"] = group_advantages(totals, group, scale_rewards)
    return table


def gold_report(preset: RewardSet, rows: Sequence[Row], pilot: pd.DataFrame) -> dict[str, Any]:
    """Does the reference completion win on every row?

    It has to earn the first reward, which is correctness, in full, and more in all than any
    pilot completion of the same question that does not.

    Args:
        rows: Dataset rows, those of the pilot among them.
        pilot: What `score_table` gave.

    Returns:
        {"gold_wins": bool, "lowest": {reward: least reference score}, "losers": [questions]}
    """
    scores = score(preset, rows, [preset.reference(row) for row in rows])
    first, full = preset.names[0], getattr(preset.reward_funcs[0], "range", (0, 1))[1]
    totals = weighted_totals(scores, np.array(preset.reward_weights))
    wrong = pilot[~np.isclose(pilot[first], full)].groupby("question")["total"].max()
    losers = [
        row["question"]
        for row, score_of_first, total in zip(rows, scores[:, 0], totals, strict=True)
        if not np.isclose(score_of_first, full) or total <= wrong.get(row["question"], -np.inf)
    ]
    return {
        "gold_wins": not losers,
        "lowest": dict(zip(preset.names, scores.min(axis=0).tolist(), strict=True)),
        "losers": losers,
    }


def signal_report(preset: RewardSet, pilot: pd.DataFrame, num_generations: int) -> dict[str, Any]:
    """Which rewards, and how many groups, tell completions apart.

    Args:
        pilot: What `score_table` gave.
        num_generations: Size of a group.
    """
    scores = pilot[preset.names]
    lines = [
        {
            "reward": name,
            "mean": float(scores[name].mean()),
            "std": float(scores[name].std()),
            "share above 0": float((scores[name] > 0).mean()),
            "share None": float(scores[name].isna().mean()),
        }
        for name in preset.names
    ]
    groups = pilot["total"].to_numpy().reshape(-1, num_generations)
    spread = np.nanmax(groups, axis=1) - np.nanmin(groups, axis=1)
    with_signal = int((spread > TIE).sum())
    return {"rewards": lines, "groups": len(groups), "groups_with_signal": with_signal}


def save(run: Run, pilot: pd.DataFrame, report: dict[str, Any]) -> None:
    """Write rewards/pilot.parquet and rewards/report.json."""
    with atomic_path(run / "rewards/pilot.parquet") as temporary:
        pilot.to_parquet(temporary, index=False)
    write_json(run / "rewards/report.json", report)
