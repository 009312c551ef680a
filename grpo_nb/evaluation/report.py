"""From scored completions to a report: figures with intervals, verdicts, what changed, and where.

A model is "better" or "worse" than another where the 95 % interval of the paired difference
excludes 0; everything else is "not distinguishable".
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation.statistics import bootstrap, mcnemar
from grpo_nb.reward_lab.baseline import pass_at_k
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.runs import Check, Run, atomic_path, write_json
from grpo_nb.runs.config import RunConfig

DECODING = {"greedy": 0.0, "sampled": 1.0}  # temperature
UNCLEAR = "not distinguishable"
# Below this many prompts no exact test of paired answers can reach p < 0.05.
LEAST_PROMPTS = 6

EPISODE = ("turns", "calls", "tool_errors", "malformed")  # counted in one

Samples = Mapping[str, pd.DataFrame]


class Evaluation(NamedTuple):
    """Completions of each model, {label: lines}, and the report on them."""

    samples: dict[str, pd.DataFrame]
    report: dict[str, Any]


def per_prompt(lines: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Every figure of every prompt, [prompts, figures], of one model and one decoding.

    Args:
        lines: What `evaluate_model` gave, of one decoding.
        preset: Names the rewards.

    Returns:
        accuracy, format, reward, each reward, tokens and truncated (means over the samples of
        the prompt), what is counted in episodes, and pass@1 … pass@k.
    """
    names = ["accuracy", "format", "reward", *preset.names, "tokens", "truncated"]
    names += [name for name in EPISODE if name in lines]
    by_row = lines.groupby("row", sort=True)
    table = by_row[names].mean().astype(float)
    right = np.stack([group.to_numpy() for _, group in by_row["correct"]])
    for k in range(1, right.shape[1] + 1):
        table[f"pass@{k}"] = pass_at_k(right, k)
    return table


def ranges(figures: pd.DataFrame, preset: RewardSet) -> np.ndarray:
    """Least and greatest value of each figure, [2, figures]; NaN for lengths, which have none."""
    declared = [declared_range(func) for func in preset.reward_funcs]
    known = dict(zip(preset.names, declared, strict=True))
    pairs = zip(preset.reward_weights, declared, strict=True)
    known["reward"] = tuple(np.sum([sorted((w * low, w * high)) for w, (low, high) in pairs], 0))
    known |= {"tokens": (np.nan, np.nan), "accuracy": declared[0]}
    known |= dict.fromkeys(EPISODE, (np.nan, np.nan))
    known["format"] = known.get(preset.format_name, (np.nan, np.nan))
    ends = np.array([known.get(name, (0.0, 1.0)) for name in figures], dtype=float).T
    return np.where(np.isfinite(ends), ends, np.nan)


def build(samples: Samples, preset: RewardSet, config: RunConfig) -> dict[str, Any]:
    """The report, in JSON's types.

    Args:
        samples: {label: what `evaluate_model` gave}; the first label is the reference.
        preset: Says what is correct, and each figure's range.
        config: Seed, samples and lengths, which are reported.

    Returns:
        prompts and settings; `greedy` and `sampled`: {label: {figure: mean, "intervals":
        {figure: [low, high]}}}; `comparisons`: each pair of models by their greedy answers, with
        verdict, sentence, differences, McNemar's p, the shares wholly right, and the rows gained
        and lost (`graded`: the first reward gives partial credit, which `accuracy` is the mean
        of).
    """
    report: dict[str, Any] = {
        "prompts": next(iter(samples.values()))["row"].nunique(),
        "samples": config.evaluate.samples,
        "seed": config.seed,
        "temperature": DECODING,
        "max_completion_length": config.train.max_completion_length,
    }
    for decoding in reversed(DECODING):
        figures = {
            label: per_prompt(lines[lines["decoding"] == decoding], preset)
            for label, lines in samples.items()
        }
        report[decoding] = {n: _summary(one, preset, config.seed) for n, one in figures.items()}
    pairs = combinations(figures.items(), 2)  # the greedy ones
    return report | {"comparisons": [compare_pair(*pair, preset, config.seed) for pair in pairs]}


def checks(report: Mapping[str, Any]) -> list[Check]:
    """Whether the last model can be compared with the first ("baseline"), and is "better".

    Args:
        report: As `build` gives it, of at least two models.
    """
    first, *_, last = report["greedy"]
    pairs = {(one["before"], one["after"]): one for one in report["comparisons"]}
    found, prompts = pairs[first, last], report["prompts"]
    known = found["differences"]["accuracy"]["interval"] and prompts >= LEAST_PROMPTS
    baseline = Check(
        "baseline",
        "ok" if known else "stop",
        f"{first} and {last} answered the same {prompts} held-out prompts",
        "" if known else "raise data.eval_rows and begin again with notebook 1",
    )
    whole = found["mcnemar_p"] < 0.05 and found["gained"] > found["lost"]
    state, fix = "ok", ""
    if found["verdict"] != "better":
        state, fix = "stop", "train longer, or hold out more prompts (data.eval_rows)"
    elif found["graded"] and not whole:
        state, fix = "warning", "see in notebook 4 what answers that are partly right lack"
    return [baseline, Check("better", state, found["sentence"], fix)]


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _ends(column: np.ndarray) -> list[float] | None:
    return None if np.isnan(column).any() else [float(end) for end in column]


def _summary(figures: pd.DataFrame, preset: RewardSet, seed: int) -> dict[str, Any]:
    ends = bootstrap(figures.to_numpy(), ranges(figures, preset), seed)
    means = {name: _plain(value) for name, value in figures.mean().items()}
    return {**means, "intervals": dict(zip(figures, map(_ends, ends.T), strict=True))}


def verdict(interval: Sequence[float] | None, prompts: int, p: float | None = None) -> str:
    """ "better", "worse" or "not distinguishable".

    Args:
        interval: Of the paired difference, after minus before.
        prompts: Too few decide nothing.
        p: McNemar's, which has to be under 0.05 as well, where the figure is right or wrong.
    """
    if interval is None or prompts < LEAST_PROMPTS or (p is not None and p >= 0.05):
        return UNCLEAR
    return "better" if interval[0] > 0 else "worse" if interval[1] < 0 else UNCLEAR


def compare_pair(
    first: tuple[str, pd.DataFrame],
    second: tuple[str, pd.DataFrame],
    preset: RewardSet,
    seed: int,
) -> dict[str, Any]:
    """The second model against the first, prompt by prompt.

    Args:
        first: Label and figures, as `per_prompt` gives them; accuracy and pass@1 at least.
        second: The same, of the same prompts.
        preset: Says each figure's range.
        seed: Of the intervals' resampling.

    Returns:
        An entry of the report's `comparisons`: see `build`.
    """
    before, after = first[1], second[1]
    low, high = ranges(before, preset)
    half, gain = (high - low) / 2, after - before
    intervals = map(_ends, bootstrap(gain.to_numpy(), np.array([-half, half]), seed).T)
    was, right = (one["pass@1"].to_numpy() == 1.0 for one in (before, after))
    gained, lost = (int((x > y).sum()) for x, y in ((right, was), (was, right)))
    graded = not all(np.allclose(x["accuracy"], x["pass@1"]) for x in (before, after))
    differences = {
        name: {"difference": _plain(gain[name].mean()), "interval": interval}
        for name, interval in zip(gain, intervals, strict=True)
    }
    p = mcnemar(gained, lost)
    # Of partial credit the interval and McNemar's test do not judge the same thing.
    word = verdict(differences["accuracy"]["interval"], len(gain), None if graded else p)
    found = {
        **{"before": first[0], "after": second[0], "verdict": word, "differences": differences},
        **{"mcnemar_p": p, "graded": graded, "gained": gained, "lost": lost},
        **{"solved": [float(was.mean()), float(right.mean())]},
    }
    means = [float(one["accuracy"].mean()) for one in (before, after)]
    return found | {"sentence": _sentence(found, *means)}


def _sentence(found: Mapping[str, Any], before: float, after: float) -> str:
    """The verdict with its figures, in words."""
    change = found["differences"]["accuracy"]
    if change["interval"] is None:
        return f"{UNCLEAR}: no completion could be scored"
    low, high = (100 * end for end in change["interval"])
    p, name, whole = found["mcnemar_p"], "accuracy", ""
    if found["graded"]:
        few, more = (100 * share for share in found["solved"])
        name, whole = "mean score", f" wholly right {few:.1f} % → {more:.1f} %,"
    return (
        f"{found['before']} → {found['after']}: {found['verdict']}: greedy {name} "
        f"{100 * before:.1f} % → {100 * after:.1f} %, {100 * change['difference']:+.1f} points "
        f"(95 % interval {low:+.1f} … {high:+.1f}),{whole} "
        f"McNemar p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}; "
        f"{found['gained']} gained, {found['lost']} lost"
    )


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


def before_after(samples: Samples, count: int) -> pd.DataFrame:
    """Greedy answers of the first and the last model: what got worse, what got better, the rest."""
    ends = [samples[name].query("decoding == 'greedy'") for name in samples]
    before, after = (ends[i].set_index("row") for i in (0, -1))
    table = before.join(after[["completion", "correct", "accuracy"]], rsuffix=" after")
    gain = (table["accuracy after"] - table["accuracy"]).to_numpy()
    order = np.select([gain < 0, gain > 0], [0, 1], default=2).argsort(kind="stable")
    said = table[["correct", "correct after"]].replace({True: "yes", False: "no"})
    table["correct"] = said["correct"] + " → " + said["correct after"]
    columns = ["question", "reference", "completion", "completion after", "correct"]
    shown = table[columns].iloc[order]
    return shown.set_axis(["question", "reference", "before", "after", "correct"], axis=1)[:count]


def save(run: Run, evaluation: Evaluation) -> dict[str, Any]:
    """Write eval/samples.parquet and eval/report.json; returns the report."""
    tables = [lines.assign(model=label) for label, lines in evaluation.samples.items()]
    with atomic_path(run / "eval/samples.parquet") as temporary:
        pd.concat(tables).to_parquet(temporary, index=False)
    write_json(run / "eval/report.json", evaluation.report)
    return evaluation.report
