"""Compare a judge with a person, who judges which of two completions is better.

The person answers in the Reward Lab. Each click appends one line to the run's
rewards/human_pairs.jsonl. An answer belongs to its two texts: it counts for every judge, and for
every baseline that contains both texts.

    {"question": "2 + 3?", "left": "It is 5.", "right": "It is 6.", "better": "left"}
"""

import random
from itertools import chain, combinations, zip_longest
from typing import NamedTuple

import pandas as pd

from grpo_nb.reward_lab.certificate import MARGIN, TESTS, check_share
from grpo_nb.rewards import LLMJudge
from grpo_nb.runs import Check, Run
from grpo_nb.runs.files import append_line, read_lines

FILE = "rewards/human_pairs.jsonl"
PAIRS = 40  # maximum number of pairs shown
ENOUGH = 20  # answers that are needed for a verdict
SEED = 0  # for the choice of pairs, and of the left completion


class Pair(NamedTuple):
    """Hold two completions of a prompt.

    better: The person's answer: "left", "right" or "equal"; "" if there is none yet.
    difference: The judge's score of the left completion minus that of the right one.
    """

    question: str
    left: str
    right: str
    better: str = ""
    difference: float = 0.0

    @property
    def agrees(self) -> bool | None:
        """Return whether the judge prefers the person's choice; None if the person has none."""
        preference = {"left": self.difference > 0, "right": self.difference < 0}
        return preference.get(self.better)


def pairs(run: Run, judge: LLMJudge, table: pd.DataFrame) -> list[Pair]:
    """Return the pairs that a person has judged, then pairs whose two scores from the judge differ.

    The pairs are taken from each prompt in turn. The order of a prompt's pairs, and the
    choice of the left completion, depend only on the texts.

    Args:
        run: The run with the answers.
        judge: The judge.
        table: The score table of the baseline (`Bench.table`).
    """
    answers = {Pair(**line)[:3]: line["better"] for line in read_lines(run / FILE)}
    groups = []
    for question, group in table.dropna(subset=judge.name).groupby("question", sort=False):
        scores, group_pairs = dict(zip(group["completion"], group[judge.name], strict=True)), {}
        for both in combinations(sorted(scores), 2):
            chance = random.Random(f"{SEED} {question} {both}")
            left, right = chance.sample(both, 2)
            better = answers.get((question, left, right), "")
            pair = Pair(question, left, right, better, scores[left] - scores[right])
            if better or abs(pair.difference) > MARGIN:
                group_pairs[chance.random()] = pair
        groups.append([group_pairs[place] for place in sorted(group_pairs)])
    turns = filter(None, chain.from_iterable(zip_longest(*groups)))
    order = sorted(turns, key=lambda pair: not pair.better)
    return order[: max(PAIRS, sum(pair.better != "" for pair in order))]


def store(run: Run, pair: Pair, better: str) -> Pair:
    """Write a person's answer to the run's file, and return the pair with this answer."""
    answer = pair._replace(better=better)
    append_line(run / FILE, dict(zip(Pair._fields, answer[:4], strict=False)))
    return answer


def check(judge: LLMJudge, pairs: list[Pair]) -> Check:
    """Return a check on how often the judge agrees with the preferences of the person."""
    name, answers = "human pairs", [pair for pair in pairs if pair.better]
    if len(answers) < ENOUGH:
        evidence = f"{len(answers)} of {ENOUGH} pairs have a person's answer"
        return Check(f"{judge.name}: {name}", "warning", evidence, TESTS["fixes"]["no pairs"])
    return check_share(judge, name, [pair.agrees for pair in answers], "pairs")
