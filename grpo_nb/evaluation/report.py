"""Report on scored completions: figures with intervals, verdicts, and changed answers.

A model is "better" or "worse" than another if the 95 % interval of the paired difference excludes
0; otherwise the two are "not distinguishable".

A base that solves a prompt but does not write its answer in tags counts as wrong. Once it learns to
write the tags, its accuracy rises although it solves nothing new. So each answer is also read
leniently.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.answers import extract_hash_answer, find_answer, read_answer, read_reference
from grpo_nb.answers.compare import same_number
from grpo_nb.checks import Check, Checks
from grpo_nb.files import atomic_path, read_json, write_json
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.rewards.library import normalize
from grpo_nb.stats import bootstrap, mcnemar, pass_at_k

if TYPE_CHECKING:
    from grpo_nb.runs import Run

DECODING = {"greedy": 0.0, "sampled": 1.0}  # temperature
UNCLEAR = "not distinguishable"
WARM_UP = "warm-up"  # the label of the model from which GRPO started, after an SFT warm-up
# With fewer prompts no exact test of paired answers can reach p < 0.05.
LEAST_PROMPTS = 6
LEAST_ANSWERS, UNLIKE = 16, 0.4  # the fewest answers, and the least difference, for `one_answer`

CUT = 0.3  # share of answers that are cut, above which the sentence says so

COLUMNS = ("answer", "solution", "ground_truth", "target", "label")  # that hold references
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LENIENT = "right, read leniently"

Samples = Mapping[str, pd.DataFrame]


class Evaluation(NamedTuple):
    """Hold the completions of each model, {label: table}, and the report on them."""

    samples: dict[str, pd.DataFrame]
    report: dict[str, Any]

    def __str__(self) -> str:
        sentences = [pair["sentence"] for pair in self.report["comparisons"]]
        return "\n".join([table(self.report).to_string(index=False), *sentences])

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(table(self.report))
        print("\n".join(pair["sentence"] for pair in self.report["comparisons"]))


def per_prompt(lines: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Return the figures of each prompt, [prompts, figures], for one model in one decoding mode.

    Args:
        lines: The lines of `with_accuracy` of this mode.
        preset: The run's rewards.

    Returns:
        Means over the prompt's samples of accuracy, format, reward, each reward, tokens, truncated,
        the lenient reading, and turns if the samples are episodes; then pass@1 … pass@k, and the
        accuracy at each level of the rows, which is NaN for prompts of other levels.
    """
    names = ["accuracy", "format", "reward", *preset.names, "tokens", "truncated"]
    names += [name for name in (LENIENT, "turns") if name in lines]
    by_row = lines.groupby("row")
    table = by_row[names].mean().astype(float)
    right = np.stack([group.to_numpy() for _, group in by_row["correct"]])
    for k in range(1, right.shape[1] + 1):
        table[f"pass@{k}"] = pass_at_k(right, k)
    levels = by_row["level"].first() if "level" in lines else pd.Series()
    for level in sorted(set(levels.dropna()), key=str):
        table[f"level {level}"] = table["accuracy"].where(levels == level)
    return table


def with_accuracy(samples: Samples, preset: RewardSet) -> dict[str, pd.DataFrame]:
    """Add the columns `accuracy`, `correct` and the lenient reading to each table.

    Args:
        samples: {label: table from `answer_rows`} of the models that are compared.
        preset: The run's rewards.

    Returns:
        {label: table}. `accuracy` is the score of the reward that decides what is correct, as a
        share of its range: the declared range, extended to the most extreme score where an end is
        infinite or a score is beyond it. `correct` says whether the share is 1. If at most two
        scores occur and one of them is the highest possible, `accuracy` is 1 or 0.
    """
    func, name = preset.correct_func, preset.correct_func.__name__
    scores = pd.concat([lines[name] for lines in samples.values()]).to_numpy(dtype=float)
    ends = np.append(scores, declared_range(func))
    ends = ends[np.isfinite(ends)] if np.isfinite(ends).any() else np.array([0.0, 1.0])
    low, span = ends.min(), np.ptp(ends) or 1.0
    shares = ((scores - low) / span).round(9)  # without the noise of another scale
    values = np.unique(shares[np.isfinite(shares)])
    is_graded = len(values) > 2 or not np.isclose(values[-1:], 1).all()
    tables, ends = {}, np.cumsum([len(lines) for lines in samples.values()])
    for (label, lines), of_model in zip(samples.items(), np.split(shares, ends), strict=False):
        correct = np.isclose(of_model, 1)
        whole = np.where(np.isnan(of_model), np.nan, correct)
        pairs = zip(lines["completion"], lines["reference"], strict=True)
        lenient = np.array([is_right(*pair) for pair in pairs])
        lenient[correct & ~np.isnan(lenient)] = 1.0
        columns = {"accuracy": of_model if is_graded else whole, "correct": correct}
        tables[label] = lines.assign(**columns, **{LENIENT: lenient})
    return tables


def reference_of(row: Mapping[str, Any]) -> str | None:
    """Return a row's reference answer; None if there is none."""
    present = [row[name] for name in COLUMNS if row.get(name) is not None]
    if not present:
        return None
    text = str(present[0])
    return extract_hash_answer(text) or text


def is_right(completion: str, reference: str | None) -> float:
    """Return 1.0 if a completion states the reference answer in any form, or as its last number.

    >>> is_right("so there are 18 eggs.", "18"), is_right("I do not know", "18")
    (1.0, 0.0)
    """
    if reference is None:
        return float("nan")
    expected, answer = read_reference(reference), find_answer(completion) or ""
    if expected.kind != "number":
        return float(normalize(answer) == normalize(reference))
    texts = [answer, *NUMBER.findall(completion)[-1:]]
    values = [value for value in map(read_answer, texts) if value.kind == "number"]
    return float(any(same_number(expected, value) for value in values))


def one_answer(label: str, lines: pd.DataFrame) -> str:
    """Say that a model mostly gives one answer although the references vary; else return "".

    Args:
        label: The name of the model.
        lines: Its greedy answers, with the columns completion and reference.
    """
    if not {"completion", "reference"} <= {*lines} or len(lines) < LEAST_ANSWERS:
        return ""
    answers = Counter(find_answer(text) or text for text in lines["completion"])
    references = Counter(map(str, lines["reference"].dropna()))
    [(answer, count)], usual = answers.most_common(1), max(references.values(), default=len(lines))
    if (count - usual) / len(lines) < UNLIKE:
        return ""
    return (
        f"; {100 * count / len(lines):.0f} % of the answers of {label} are {shorten(answer, 40)!r}"
        f", and the commonest reference answer is {100 * usual / len(lines):.0f} % of all"
    )


def build(samples: Samples, preset: RewardSet, about: Mapping[str, Any]) -> dict[str, Any]:
    """Build the report of an evaluation from scored completions; it is made of JSON types.

    Args:
        samples: {label: table of `with_accuracy`}; the first label is the baseline.
        preset: The rewards, one of which decides what is correct.
        about: The seed of the intervals, and whatever else is copied into the report.

    Returns:
        prompts, the name of the reward that decides what is correct, and settings; `greedy` and
        `sampled`: {label: {figure: mean, "intervals": {figure: [low, high]}}}, with intervals of
        accuracy and pass@k; `comparisons`: pairs of models, compared by greedy answers, with
        verdict, sentence, the difference in accuracy, McNemar's p, the shares of fully correct
        answers, how many prompts were gained and lost, and whether the second model mostly gives
        `one_answer`. `graded` means that the reward that decides what is
        correct gives partial credit, so that `accuracy` is a mean score, as a share of its range.
    """
    seed = about["seed"]
    report: dict[str, Any] = {
        "prompts": next(iter(samples.values()))["row"].nunique(),
        "correct": preset.correct_func.__name__,
        "temperature": DECODING,
        **about,
    }
    for decoding in reversed(DECODING):
        figures = {
            label: per_prompt(lines[lines["decoding"] == decoding], preset)
            for label, lines in samples.items()
        }
        report[decoding] = {label: _summary(each, seed) for label, each in figures.items()}
    pairs = combinations(figures.items(), 2)  # `figures` now holds the greedy answers
    report["comparisons"] = [compare_pair(*pair, seed) for pair in pairs]
    for pair in report["comparisons"]:
        lines = samples[pair["after"]].query("decoding == 'greedy'")
        same = "" if "turns" in lines else one_answer(pair["after"], lines)
        cut = lines["truncated"].mean() if "truncated" in lines else 0
        more = f"; {100 * cut:.0f} % of the answers of {pair['after']} were cut at the cap"
        sentence = pair["sentence"] + same + (more if cut > CUT else "")
        pair |= {"one_answer": bool(same), "sentence": sentence}
    return report


def checks(report: Mapping[str, Any]) -> Checks:
    """Check whether the last model can be compared with the first, and whether it is better.

    Args:
        report: The report of `build` on at least two models.
    """
    first, *_, last = report["greedy"]
    pairs = {(each["before"], each["after"]): each for each in report["comparisons"]}
    pair, prompts = pairs[first, last], report["prompts"]
    if prompts < LEAST_PROMPTS:
        few = f"{prompts} held-out prompts are too few: at least {LEAST_PROMPTS} are needed"
        fix = "raise data.eval_rows and prepare the data again"
        baseline = Check("baseline", "stop", few, fix)
    elif pair["differences"]["accuracy"]["interval"] is None:
        evidence = f"{first} and {last} cannot be compared: no completion could be scored"
        fix = "see in eval/samples.parquet why the rewards give no score"
        baseline = Check("baseline", "stop", evidence, fix)
    else:
        evidence = f"{first} and {last} answered the same {prompts} held-out prompts"
        baseline = Check("baseline", "ok", evidence)
    is_sure = pair["mcnemar_p"] < 0.05 and pair["gained"] > pair["lost"]
    state, fix = "ok", ""
    if pair["verdict"] != "better":
        state, fix = "stop", "train longer, or hold out more prompts (data.eval_rows)"
    elif pair["graded"] and not is_sure:
        state, fix = "warning", "see in notebook 4 what the partly right answers lack"
    elif pair["one_answer"]:
        state = "warning"
        fix = "it learnt which answer is usual: train longer, or on rows that vary"
    results = Checks([baseline, Check("better", state, pair["sentence"], fix)])
    if WARM_UP in report["greedy"]:
        parts = [pairs[first, WARM_UP], pairs[WARM_UP, last]]
        is_gain = parts[1]["verdict"] == "better"
        fix = "" if is_gain else "the gain is the warm-up's: train longer, or on harder rows"
        sentences = "; ".join(part["sentence"] for part in parts)
        results.append(Check("gain by GRPO", "ok" if is_gain else "warning", sentences, fix))
    return results


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _ends(column: np.ndarray) -> list[float] | None:
    return None if np.isnan(column).any() else [float(end) for end in column]


def _summary(figures: pd.DataFrame, seed: int) -> dict[str, Any]:
    table = figures.filter(regex="^(accuracy|pass@.*)$")
    ends = bootstrap(table.to_numpy(), np.outer([0, 1], np.ones(table.shape[1])), seed)
    means = {name: _plain(value) for name, value in figures.mean().items()}
    return means | {"intervals": dict(zip(table, map(_ends, ends.T), strict=True))}


def verdict(interval: Sequence[float] | None, prompts: int, p: float | None = None) -> str:
    """Return "better", "worse" or "not distinguishable".

    Args:
        interval: The interval of the paired difference, after minus before.
        prompts: The number of prompts; fewer than LEAST_PROMPTS decide nothing.
        p: McNemar's p, which must also be below 0.05; None for a figure with partial credit.
    """
    if interval is None or prompts < LEAST_PROMPTS or (p is not None and p >= 0.05):
        return UNCLEAR
    return "better" if interval[0] > 0 else "worse" if interval[1] < 0 else UNCLEAR


def compare_pair(
    first: tuple[str, pd.DataFrame], second: tuple[str, pd.DataFrame], seed: int
) -> dict[str, Any]:
    """Compare the second model with the first, prompt by prompt.

    Args:
        first: Label and figures, as `per_prompt` returns them; at least accuracy and pass@1.
        second: Label and figures of the other model on the same prompts.
        seed: The seed of the resampling for intervals.

    Returns:
        An entry of the report's `comparisons`; see `build`.
    """
    before, after = first[1], second[1]
    gain = after[["accuracy"]] - before[["accuracy"]]
    interval = _ends(bootstrap(gain.to_numpy(), np.array([[-0.5], [0.5]]), seed)[:, 0])
    change = {"difference": _mean(gain["accuracy"]), "interval": interval}
    was_right, is_right = (each["pass@1"].to_numpy() == 1.0 for each in (before, after))
    gained, lost = int((is_right > was_right).sum()), int((was_right > is_right).sum())
    graded = not all(np.allclose(x["accuracy"], x["pass@1"]) for x in (before, after))
    p = mcnemar(gained, lost)
    # With partial credit the interval and McNemar's test measure different things.
    word = verdict(interval, len(gain), None if graded else p)
    pair = {"before": first[0], "after": second[0], "verdict": word, "graded": graded}
    pair |= {"differences": {"accuracy": change}, "mcnemar_p": p, "gained": gained, "lost": lost}
    pair |= {"solved": [float(was_right.mean()), float(is_right.mean())]}
    means = [_mean(each["accuracy"]) for each in (before, after)]
    return pair | {"sentence": _sentence(pair, *means) + _of_format(before, after)}


def _mean(figures: pd.Series) -> float | None:
    """Return the mean, which does not depend on the order of the prompts; None without figures."""
    present = figures.dropna()
    return math.fsum(present) / len(present) if len(present) else None


def _sentence(pair: Mapping[str, Any], before: float | None, after: float | None) -> str:
    """Return the verdict of a comparison and its figures as a sentence."""
    change = pair["differences"]["accuracy"]
    if change["interval"] is None:
        return f"{UNCLEAR}: no completion could be scored"
    low, high = (100 * end for end in change["interval"])
    p, name, whole = pair["mcnemar_p"], "accuracy", ""
    if pair["graded"]:
        was, now = (100 * share for share in pair["solved"])
        name, whole = "mean score", f" wholly right {was:.1f} % → {now:.1f} %,"
    return (
        f"{pair['before']} → {pair['after']}: {pair['verdict']}: greedy {name} "
        f"{100 * before:.1f} % → {100 * after:.1f} %, {100 * change['difference']:+z.1f} points "
        f"(95 % interval {low:+z.1f} … {high:+z.1f}),{whole} "
        f"McNemar p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}; "
        f"{pair['gained']} gained, {pair['lost']} lost"
    )


def _of_format(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """Say how much of the gain in right answers is due to the format; return "" if none is.

    Args:
        before: Figures of each prompt, with LENIENT and pass@1, greedily decoded.
        after: The same figures of the other model.
    """
    if LENIENT not in before:
        return ""
    was, now = (100 * each[[LENIENT, "pass@1"]].mean() for each in (before, after))
    if np.isnan(was[LENIENT]) or all(np.allclose(each, each["pass@1"]) for each in (was, now)):
        return ""
    gain = now - was
    part = gain["pass@1"] - max(gain[LENIENT], 0)  # what is lost of the answers is no format
    whole = f": {part:.1f} of the {gain['pass@1']:.1f} points are format" if part > 0.05 else ""
    return f"; read leniently {was[LENIENT]:.1f} % → {now[LENIENT]:.1f} %{whole}"


def table(report: Mapping[str, Any]) -> pd.DataFrame:
    """Tabulate the figures by decoding mode and model; `95 %` is the accuracy's interval.

    Columns that equal another are dropped, such as a reward whose mean is the accuracy.
    """
    lines = [
        {"decoding": decoding, "model": label} | figures
        for decoding in DECODING
        for label, figures in report[decoding].items()
    ]
    frame = pd.DataFrame(lines)
    ends = [intervals["accuracy"] for intervals in frame.pop("intervals")]
    frame.insert(3, "95 %", [f"{e[0]:.3f} … {e[1]:.3f}" if e else "none" for e in ends])
    is_level = frame.columns.str.startswith("level ")
    return frame.loc[:, is_level | ~frame.round(9).T.duplicated()]


def before_after(samples: Samples, count: int) -> pd.DataFrame:
    """List the greedy answers of the first and the last model side by side, at most `count`.

    The prompts whose score fell come first, then those whose score rose, then the rest.
    """
    lines = [list(samples.values())[place] for place in (0, -1)]
    before, after = (each.query("decoding == 'greedy'").set_index("row") for each in lines)
    table = before.join(after[["completion", "correct", "accuracy"]], rsuffix=" after")
    gain = (table["accuracy after"] - table["accuracy"]).to_numpy()
    order = np.select([gain < 0, gain > 0], [0, 1], default=2).argsort(kind="stable")
    words = table[["correct", "correct after"]].replace({True: "yes", False: "no"})
    table["correct"] = words["correct"] + " → " + words["correct after"]
    names = {"completion": "before", "completion after": "after"}
    columns = ["question", "reference", "before", "after", "correct"]
    return table.rename(columns=names)[columns].iloc[order[:count]]


def save(run: "Run", evaluation: Evaluation) -> dict[str, Any]:
    """Write eval/samples.parquet and eval/report.json, and return the report."""
    tables = [lines.assign(model=label) for label, lines in evaluation.samples.items()]
    with atomic_path(run / "eval/samples.parquet") as temporary:
        pd.concat(tables).to_parquet(temporary, index=False)
    write_json(run / "eval/report.json", evaluation.report)
    return evaluation.report


def greedy_answers(run: "Run") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the greedy completions of the first and the last model from eval/samples.parquet."""
    models = list(read_json(run / "eval/report.json")["greedy"])
    lines = pd.read_parquet(run / "eval/samples.parquet").query("decoding == 'greedy'")
    return lines[lines["model"] == models[0]], lines[lines["model"] == models[-1]]
