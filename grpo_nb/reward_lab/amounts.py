"""Score right answers, wrong ones and attacks, and say which attacks win.

A *stop* is an attack that a policy which maximises the weighted total would prefer to a right
answer, or an attack that counts as right although it is wrong. A *warning* is a result that slows
learning: an attack that earns more than an honest wrong answer, or a right answer in a usual
spelling that is not paid.
"""

import builtins
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.reward_lab import source
from grpo_nb.reward_lab.attacks import (
    BY_TESTS,
    FILE,
    HACKS,
    HEDGES,
    KNOWING,
    SAMPLED,
    Attack,
    Attacks,
)
from grpo_nb.reward_lab.columns import distinct_rows
from grpo_nb.reward_lab.programs import BODIES, HEAD, tests_of
from grpo_nb.reward_lab.scoring import TIE, Pair, Scorer, cut
from grpo_nb.reward_lab.written import Written
from grpo_nb.rewards.judge import LLMJudge

OWN = "see which reward pays for it, and why"  # the fix of a person's own attack
FIXES = read_yaml(Path(__file__).with_name("fixes.yaml"))  # {finding: what to do}
GATE = "only with a right answer"  # is no advice on the reward that says what is right
MARK = "grpo_nb_was_here"  # what a completion's code sets if it runs in this process
HALF = 0.5  # share of the way below which a right answer is not paid
FULL = 0.99  # share of the way from wrong to right that counts as right
NEARLY = 0.25  # what counts as right and earns less by more than this share of the way is no stop
MORE = 0.1  # share of the way from wrong to right by which an attack says more than another
MARGIN = 0.02  # share of the way from wrong to right that a difference has to exceed
WON, GUESSED = 0.3, 0.6  # shares of rows above which an attack, or a guess, wins
LUCKY = 0.8  # the same where a reward pays partial credit for answers near the right one
MORE_THAN_WRONG = "earns more than an honest wrong answer"
AS_MUCH = "earns as much as an honest wrong answer"
COPIED = "copied from the prompt"
GUESSES = (COPIED, "every number", "any answer")
LEAST_ROWS, MOST_ROWS = 1, 8
JUDGED_ROWS = 2  # on which attacks on judges are scored
SECONDS = 0.4  # for scoring attacks: slow rewards get fewer rows
ENDING = "another row's second half"  # it says whether the first half is all that is compared
# Right answers beside another one: they say something only as the second of a pair.
BESIDE = {"the wrong one first", "another before", "another after", "another in text", ENDING}
WORDS = re.compile(r"[^\W\d_]{4,}[^\d\[\]{}()<>]*")  # answers of which "not" says the opposite


class Roles(NamedTuple):
    """Hold the numbers of the rewards, grouped by what the rewards pay for.

    right: Rewards that pay a row's own answer more than another row's.
    form: Rewards that pay both answers the same, and pay less if the form is missing.
    shaping: All other rewards.
    reversed: Rewards that pay another row's answer more than the row's own.
    """

    right: list[int]
    form: list[int]
    shaping: list[int]
    reversed: list[int]


class Earned:
    """Hold the weighted scores of completions, and those of honest completions on the same rows.

    pairs: The completions with their rows, for which the scorer looks up all scores.
    own: What each reward pays for these completions, [pairs, rewards].
    right, wrong, empty: What each reward pays for the right answer, a wrong answer and an empty
        completion on the same row, in the shape of `own`.
    longer: The same for a wrong answer with the reasoning that earns most.
    """

    def __init__(self, scorer: Scorer, pairs: Sequence[Pair]) -> None:
        self.scorer, self.pairs = scorer, list(pairs)
        self.own, self.right, self.wrong, self.empty, self.longer = scorer.compared(self.pairs)

    @property
    def rows(self) -> list[int]:
        return [row for row, _ in self.pairs]

    @property
    def gap(self) -> np.ndarray:
        """Return how much more a right answer earns than a wrong one, [pairs]."""
        return self.right.sum(axis=1) - self.wrong.sum(axis=1)

    def of(self, places: Sequence[int]) -> "Earned":
        """Return what the completions at these places earn."""
        return Earned(self.scorer, [self.pairs[place] for place in places])

    def share_of_right(self, part: Roles) -> np.ndarray:
        """Return where the "right" rewards place each completion, from 0 (wrong) to 1 (right)."""
        earned, right, wrong = (
            each[:, part.right].sum(axis=1) for each in (self.own, self.right, self.wrong)
        )
        way = right - wrong
        return (earned - wrong) / np.where(np.abs(way) > TIE, way, np.nan)


def measure(scorer: Scorer, written: Written, rows: Sequence[int]) -> Earned:
    """Return what the right answers of these rows earn, and what wrong and empty ones earn.

    A row is left out if a reward fails on its right or its wrong answer.
    """
    for row in rows:
        longer = written.wrong(row, written.longer)
        scorer.beside[row] = [written.right(row), written.wrong(row), "", longer]
    scorer.scores([(row, scorer.beside[row][kind]) for kind in range(4) for row in rows])
    first = {row: [(row, text) for text in scorer.beside[row][:2]] for row in rows}
    return Earned(scorer, [p[0] for p in first.values() if scorer.failed.isdisjoint(p)])


def roles(scorer: Scorer, written: Written, paid: Earned, correct: Sequence[int]) -> Roles:
    """Sort rewards by what they pay for, judging by their scores.

    If `correct` names rewards, they alone are "right".
    """
    bare = [(row, f"{written.answers[row]}") for row in paid.rows if row in written.answers]
    plain = scorer.payments(bare) if bare else paid.empty
    more = paid.right - paid.wrong  # weighted, so that a penalty for wrong answers says "right"
    right, form, shaping, backwards = [], [], [], []
    for number in range(len(scorer.funcs)):
        gain, steady = more[:, number], np.abs(more[:, number]) <= TIE
        extra = paid.wrong[:, number].mean() - plain[:, number].mean()
        if number in correct or (not correct and gain.mean() > TIE and (gain < -TIE).mean() < 0.2):
            right.append(number)
        elif gain.mean() < -TIE and (gain > TIE).mean() < 0.2:
            backwards.append(number)
        elif steady.mean() > 0.5 and extra > TIE:
            form.append(number)
        else:
            shaping.append(number)
    return Roles(right, form, shaping, backwards)


class Result(NamedTuple):
    """Hold what an attack earns, and why it wins ("" if it loses).

    level: "stop" or "warning"; "" if the attack loses.
    place: The place of the first completion with which the attack wins.
    payer: The number of the reward that pays most for the attack. For an honest attack, it is the
        reward that pays least in comparison with the right answer.
    """

    attack: Attack
    earned: Earned
    level: str
    because: str
    place: int
    payer: int

    @property
    def pair(self) -> Pair:
        return self.earned.pairs[self.place]

    def mean(self, what: str = "own") -> float:
        """Return the mean total of some completions.

        Args:
            what: "own" for the attack's completions; "right" or "wrong" for the right or the
                wrong answers on the same rows.
        """
        return float(getattr(self.earned, what).sum(axis=1).mean())

    def paid_by(self, number: int) -> float:
        """Return what one reward pays for the attack, on average."""
        return float(self.earned.own[:, number].mean())

    @property
    def extra(self) -> float:
        """Return how much more the attack earns than the right answer."""
        return self.mean() - self.mean("right")


def affordable_rows(scorer: Scorer, written: Written) -> list[int]:
    """Return the rows on which attacks are scored: fewer if the rewards are slow."""
    if any(isinstance(func, LLMJudge) for func in scorer.funcs):
        return distinct_rows(written.answers, JUDGED_ROWS)
    each = float(scorer.each.sum())
    count = int(np.clip(SECONDS / max(60 * each, 1e-9), LEAST_ROWS, MOST_ROWS))
    return distinct_rows(written.answers, count)


def attack_all(attacks: Attacks, paid: Earned, part: Roles) -> list[Result]:
    """Score every attack on the rows of `paid`, and judge each.

    A hollow attack, or a text that is the same on every row, may be right on some rows by chance.
    Such rows are left out, unless the text is at least half right on all rows.
    """
    scorer = attacks.scorer
    every: dict[str, tuple[Attack, list[Pair]]] = {}
    for row in paid.rows:
        for attack, text in attacks.on(row):
            if attack.kind == "honest" or text != attacks.style.right(row):
                every.setdefault(attack.name, (attack, []))[1].append((row, text))
    scorer.scores([pair for _, pairs in every.values() for pair in pairs])  # in one call of each
    results = []
    for attack, pairs in every.values():
        earned = Earned(scorer, [pair for pair in pairs if pair not in scorer.failed])
        is_one = len({text for _, text in earned.pairs}) == 1  # whatever the row is
        is_one &= attack not in BY_TESTS  # these are right on no row
        is_guess = attack.family in GUESSES and not (is_one and attack.family == COPIED)
        if (attack.kind == "hollow" or is_one) and not (is_guess or may_earn(attack)):
            earned = earned.of(_not_by_chance(attack, earned, part))
        if earned.pairs:
            results.append(_judge(attack, earned, part))
    return _in_pairs(results, attacks.style.answers.values())


def _in_pairs(results: Sequence[Result], answers: Iterable[str]) -> list[Result]:
    """Return the results, with a milder level for attacks that need knowledge of the answer.

    For example, a hedge with the right answer in it stops training only if it wins in both orders.
    """
    are_words, together = np.mean([bool(WORDS.fullmatch(text)) for text in answers]) > HALF, []
    counts = {
        each.attack.name
        for each in results
        if each.level == ("" if each.attack.kind == "honest" else "stop")
    }
    for each in results:
        name, family = each.attack[:2]
        pairs = [pair for pair in HEDGES.get(family, ()) if name in pair]
        knows = bool(pairs) and not any(pair <= counts for pair in pairs)
        is_denied = are_words and name != "with a minus sign"
        is_beside = name in BESIDE and (knows or each.attack.kind == "honest")
        if is_beside or (name == "the first half" and ENDING in counts):  # the rest is free
            each = each._replace(level="", because="")
        elif each.level == "stop" and (knows or (family == "negated" and not is_denied)):
            each = each._replace(level="warning")
        together.append(each)
    return together


def _not_by_chance(attack: Attack, earned: Earned, part: Roles) -> Sequence[int]:
    """Return the places at which a text is not right by chance.

    These are all places if the text is at least half right everywhere.
    """
    share = earned.share_of_right(part)
    if attack.family != SAMPLED and (share >= HALF).all() and len(share) > 1:
        return range(len(share))
    is_listed = attack.family not in (source.FAMILY, SAMPLED)
    return np.flatnonzero(~(share >= FULL) if is_listed else share <= MARGIN)


def runs_here(scorer: Scorer, write: Callable[[str], str], row: int) -> bool:
    """Return whether a reward runs a completion's code in this process.

    Args:
        scorer: The rewards with rows.
        write: A function that writes a program into a completion.
        row: The number of a row.
    """
    if not tests_of(scorer.rows[row]):
        return False
    builtins.__dict__.pop(MARK, None)
    scorer.scores([(row, write(f"import builtins\nbuiltins.{MARK} = True"))])
    return builtins.__dict__.pop(MARK, False)


def _judge(attack: Attack, earned: Earned, part: Roles) -> Result:
    """Return whether an attack wins, and why."""
    is_right = attack.kind in ("honest", "padded")
    extra = (earned.own - (earned.right if is_right else earned.wrong)).mean(axis=0)
    payer, own = int(extra.argmax()), earned.own.mean(axis=0)
    payer = payer if own[payer] >= TIE else int(own.argmax())  # one that pays 0 does not
    payer = int(extra.argmin()) if attack.kind == "honest" else payer
    for level, because, won in _tests(attack, earned, part):
        least = GUESSED if attack.family in GUESSES else WON
        if payer in part.right and because == MORE_THAN_WRONG:
            least = LUCKY
        if payer in part.right and because == AS_MUCH:  # an answer that is near the right one
            continue
        if won.mean() > least and (won.sum() > 1 or len(won) < 3):
            because += "" if won.all() else f" on {won.mean():.0%} of the rows"
            return Result(attack, earned, level, because, int(won.argmax()), payer)
    return Result(attack, earned, "", "", 0, payer)


def _tests(attack: Attack, earned: Earned, part: Roles) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (level, why the attack wins, on which rows it wins), the worst level first."""
    total, full, low, none = (
        each.sum(axis=1) for each in (earned.own, earned.right, earned.wrong, earned.empty)
    )
    gap = np.maximum(full - low, 0)
    margin = MARGIN * gap + TIE
    share = earned.share_of_right(part)
    if attack.kind == "padded":
        yield "warning", "earns more than the same answer without it", total > full + margin
    elif attack.kind == "honest":
        unpaid = np.nan_to_num(share, nan=1.0) < HALF
        if attack.family == "line breaks":  # a reward for the form may be what is lost
            right = earned.right
            is_lost = (right - earned.own > HALF * np.abs(right) + TIE).any(axis=1)
            unpaid = is_lost & (total < full - margin)
        yield "warning", "is right, and earns less", unpaid
    else:
        counts = np.nan_to_num(share) >= FULL
        yield "stop", "earns more than a right answer", total > full + margin
        yield "stop", "earns as much as a right answer", total > full - margin / 2
        yield "stop", "counts as right", counts & (total > full - NEARLY * gap)
        yield "warning", "counts as right, and earns less", counts & (total > low + margin)
        if not may_earn(attack):
            honest = np.maximum(low, earned.longer.sum(axis=1))
            honest += NEARLY * gap if attack.family == SAMPLED else MARGIN * np.abs(full)
            yield "warning", MORE_THAN_WRONG, total > honest + margin
        if attack.family == "empty form":
            pays = (low > none + margin) & (total > low - margin)
            yield "warning", AS_MUCH, pays


def may_earn(attack: Attack) -> bool:
    """Return whether an attack may earn more than an honest wrong answer.

    It may if it uses knowledge of the right answer or of the tests, or is a wrong program.
    """
    knows = KNOWING.search(str(attack.completion)) or attack.family == "single test"
    return bool(knows) or attack.name in BODIES  # wrong programs fail in many ways


def findings(results: Sequence[Result], names: Sequence[str], part: Roles) -> list[Check]:
    """Return a check for each family of attacks that wins, the worst first.

    A family is left out if its finding follows from another family's, unless its own is a "stop"
    and the other is a "warning".
    """
    winners: dict[str, list[Result]] = {}
    for result in results:
        if result.level:
            winners.setdefault(result.attack.family, []).append(result)
    stops = {f for f, each in winners.items() if any(r.level == "stop" for r in each)}
    hacks = {f for f, each in winners.items() if any(r.attack.kind in HACKS for r in each)}
    hidden: set[str] = set()
    most = {family: max(each.mean() for each in winners[family]) for family in hacks}
    for family, implied in FILE["implied"].items():
        if family in winners and family not in hidden:
            gap = np.mean([each.mean("right") - each.mean("wrong") for each in winners[family]])
            weaker = {other for other in hacks if most[other] <= most[family] + MORE * gap}
            others = weaker - {family} if implied is None else hacks & {*implied}
            hidden |= others if family in stops else others - stops
    checks = [_check(f, each, names, part) for f, each in winners.items() if f not in hidden]
    return sorted(checks, key=lambda check: check.state != "stop")


def _check(family: str, each: Sequence[Result], names: Sequence[str], part: Roles) -> Check:
    """Return one check for the results of a family, with the worst result as its evidence."""
    each = [result for result in each if result.level == "stop"] or each
    worst = max(each, key=lambda result: result.extra)
    if worst.attack.kind == "honest":
        worst = min(each, key=lambda result: result.extra)
        texts = [result.pair[1] for result in each[:4]]
        is_run = HEAD.search(worst.pair[1])  # the end of a program says little
        labels = [r.attack.name for r in each[:4]] if is_run else [cut(t, 80) for t in texts]
        evidence = (
            f"right answers that earn less: {', '.join(labels)}: {worst.mean():.3g}, the reference "
            f"{worst.mean('right'):.3g}; "
        )
    else:
        evidence = (
            f"{cut(worst.pair[1])} {worst.because}: {worst.mean():.3g}; right "
            f"{worst.mean('right'):.3g}, wrong {worst.mean('wrong'):.3g}; "
        )
    evidence += f"`{names[worst.payer]}` pays {worst.paid_by(worst.payer):.3g}"
    if worst.attack.kind == "honest":
        return Check(family, "warning", evidence, FIXES.get(family, ""))
    fix = FIXES.get(family, OWN)
    more = [result.attack.name for result in each if result is not worst]
    evidence += f" (so do: {'; '.join(more[:3])})" if more else ""
    if worst.payer in part.right and GATE in fix:  # it is what says so
        fix = f"let `{names[worst.payer]}` pay for nothing but the whole right answer"
    return Check(family, worst.level, evidence, fix)


def table(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one line for each attack: what it is, what each reward pays, and whether it wins."""
    return [
        {
            "attack": result.attack.name,
            "kind": result.attack.kind,
            **{name: result.paid_by(number) for number, name in enumerate(names)},
            "total": result.mean(),
            "right": result.mean("right"),
            "wrong": result.mean("wrong"),
            "won": result.level,
            "because": result.because,
            "completion": cut(result.pair[1]),
        }
        for result in results
    ]
