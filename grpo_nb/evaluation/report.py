"""From scored completions to a report: figures with intervals, verdicts, what changed, and where.

A model is "better" or "worse" than another where the 95 % interval of the paired difference
excludes 0; everything else is "not distinguishable".
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation.metrics import per_prompt, ranges, right
from grpo_nb.reward_lab.intervals import bootstrap, mcnemar
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Run, atomic_path, write_json
from grpo_nb.runs.config import RunConfig

DECODING = {"greedy": 0.0, "sampled": 1.0}  # temperature
UNCLEAR = "not distinguishable"
# Below this many prompts no exact test of paired answers can reach p < 0.05.
LEAST_PROMPTS = 6
WORDS = {"tokens": ("shorter", "longer"), "truncated": ("better", "worse")}
BUCKET_COLUMNS = ("task", "level", "difficulty", "category", "subject", "type", "source")
MOST_BUCKETS = 12  # a column of more values is no breakdown

Samples = Mapping[str, pd.DataFrame]


class Evaluation(NamedTuple):
    """Completions of each model, {label: lines}, and the report on them."""

    samples: dict[str, pd.DataFrame]
    report: dict[str, Any]


def build(
    samples: Samples, rows: Sequence[dict], preset: RewardSet, config: RunConfig
) -> dict[str, Any]:
    """The report, in JSON's types.

    Args:
        samples: {label: what `evaluate_model` gave}; the first label is the reference.
        rows: The rows that were answered.
        preset: Says what is correct, and each figure's range.
        config: Seed, samples and lengths, which are reported.

    Returns:
        prompts and settings; `greedy` and `sampled`: {label: {figure: mean, "intervals":
        {figure: [low, high]}}}; `comparisons`: each pair of models in each decoding with its
        verdict, sentence, differences, McNemar's p, the shares wholly right, and the rows gained
        and lost (`graded`: the first reward gives partial credit, which `accuracy` is the mean
        of); `buckets`: first against last model by difficulty, length and columns.
    """
    report: dict[str, Any] = {
        "prompts": len(rows),
        "samples": config.evaluate.samples,
        "seed": config.seed,
        "temperature": DECODING,
        "max_completion_length": config.train.max_completion_length,
    }
    comparisons, buckets = [], []
    groups = _groups(next(iter(samples.values())), rows)
    for decoding in DECODING:
        figures = {
            label: per_prompt(lines[lines["decoding"] == decoding], preset)
            for label, lines in samples.items()
        }
        report[decoding] = {
            label: _summary(table, preset, config.seed) for label, table in figures.items()
        }
        for pair in combinations(figures, 2):
            found = _compare(figures, pair, preset, config.seed)
            found["sentence"] = _sentence(decoding, found, report[decoding])
            comparisons.append({"decoding": decoding, **found})
        if len(figures) > 1:
            buckets += _buckets(decoding, figures, groups, preset, config.seed)
    return {**report, "comparisons": comparisons, "buckets": buckets}


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _ends(column: np.ndarray) -> list[float] | None:
    return None if np.isnan(column).any() else [float(end) for end in column]


def _summary(figures: pd.DataFrame, preset: RewardSet, seed: int) -> dict[str, Any]:
    ends = bootstrap(figures.to_numpy(), ranges(figures, preset), seed)
    means = {name: _plain(value) for name, value in figures.mean().items()}
    return {**means, "intervals": dict(zip(figures, map(_ends, ends.T), strict=True))}


def verdict(
    name: str, interval: Sequence[float] | None, prompts: int, p: float | None = None
) -> str:
    """ "better", "worse" or "not distinguishable" ("longer", "shorter" of lengths).

    Args:
        name: Of the figure; of `truncated` less is better.
        interval: Of the paired difference, after minus before.
        prompts: Too few decide nothing.
        p: McNemar's, which has to be under 0.05 as well, where the figure is right or wrong.
    """
    if interval is None or prompts < LEAST_PROMPTS or (p is not None and p >= 0.05):
        return UNCLEAR
    less, more = WORDS.get(name, ("worse", "better"))
    return more if interval[0] > 0 else less if interval[1] < 0 else UNCLEAR


def _compare(
    figures: Mapping[str, pd.DataFrame], pair: tuple[str, str], preset: RewardSet, seed: int
) -> dict[str, Any]:
    """The second model of a pair against the first, prompt by prompt."""
    before, after = (figures[label] for label in pair)
    low, high = ranges(before, preset)
    half = (high - low) / 2
    gain = after - before
    ends = bootstrap(gain.to_numpy(), np.array([-half, half]), seed)
    solved_before, solved_after = right(before), right(after)
    gained = np.flatnonzero(solved_after & ~solved_before)
    lost = np.flatnonzero(solved_before & ~solved_after)
    p = mcnemar(len(gained), len(lost))
    # Only then do the interval and McNemar's test judge the same thing.
    same = all((x["accuracy"] == x[x.columns[-1]]).all() for x in (before, after))
    right_or_wrong = all(np.allclose(x["accuracy"], x["pass@1"]) for x in (before, after))
    differences = {}
    for name, column in zip(gain, ends.T, strict=True):
        interval = _ends(column)
        word = verdict(name, interval, len(gain), p if same and name == "accuracy" else None)
        difference = _plain(gain[name].mean())
        differences[name] = {"difference": difference, "interval": interval, "verdict": word}
    return {
        **{"before": pair[0], "after": pair[1], "verdict": differences["accuracy"]["verdict"]},
        **{"differences": differences, "judged_by": before.columns[-1], "mcnemar_p": p},
        **{"gained": len(gained), "lost": len(lost), "graded": not right_or_wrong},
        **{"solved": [float(solved.mean()) for solved in (solved_before, solved_after)]},
        **{"gains": gained.tolist(), "regressions": lost.tolist()},
    }


def _sentence(decoding: str, found: Mapping[str, Any], means: Mapping[str, dict]) -> str:
    """The verdict with its figures, in words."""
    before, after = (means[found[side]]["accuracy"] for side in ("before", "after"))
    change = found["differences"]["accuracy"]
    if change["interval"] is None:
        return f"{UNCLEAR}: no completion could be scored"
    low, high = (100 * end for end in change["interval"])
    p, name, whole = found["mcnemar_p"], "accuracy", ""
    if found["graded"]:
        few, more = (100 * share for share in found["solved"])
        name, whole = "mean score", f" wholly right {few:.1f} % → {more:.1f} %,"
    judged = "" if decoding == "greedy" else f" by {found['judged_by']}"
    return (
        f"{found['before']} → {found['after']}: {found['verdict']}: {decoding} {name} "
        f"{100 * before:.1f} % → {100 * after:.1f} %, {100 * change['difference']:+.1f} points "
        f"(95 % interval {low:+.1f} … {high:+.1f}),{whole} "
        f"McNemar p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}; "
        f"{found['gained']} gained, {found['lost']} lost{judged}"
    )


def _groups(reference: pd.DataFrame, rows: Sequence[dict]) -> dict[str, pd.Series]:
    """Ways to part the prompts, {by: the bucket of each}, buckets in order.

    Difficulty is how often the first model's own samples solve a prompt, so there "never" can
    only be gained and "always" only lost.
    """
    solved = reference[reference["decoding"] == "sampled"].groupby("row")["correct"].mean()
    words = np.select([solved == 0, solved == 1], ["never", "always"], "sometimes")
    order = ["never", "sometimes", "always"]
    groups = {"difficulty": pd.Series(pd.Categorical(words, order))}
    if all("prompt_tokens" in row for row in rows):
        tokens = pd.Series([row["prompt_tokens"] for row in rows])
        thirds = np.digitize(tokens, np.quantile(tokens, [1 / 3, 2 / 3]), right=True)
        spans = tokens.groupby(thirds).agg(["min", "max"])
        names = {i: f"{low}–{high} prompt tokens" for i, low, high in spans.itertuples()}
        groups["length"] = pd.Series(pd.Categorical([names[i] for i in thirds], names.values()))
    for name in BUCKET_COLUMNS:
        values = pd.Series([str(row.get(name)) for row in rows])
        if 1 < values.nunique() <= MOST_BUCKETS:
            groups[f"column {name}"] = values.astype("category")
    return groups


def _buckets(
    decoding: str,
    figures: Mapping[str, pd.DataFrame],
    groups: Mapping[str, pd.Series],
    preset: RewardSet,
    seed: int,
) -> list[dict[str, Any]]:
    """The last model against the first, a line a bucket."""
    first, last = (list(figures)[i] for i in (0, -1))
    lines = []
    for by, buckets in groups.items():
        for bucket in [name for name in buckets.cat.categories if (buckets == name).any()]:
            inside = (buckets == bucket).to_numpy()
            pair = {label: figures[label][inside] for label in (first, last)}
            found = _compare(pair, (first, last), preset, seed)
            line = {"decoding": decoding, "by": by, "bucket": bucket, "prompts": int(inside.sum())}
            line |= {label: _plain(table["accuracy"].mean()) for label, table in pair.items()}
            line |= found["differences"]["accuracy"]
            lines.append(line | {key: found[key] for key in ("gained", "lost")})
    return lines


def table(report: Mapping[str, Any]) -> pd.DataFrame:
    """The report's figures, a line a decoding and model; `95 %` is the interval of accuracy.

    A figure that is another under a second name, as the first reward is accuracy, is left out.
    """
    lines = []
    for decoding in DECODING:
        for label, figures in report[decoding].items():
            line = {"decoding": decoding, "model": label, **figures}
            ends = line.pop("intervals")["accuracy"]
            shown = "none" if ends is None else f"{ends[0]:.3f} … {ends[1]:.3f}"
            lines.append({**line, "95 %": shown})
    frame = pd.DataFrame(lines)
    frame.insert(3, "95 %", frame.pop("95 %"))
    return frame.loc[:, ~frame.round(9).T.duplicated()]


def agreement(left: pd.DataFrame, right: pd.DataFrame) -> float:
    """Share of prompts that two models answer with the same text, greedily."""
    greedy = left["decoding"] == "greedy"
    return float((left["completion"][greedy] == right["completion"][greedy]).mean())


def before_after(samples: Samples, count: int) -> pd.DataFrame:
    """Greedy answers of the first and the last model: what got worse, what got better, the rest."""
    first, last = (list(samples)[i] for i in (0, -1))
    base, merged = (samples[name].query("decoding == 'greedy'") for name in (first, last))
    table = pd.DataFrame(
        {
            "question": base["question"],
            "gold": base["gold"],
            "before": base["completion"],
            "after": merged["completion"],
            "correct": [
                f"{'yes' if b else 'no'} → {'yes' if a else 'no'}"
                for b, a in zip(base["correct"], merged["correct"], strict=True)
            ],
        }
    )
    gain = merged["accuracy"].to_numpy() - base["accuracy"].to_numpy()
    order = np.select([gain < 0, gain > 0], [0, 1], default=2).argsort(kind="stable")
    return table.iloc[order[:count]]


def save(run: Run, evaluation: Evaluation) -> dict[str, Any]:
    """Write eval/samples.parquet and eval/report.json; returns the report."""
    tables = [lines.assign(model=label) for label, lines in evaluation.samples.items()]
    with atomic_path(run / "eval/samples.parquet") as temporary:
        pd.concat(tables).to_parquet(temporary, index=False)
    write_json(run / "eval/report.json", evaluation.report)
    return evaluation.report
