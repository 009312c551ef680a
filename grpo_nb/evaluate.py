"""The same held-out prompts through base, adapter and merged model: did it get better?"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_nb.bench import Bench
from grpo_nb.config import RunConfig
from grpo_nb.models import generate
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Run, atomic_path, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DECODING = {"greedy": 0.0, "sampled": 1.0}  # temperature


def evaluate_model(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[dict],
    preset: RewardSet,
    config: RunConfig,
    *,
    without_adapter: bool = False,
) -> pd.DataFrame:
    """Every held-out prompt answered twice, greedily and sampled, and scored.

    Args:
        without_adapter: Judge the base below the adapter of a peft model.

    Returns:
        A line a prompt and decoding: question, gold, decoding, completion, each reward, and
        "accuracy" and "format", which are the set's first reward and its first of format.
    """
    tables = []
    for decoding, temperature in DECODING.items():
        with model.disable_adapter() if without_adapter else nullcontext():
            completions = generate(
                model,
                tokenizer,
                [row["prompt"] for row in rows],
                max_completion_length=config.train.max_completion_length,
                temperature=temperature,
                seed=config.seed,
                batch_size=config.evaluate.eval_batch_size,
            )
        flat = [group[0].text for group in completions]
        table = pd.DataFrame({"question": [row["question"] for row in rows]})
        table["gold"] = [row["answer"] for row in rows]
        table["decoding"] = decoding
        table["completion"] = flat
        table[preset.names] = Bench(preset, config.train, tokenizer).score(rows, flat)
        table["accuracy"] = table[preset.names[0]]
        table["format"] = table[preset.format_name] if preset.format_name else None
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def compare(samples: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Accuracy and format of each model, a line a decoding and model.

    Args:
        samples: {"base" | "adapter" | "merged": what `evaluate_model` gave}.
    """
    everything = pd.concat([table.assign(model=name) for name, table in samples.items()])
    means = everything.groupby(["decoding", "model"], sort=False)[["accuracy", "format"]].mean()
    return means.reset_index().sort_values("decoding", kind="stable")


def agreement(left: pd.DataFrame, right: pd.DataFrame) -> float:
    """Share of prompts that two models answer with the same text, greedily."""
    greedy = left["decoding"] == "greedy"
    return float((left["completion"][greedy] == right["completion"][greedy]).mean())


def before_after(samples: Mapping[str, pd.DataFrame], count: int) -> pd.DataFrame:
    """Greedy answers side by side: what got worse first, then what got better, then the rest."""
    base, merged = (samples[name].query("decoding == 'greedy'") for name in ("base", "merged"))
    table = pd.DataFrame(
        {
            "question": base["question"],
            "gold": base["gold"],
            "before": base["completion"],
            "after": merged["completion"],
            "correct": [
                f"{'yes' if b else 'no'} → {'yes' if a else 'no'}"
                for b, a in zip(base["accuracy"], merged["accuracy"], strict=True)
            ],
        }
    )
    gain = merged["accuracy"].to_numpy() - base["accuracy"].to_numpy()
    order = np.select([gain < 0, gain > 0], [0, 1], default=2).argsort(kind="stable")
    return table.iloc[order[:count]]


def save(run: Run, samples: Mapping[str, pd.DataFrame], summary: pd.DataFrame) -> dict[str, Any]:
    """Write eval/samples.parquet and eval/report.json; returns the report."""
    everything = pd.concat([table.assign(model=name) for name, table in samples.items()])
    with atomic_path(run / "eval/samples.parquet") as temporary:
        everything.to_parquet(temporary, index=False)
    report: dict[str, Any] = {"prompts": int(everything["question"].nunique())}
    for line in summary.to_dict("records"):
        figures = {k: line[k] if pd.notna(line[k]) else None for k in ("accuracy", "format")}
        report.setdefault(line["decoding"], {})[line["model"]] = figures
    write_json(run / "eval/report.json", report)
    return report
