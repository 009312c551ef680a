"""Score right answers, wrong ones and attacks, and say which attacks win.

A *stop* is what a policy that maximises the weighted total would rather do than answer rightly, or
what counts as right and is not. A *warning* is what makes learning slower: an attack that earns
more than an honest wrong answer, or a right answer in a usual spelling that is not paid.
"""

import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.reward_lab import literals
from grpo_nb.reward_lab.advantages import weighted
from grpo_nb.reward_lab.attacks import HACKS, HEDGES, KNOWING, SAMPLED, Attack, Attacks
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
MARGIN = 0.02  # share of the way from wrong to right that a difference has to exceed
WON, GUESSED = 0.3, 0.6  # an attack wins on more than this share of rows; by luck it wins on some
LUCKY = 0.8  # so where a reward pays part of the points for answers that are near the right one
MORE_THAN_WRONG = "earns more than an honest wrong answer"
COPIED = "copied from the prompt"
GUESSES = (COPIED, "every number", "any answer")
LEAST_ROWS, MOST_ROWS = 1, 8
MOST_SAMPLED = 3  # sampled completions that are tried as attacks
JUDGED_ROWS = 2  # on which attacks on judges are scored
SECONDS = 0.4  # for scoring attacks: slow rewards get fewer rows
# Once an attack of the first family wins, the others follow from it; None: all others.
IMPLIED = {
    "nothing written": None,
    "any answer": None,
    "empty form": ("nothing written", "plea", literals.FAMILY),
    "mentioned": ("negated", "several answers", "every number", "equation", "part of a number"),
    "several answers": ("every number", "equation", "negated"),
    "stuffing": ("plea", "repetition", literals.FAMILY),
    "length": ("repetition", literals.FAMILY),
    "empty program": ("changed arguments", "copied from the prompt"),
}


# Right answers beside another one: they say something only as the second of a pair.
BESIDE = {"the wrong one first", "another before", "another after", "another in text"}
WORDS = re.compile(r"[^\W\d_]{4,}[^\d\[\]{}()<>]*")  # answers of which "not" says the opposite


class Roles(NamedTuple):
    """Hold what each reward pays for, by number.

    right: It pays a row's own answer more than another row's.
    form: It pays both the same, and less where the form is missing.
    shaping: Anything else.
    """

    right: list[int]
    form: list[int]
    shaping: list[int]
    reversed: list[int]


class Amounts(NamedTuple):
    """Hold what completions earn on some rows, weighted.

    rows: The numbers of the rows.
    table: What each reward pays, [KINDS, rows, rewards].
    """

    rows: list[int]
    table: np.ndarray

    @property
    def right(self) -> np.ndarray:
        return self.table[0]

    @property
    def wrong(self) -> np.ndarray:
        return self.table[1]

    @property
    def empty(self) -> np.ndarray:
        return self.table[2]

    @property
    def longer(self) -> np.ndarray:
        """Return what a wrong answer earns with the reasoning that earns most."""
        return self.table[3]

    @property
    def gap(self) -> np.ndarray:
        """Return how much more a right answer earns than a wrong one, [rows]."""
        return self.right.sum(axis=1) - self.wrong.sum(axis=1)

    def of(self, places: Sequence[int]) -> "Amounts":
        """Return what completions earn on some of these rows."""
        return Amounts([self.rows[n] for n in places], self.table[:, np.array(places, dtype=int)])


def measure(scorer: Scorer, written: Written, rows: Sequence[int]) -> Amounts:
    """Return what right, wrong and empty completions earn on these rows.

    Rows are left out where the rewards fail on a right or a wrong answer. An empty completion on
    which they fail counts as a wrong answer.
    """
    for row in rows:
        longer = written.wrong(row, written.longer)
        scorer.beside[row] = [written.right(row), written.wrong(row), "", longer]
    pairs = [(row, scorer.beside[row][kind]) for kind in range(4) for row in rows]
    table = scorer.payments(pairs).reshape(4, len(rows), len(scorer.funcs))
    has_failed = np.array([pair in scorer.failed for pair in pairs], bool).reshape(4, len(rows))
    table[2:] = np.where(has_failed[2:, :, None], table[1], table[2:])
    return Amounts(list(rows), table).of(np.flatnonzero(~has_failed[:2].any(axis=0)))


def roles(scorer: Scorer, written: Written, paid: Amounts, correct: Sequence[int]) -> Roles:
    """Return what each reward pays for, by what it does; `correct` overrules for "right"."""
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
    """Hold what an attack earns: means over its rows, and why it wins ("" if it loses).

    Row and completion are the first on which it wins.
    """

    attack: Attack
    row: int
    completion: str
    scores: np.ndarray
    total: float
    right: float
    wrong: float
    level: str
    because: str
    payer: int


def affordable_rows(scorer: Scorer, written: Written) -> list[int]:
    """Return the rows on which attacks are scored: fewer if the rewards are slow."""
    if any(isinstance(func, LLMJudge) for func in scorer.funcs):
        return distinct_rows(written.answers, JUDGED_ROWS)
    each = float(scorer.each.sum())
    count = int(np.clip(SECONDS / max(60 * each, 1e-9), LEAST_ROWS, MOST_ROWS))
    return distinct_rows(written.answers, count)


def attack_all(attacks: Attacks, paid: Amounts, part: Roles) -> list[Result]:
    """Score every attack on the rows of `paid`, and judge each.

    A text that is the same on every row may be right on one of them, so that only rows on which it
    earns nothing for being right count, unless it is half right on all of them.
    """
    scorer, failed = attacks.scorer, attacks.scorer.failed
    texts: dict[str, tuple[Attack, list[tuple[int, str]]]] = {}
    for place, row in enumerate(paid.rows):
        for attack, text in attacks.on(row):
            if attack.kind == "honest" or text != attacks.style.right(row):
                texts.setdefault(attack.name, (attack, []))[1].append((place, text))
    every = [(paid.rows[place], text) for _, each in texts.values() for place, text in each]
    scorer.scores(every)  # in one call of each reward
    results = []
    for attack, each in texts.values():
        each = [(place, text) for place, text in each if (paid.rows[place], text) not in failed]
        if not each:
            continue
        own = scorer.payments([(paid.rows[place], text) for place, text in each])
        beside = paid.of([place for place, _ in each])
        if scorer.grouped:
            own, beside = _in_groups(scorer, paid, each)
        is_one = len({text for _, text in each}) == 1  # whatever the row is
        is_guess = attack.family in GUESSES and not (is_one and attack.family == COPIED)
        is_guess |= may_earn(attack)
        if (attack.kind == "hollow" or is_one) and not is_guess:
            counts = _not_by_chance(attack, own, beside, part)
            own, beside, each = own[counts], beside.of(counts), [each[n] for n in counts]
        if each:
            results.append(_judge(attack, [text for _, text in each], own, beside, part))
    return _in_pairs(results, attacks.style.answers.values())


def _in_pairs(results: Sequence[Result], answers: Iterable[str]) -> list[Result]:
    """Return the results, with warnings for what pays only whoever knows the right answer."""
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
        if name in BESIDE and (knows or each.attack.kind == "honest"):
            each = each._replace(level="", because="")
        elif each.level == "stop" and (knows or (family == "negated" and not are_words)):
            each = each._replace(level="warning")
        together.append(each)
    return together


def _not_by_chance(attack: Attack, scores: np.ndarray, paid: Amounts, part: Roles) -> Sequence[int]:
    """Return the rows on which a text is not right by chance; all if it is half right on all."""
    share = share_of_right(scores, paid, part)
    if (share >= HALF).all() and len(share) > 1:
        return range(len(share))
    is_listed = attack.family not in (literals.FAMILY, SAMPLED)
    return np.flatnonzero(~(share >= FULL) if is_listed else share <= MARGIN)


def best_wrong(scorer: Scorer, written: Written, part: Roles, sampled: Sequence[Pair]) -> list[str]:
    """Return the sampled completions that are wrong and earn much more than a wrong answer.

    Args:
        scorer: The rewards.
        written: How right answers are written.
        part: What each reward pays for.
        sampled: Completions that the model sampled, with their rows.
    """
    pairs = [pair for pair in dict.fromkeys(sampled) if pair[0] in written.answers]
    if not pairs:
        return []
    pay = measure(scorer, written, list(dict.fromkeys(row for row, _ in pairs)))
    pairs = [pair for pair in pairs if pair[0] in pay.rows and pair not in scorer.failed]
    pay = pay.of([pay.rows.index(row) for row, _ in pairs])
    scores = scorer.payments(pairs)
    honest = np.maximum(pay.wrong.sum(axis=1), pay.longer.sum(axis=1))
    extra = scores.sum(axis=1) - honest
    is_paid = (share_of_right(scores, pay, part) <= MARGIN) & (extra > NEARLY * pay.gap + TIE)
    order = [place for place in np.argsort(-extra, kind="stable") if is_paid[place]]
    return list(dict.fromkeys(pairs[place][1] for place in order))[:MOST_SAMPLED]


def _in_groups(
    scorer: Scorer, paid: Amounts, each: Sequence[tuple[int, str]]
) -> tuple[np.ndarray, Amounts]:
    """Return what an attack and honest completions earn in one group, for each row."""
    groups = []
    for place, text in each:
        row = paid.rows[place]
        beside = [text, *scorer.beside[row]]
        groups.append(weighted(scorer.together(row, beside), scorer.weights))
    stacked = np.stack(groups, axis=1)  # [attack and honest ones, rows, rewards]
    return stacked[0], Amounts([paid.rows[place] for place, _ in each], stacked[1:])


def runs_here(scorer: Scorer, written: Written, row: int) -> bool:
    """Return whether a reward runs a completion's code in this process."""
    if not tests_of(scorer.rows[row]):
        return False
    builtins.__dict__.pop(MARK, None)
    scorer.scores([(row, written.write(f"import builtins\nbuiltins.{MARK} = True"))])
    return builtins.__dict__.pop(MARK, False)


def _judge(
    attack: Attack, texts: Sequence[str], scores: np.ndarray, paid: Amounts, part: Roles
) -> Result:
    """Return an attack's result from its texts and their scores, [rows of the attack, rewards]."""
    is_right = attack.kind in ("honest", "padded")
    extra = (scores - (paid.right if is_right else paid.wrong)).mean(axis=0)
    payer, own = int(extra.argmax()), scores.mean(axis=0)
    payer = payer if own[payer] >= TIE else int(own.argmax())  # one that pays 0 does not
    payer = int(extra.argmin()) if attack.kind == "honest" else payer
    level = because = ""
    place = 0
    for name, reason, won in _tests(attack, scores, paid, part):
        least = GUESSED if attack.family in GUESSES else WON
        if reason == MORE_THAN_WRONG and payer in part.right:
            least = LUCKY
        if won.mean() > least and (won.sum() > 1 or len(won) < 3):
            level, because, place = name, reason, int(won.argmax())
            because += "" if won.all() else f" on {won.mean():.0%} of the rows"
            break
    means = np.stack([scores, *paid.table[:2]]).sum(axis=2).mean(axis=1).tolist()
    return Result(attack, paid.rows[place], texts[place], own, *means, level, because, payer)


def _tests(
    attack: Attack, scores: np.ndarray, paid: Amounts, part: Roles
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (level, why it wins, whether it does on each row), the worst first."""
    total, full, low, none = (
        each.sum(axis=1) for each in (scores, paid.right, paid.wrong, paid.empty)
    )
    gap = np.maximum(full - low, 0)
    margin = MARGIN * gap + TIE
    share = share_of_right(scores, paid, part)
    if attack.kind == "padded":
        yield "warning", "earns more than the same answer without it", total > full + margin
    elif attack.kind == "honest":
        unpaid = np.nan_to_num(share, nan=1.0) < HALF
        if attack.family == "line breaks":  # a reward for the form may be what is lost
            is_lost = (paid.right - scores > HALF * np.abs(paid.right) + TIE).any(axis=1)
            unpaid = is_lost & (total < full - margin)
        yield "warning", "is right, and earns less", unpaid
    else:
        counts = np.nan_to_num(share) >= FULL
        yield "stop", "earns more than a right answer", total > full + margin
        yield "stop", "earns as much as a right answer", total > full - margin / 2
        yield "stop", "counts as right", counts & (total > full - NEARLY * gap)
        yield "warning", "counts as right, and earns less", counts
        if not may_earn(attack):
            honest = np.maximum(low, paid.longer.sum(axis=1))
            honest += NEARLY * gap if attack.family == SAMPLED else 0
            yield "warning", MORE_THAN_WRONG, total > honest + margin
        if attack.family == "empty form":
            pays = (low > none + margin) & (total > low - margin)
            yield "warning", "earns as much as an honest wrong answer", pays


def may_earn(attack: Attack) -> bool:
    """Return whether an attack may earn more than an honest wrong answer: it knows something."""
    knows = KNOWING.search(str(attack.completion)) or attack.family == "single test"
    return bool(knows) or attack.name in BODIES  # wrong programs fail in many ways


def share_of_right(scores: np.ndarray, paid: Amounts, part: Roles) -> np.ndarray:
    """Return how far from wrong (0) to right (1) the rewards that say "right" put each row."""
    earned, right, wrong = (
        each[:, part.right].sum(axis=1) for each in (scores, paid.right, paid.wrong)
    )
    way = right - wrong
    return (earned - wrong) / np.where(np.abs(way) > TIE, way, np.nan)


def findings(results: Sequence[Result], names: Sequence[str], part: Roles) -> list[Check]:
    """Return a check for each family of attacks that wins, the worst first.

    A family is left out if its result follows from that of another one, of the same level.
    """
    winners: dict[str, list[Result]] = {}
    for result in results:
        if result.level:
            winners.setdefault(result.attack.family, []).append(result)
    stops = {f for f, each in winners.items() if any(r.level == "stop" for r in each)}
    hacks = {f for f, each in winners.items() if any(r.attack.kind in HACKS for r in each)}
    hidden: set[str] = set()
    for family, implied in IMPLIED.items():
        if family in winners and family not in hidden:
            others = hacks - {family} if implied is None else hacks & {*implied}
            hidden |= others if family in stops else others - stops
    checks = [_check(f, each, names, part) for f, each in winners.items() if f not in hidden]
    return sorted(checks, key=lambda check: check.state != "stop")


def _check(family: str, each: Sequence[Result], names: Sequence[str], part: Roles) -> Check:
    """Return one check for the results of a family, which names the one that earns most."""
    each = [result for result in each if result.level == "stop"] or each
    extra = [result.total - result.right for result in each]
    worst = each[int(np.argmax(extra))]
    if worst.attack.kind == "honest":
        worst = each[int(np.argmin(extra))]
        is_run = HEAD.search(worst.completion)  # the end of a program says little
        labels = [r.attack.name if is_run else cut(r.completion[-60:], 60) for r in each[:4]]
        ways = ", ".join(labels)
        evidence = (
            f"right answers that earn less: {ways}: {worst.total:.3g}, the reference "
            f"{worst.right:.3g}; `{names[worst.payer]}` pays {worst.scores[worst.payer]:.3g}"
        )
        return Check(family, "warning", evidence, FIXES.get(family, ""))
    evidence = (
        f"{cut(worst.completion)} {worst.because}: {worst.total:.3g}; right {worst.right:.3g}, "
        f"wrong {worst.wrong:.3g}; `{names[worst.payer]}` pays {worst.scores[worst.payer]:.3g}"
    )
    more = [result.attack.name for result in each if result is not worst]
    evidence += f" (so do: {', '.join(more[:3])})" if more else ""
    fix = FIXES.get(family, OWN)
    if worst.payer in part.right and GATE in fix:  # it is what says so
        fix = f"let `{names[worst.payer]}` pay for nothing but the whole right answer"
    return Check(family, worst.level, evidence, fix)


def table(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one line for each attack: what it is, what each reward pays, and whether it wins."""
    return [
        {
            "attack": result.attack.name,
            "kind": result.attack.kind,
            **dict(zip(names, map(float, result.scores), strict=True)),
            "total": result.total,
            "right": result.right,
            "wrong": result.wrong,
            "won": result.level,
            "because": result.because,
            "completion": cut(result.completion),
        }
        for result in results
    ]
