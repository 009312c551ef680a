"""Certify a judge: test it on baseline completions before its scores are used as rewards.

A group is a few completions of one prompt, with the reference answer and another prompt's answer
inserted. The judge grades each group twice unchanged, once in the opposite order, and once with
each changed copy of the worst completion. Each test measures the share of groups that the judge
gets right. The result is "stop" if the whole 95 % interval of this share lies below MARK, and
"warning" if the share itself does, but not the whole interval.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.reward_lab.amounts import FAMILIES, JUDGED_ROWS
from grpo_nb.reward_lab.baseline import REFERENCE_ROWS, RewardTest
from grpo_nb.reward_lab.statistics import wilson
from grpo_nb.reward_lab.table import Row
from grpo_nb.rewards import GroupJudge, LLMJudge, RewardSet, call
from grpo_nb.rewards.prompts import completion_text

GROUPS = 16  # one per prompt
COMPLETIONS = 6  # of a prompt, at most
CALLS = 6  # per group
MARGIN = 0.15  # grades that differ by less count as equal
MARK = 0.9
TESTS = read_yaml(Path(__file__).with_name("certificate.yaml"))
Grades = dict[str, float]  # {completion: score} of a group; NaN for None


class Group(NamedTuple):
    """Hold completions of a row's prompt, and the inserted completions that are graded with them.

    reference: The reference answer as a completion; "" if the row has none.
    other: Another prompt's answer as a completion, or a changed copy of a group's completion; ""
        for none.
    """

    row: Row
    completions: list[str]
    reference: str
    other: str

    @property
    def texts(self) -> list[str]:
        return [*self.completions, *filter(None, [self.reference, self.other])]


def judges(preset: RewardSet) -> list[LLMJudge]:
    """Return the judges among the rewards."""
    return [func for func in preset.reward_funcs if isinstance(func, LLMJudge)]


def cost(judge: LLMJudge, test: RewardTest) -> str:
    """Estimate the calls and tokens of the tests and of training; send no request."""
    config, groups, rows = test.stage.config, _groups(test), test.rows[:REFERENCE_ROWS]
    calls, items = config.grpo.max_steps * config.step_completions, test.baseline.samples
    if isinstance(judge, GroupJudge):
        calls, items = calls // config.grpo.num_generations, test.baseline.rows
    estimate = judge.changed(cache=False).estimate(**_columns(groups))
    tests = CALLS * estimate["calls"] + 3 * len(items) + len(rows) + FAMILIES * JUDGED_ROWS
    parts = []
    for name, count in {"these tests": tests, "the training": calls}.items():
        tokens = estimate["tokens"] * count / estimate["calls"]
        parts.append(f"{name} about {count:,} calls, {tokens:,.0f} tokens")
    return f"judge {judge.name}: {'; '.join(parts)}"


def certify(judge: LLMJudge, test: RewardTest) -> list[Check]:
    """Test a judge on up to GROUPS groups; test position bias only for a `GroupJudge`.

    Args:
        judge: A judge of individual completions, or of groups. The tests use its budget.
        test: The test with the rows and baseline rollouts of the run.
    """
    groups = _groups(test)
    pairs = list(zip(groups, _grades(judge, groups), strict=True))
    pairs = [
        (group, grades) for group, grades in pairs if not any(map(math.isnan, grades.values()))
    ]
    if not pairs:
        return [check_share(judge, "verdicts", [False] * len(groups))]
    groups, grades = [group for group, _ in pairs], [grades for _, grades in pairs]
    repetition = _grades(judge.changed(cache=False), groups)
    results = {"repeatability": list(map(_is_repeated, grades, repetition))}
    if isinstance(judge, GroupJudge):
        mirror = _grades(judge.changed(reverse=not judge.reverse), groups)
        results["position"] = list(map(_is_in_order, grades, mirror))
    texts = [min(group.completions, key=marks.get) for group, marks in pairs]  # the worst
    for name, suffix in TESTS["copies"].items():
        copies = [text + suffix for text in texts]
        trials = [g._replace(reference="", other=c) for g, c in zip(groups, copies, strict=True)]
        results[name] = list(map(_earns_no_more, _grades(judge, trials), texts, copies))
    results["reference"] = list(map(_reference_wins, groups, grades))
    results["another answer"] = list(map(_other_loses, groups, grades))
    return [check_share(judge, name, result) for name, result in results.items()]


def _groups(test: RewardTest) -> list[Group]:
    """Return a group for each of the first prompts of the baseline."""
    reference, groups = test.bench.preset.reference, {}
    rows = test.rows[:REFERENCE_ROWS]
    for row, completions in zip(test.baseline.rows, test.baseline.completions_P_G, strict=True):
        others = [each for each in rows if str(each["answer"]) != str(row["answer"])]
        right = reference(row) if str(row["answer"]).strip() else ""
        other = reference(others[len(groups) % len(others)]) if others else ""
        texts = dict.fromkeys(map(completion_text, completions))
        texts = [text for text in texts if text not in (right, other)][:COMPLETIONS]
        groups[str(row["prompt"])] = Group(row, texts or [""], right, other)
    return list(groups.values())[:GROUPS]


def _columns(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the arguments for calling the judge on these groups."""
    pairs = [(group.row, text) for group in groups for text in group.texts]
    return {
        "prompts": [row["prompt"] for row, _ in pairs],
        "completions": [text for _, text in pairs],
        "answer": [row["answer"] for row, _ in pairs],
    }


def _grades(judge: LLMJudge, groups: Sequence[Group]) -> list[Grades]:
    """Return the grades of each group, all from one call to the judge."""
    scores = call(judge, **_columns(groups))
    remaining = (math.nan if score is None else score for score in scores)
    return [{text: next(remaining) for text in group.texts} for group in groups]


# Each of these functions returns whether the judge is right about a group; None if inconclusive.
def _is_repeated(before: Grades, after: Grades) -> bool:
    return sum(abs(before[text] - after[text]) for text in before) <= MARGIN * len(before)


def _is_in_order(grades: Grades, mirror: Grades) -> bool | None:
    best, worst = max(grades, key=grades.get), min(grades, key=grades.get)
    apart = grades[best] - grades[worst] > MARGIN
    return mirror[best] > mirror[worst] if apart else None


def _earns_no_more(grades: Grades, text: str, copy: str) -> bool | None:
    return None if grades[text] > 1 - MARGIN else grades[copy] <= grades[text] + MARGIN


def _reference_wins(group: Group, grades: Grades) -> bool | None:
    reference = grades.get(group.reference)
    return None if reference is None else max(grades.values()) <= reference + MARGIN


def _other_loses(group: Group, grades: Grades) -> bool | None:
    best = max(grades[text] for text in group.completions)
    return grades[group.other] < grades.get(group.reference, best) if group.other else None


def check_share(judge: LLMJudge, name: str, results: Sequence[bool | None]) -> Check:
    """Return a check on the share of groups that the judge gets right."""
    fix, name = TESTS["fixes"][name], f"{judge.name}: {name}"
    answers = [result for result in results if result is not None]
    if not answers:
        return Check(name, "warning", f"none of {len(results)} groups was conclusive", fix)
    right, count = sum(answers), len(answers)
    low, high = wilson(right, count)
    state = "stop" if high < MARK else "warning" if right < MARK * count else "ok"
    evidence = f"right on {right} of {count} groups ({low:.0%} to {high:.0%}, mark {MARK:.0%})"
    return Check(name, state, evidence, "" if state == "ok" else fix)
