"""Certify a judge: test it on baseline completions before its scores are used as rewards.

A group is a few completions of one prompt, with the reference answer and another prompt's answer
inserted. The judge grades each group twice unchanged, and once with each changed copy of the worst
completion. Each test measures the share of groups that the judge
gets right. The result is "stop" if the whole 95 % interval of this share lies below MARK, and
"warning" if the share itself does, but not the whole interval.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.reward_lab.baseline import RewardTest
from grpo_nb.rewards import LLMJudge, RewardSet, call
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.stats import wilson

GROUPS = 16  # one per prompt
COMPLETIONS = 6  # of a prompt, at most
OTHERS = 512  # rows whose answers are inserted into groups of other prompts
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

    row: dict[str, Any]
    completions: list[str]
    reference: str
    other: str

    @property
    def texts(self) -> list[str]:
        return [*self.completions, *filter(None, [self.reference, self.other])]


def judges(preset: RewardSet) -> list[LLMJudge]:
    """Return the judges among the rewards."""
    return [func for func in preset.reward_funcs if isinstance(func, LLMJudge)]


def certify(judge: LLMJudge, test: RewardTest) -> list[Check]:
    """Test a judge on up to GROUPS groups.

    Args:
        judge: The judge.
        test: The test with the rows and baseline rollouts of the run.
    """
    groups = _groups(test)
    first = _grades(judge, groups)
    places = [n for n, grades in enumerate(first) if not any(map(math.isnan, grades.values()))]
    if not places:
        return [check_share(judge, "verdicts", [False] * len(groups))]
    groups, grades = [groups[n] for n in places], [first[n] for n in places]
    again = _grades(replace(judge, cache=False), groups)
    results = {"repeatability": list(map(_repeats, grades, again))}
    texts = [min(g.completions, key=marks.get) for g, marks in zip(groups, grades, strict=True)]
    for name, suffix in TESTS["copies"].items():  # of the worst completion
        trials = zip(groups, texts, strict=True)
        trials = [group._replace(reference="", other=text + suffix) for group, text in trials]
        marks = zip(_grades(judge, trials), texts, strict=True)
        results[name] = [_earns_no_more(each, text, text + suffix) for each, text in marks]
    pairs = list(zip(groups, grades, strict=True))
    results["reference"] = [_reference_wins(*pair) for pair in pairs]
    results["another answer"] = [_other_loses(*pair) for pair in pairs]
    return [check_share(judge, name, result) for name, result in results.items()]


def _groups(test: RewardTest) -> list[Group]:
    """Return a group for each of the first prompts of the baseline."""
    reference, groups = test.bench.preset.reference, {}
    for row, completions in zip(test.baseline.rows, test.baseline.completions_P_G, strict=True):
        others = [each for each in test.rows[:OTHERS] if str(each["answer"]) != str(row["answer"])]
        right = reference(row) if str(row["answer"]).strip() else ""
        other = reference(others[len(groups) % len(others)]) if others else ""
        texts = dict.fromkeys(map(completion_text, completions))
        texts = [text for text in texts if text not in (right, other)][:COMPLETIONS]
        groups[str(row["prompt"])] = Group(row, texts or [""], right, other)
    return list(groups.values())[:GROUPS]


def _grades(judge: LLMJudge, groups: Sequence[Group]) -> list[Grades]:
    """Return the grades of each group, all from one call to the judge."""
    pairs = [(group.row, text) for group in groups for text in group.texts]
    scores = call(
        judge,
        prompts=[row["prompt"] for row, _ in pairs],
        completions=[text for _, text in pairs],
        answer=[row["answer"] for row, _ in pairs],
    )
    remaining = (math.nan if score is None else score for score in scores)
    return [{text: next(remaining) for text in group.texts} for group in groups]


# Each of these functions returns whether the judge is right about a group; None if inconclusive.
def _repeats(before: Grades, after: Grades) -> bool:
    return sum(abs(before[text] - after[text]) for text in before) <= MARGIN * len(before)


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
