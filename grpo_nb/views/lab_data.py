"""Gather what the Reward Lab shows, as JSON types: completions with scores, and the verdict.

What takes long is not called again: of slow rewards, the Lab shows what the verdict has scored.
"""

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.answers.compare import compare_answers
from grpo_nb.checks import Check
from grpo_nb.refusals import own_frame
from grpo_nb.reward_lab import amounts, columns, written
from grpo_nb.reward_lab.attacks import HACKS, SAMPLED, Attack
from grpo_nb.reward_lab.check import RewardCheck, RewardVerdict
from grpo_nb.reward_lab.scoring import prompt_text
from grpo_nb.rewards import Reward
from grpo_nb.rewards.judge import question
from grpo_nb.views import tables

OTHERS, TRIED = 8, 200  # names of attacks in a card; completions that are tried for it
FEW = 4  # rows that are shown if there is neither a sampled completion nor a right answer
REASON, CARD, QUESTION = 200, 600, 300  # characters that are shown
SPACES = str.maketrans({" ": "·", "\t": "⇥", "\n": "↵\n"})  # where nothing else differs
TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


class Text(NamedTuple):
    """Hold a completion of a row: its kind, whether it is known to be wrong, which attack it is."""

    row: int
    kind: str
    name: str
    text: str
    wrong: bool | None = None
    attack: Attack | None = None


def contents(check: RewardCheck, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return rewards, groups and completions, after the check has run.

    Args:
        check: The check.
        conditions: "scaling" and "aggregation", of which advantages depend.
    """
    scorer, texts = check.scorer, _texts(check)
    numbers = list(dict.fromkeys(each.row for each in texts))
    roles = {n: role for role in check.ROLES for n in getattr(check.roles, role, ())}
    rewards = [
        {"name": name, "role": roles.get(n, ""), "doc": _purpose(func), "source": _source(func)}
        for n, (name, func) in enumerate(zip(scorer.names, scorer.funcs, strict=True))
    ]
    groups = [
        {
            "row": row,
            "question": _question(scorer.rows[row])[:QUESTION],
            "reference": check.written.answers.get(row, "") if check.written else "",
            "images": tables.thumbnails(scorer.rows[row].get("images", ())),
        }
        for row in numbers
    ]
    lines = completions(check, texts, {row: place for place, row in enumerate(numbers)})
    weights = list(map(float, scorer.weights))
    parts = {"rewards": rewards, "groups": groups, "completions": lines, "weights": weights}
    return {**parts, **conditions, "origin": _origin(check)}


def _origin(check: RewardCheck) -> str:
    """Return a sentence that says where the right answers come from; "" if there are none."""
    style = check.written
    if style is None or not style.answers:
        return ""
    if style.own:
        return f"The right answers are what {style.source} returns."
    source = style.source if style.source == columns.EXPRESSION else f"the column {style.source}"
    more = f" Their reasoning, {style.reasoning!r}, is invented." * ("{reasoning}" in style.form)
    return f"The right answers are made from {source}, in the form {style.form!r}.{more}"


def _texts(check: RewardCheck) -> list[Text]:
    """Return the completions that are shown, in the order of their rows."""
    scorer, style = check.scorer, check.written
    attacked, (once, same) = check.paid.rows if check.paid else [], _attacks(check)
    texts, sizes = [], Counter()
    for row, text in check.sampled:
        sizes[row] += 1
        attack = same.get((row, text))
        texts.append(Text(row, "sampled", f"sampled {sizes[row]}", text, attack=attack))
    rows = {*attacked, *(each.row for each in texts)} or range(min(FEW, len(scorer.rows)))
    for row in rows:
        if style and row in style.answers:
            texts.append(Text(row, "reference", "the right answer", style.right(row), False))
            texts.append(Text(row, "other", "another row's answer", style.wrong(row), True))
            if (longer := style.wrong(row, style.longer)) != style.wrong(row):
                texts.append(Text(row, "other", "another row's answer, reasoned", longer, True))
        texts.append(Text(row, "empty", "an empty completion", "", True))
    texts += once
    if check.unusable or scorer.any_slow:
        texts = [each for each in texts if scorer.has((each.row, each.text))]
    return sorted(texts, key=lambda each: each.row)


def _attacks(check: RewardCheck) -> tuple[list[Text], dict[tuple[int, str], Attack]]:
    """Return each attack once, and those that were sampled, {(row, text): attack}."""
    sampled, ways, same = dict.fromkeys(check.sampled), {}, {}
    for row in check.paid.rows if check.paid else ():
        for attack, text in check.every_attack().on(row):
            pairs = sampled if attack.family == SAMPLED else [(row, text)]
            same |= {pair: attack for pair in pairs if pair[1] == text and pair in sampled}
            if check.scorer.has((row, text)):  # the check has scored it
                line = Text(row, "attack", attack.name, text, attack.kind in HACKS, attack)
                ways.setdefault(attack.name, []).append(line)
    names = {attack.name for attack in same.values()}
    rest = [lines for name, lines in ways.items() if name not in names]
    return [_telling(check, lines, number) for number, lines in enumerate(rest)], same


def _telling(check: RewardCheck, lines: Sequence[Text], number: int) -> Text:
    """Return an attack on a row on which it does best; of several such rows, another each time."""
    totals = check.scorer.totals([(line.row, line.text) for line in lines])
    gains = -totals if lines[0].attack.kind == "honest" else totals
    best = [line for line, gain in zip(lines, gains, strict=True) if gain > gains.max() - 1e-6]
    return best[0 if lines[0].attack in check.attacks else number % len(best)]


def completions(
    check: RewardCheck, texts: Sequence[Text], places: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Return one record for each completion, with the scores and the reasons for them.

    Args:
        check: The check.
        texts: The completions.
        places: {number of a row: place of its group}.
    """
    pairs = [(each.row, each.text) for each in texts]
    if not pairs:
        return []
    scores, reasons = check.scorer.scores(pairs), _reasons(check, pairs)
    lines = []
    for number, (each, own) in enumerate(zip(texts, scores, strict=True)):
        answer = _answer(check, each.text)
        wrong = _is_wrong(check, each, own, answer) if each.wrong is None else each.wrong
        is_attack = each.attack and (wrong or each.attack.kind not in HACKS)
        line = {"group": places[each.row], "kind": each.kind, "name": each.name, "text": each.text}
        line |= {"scores": [None if np.isnan(score) else float(score) for score in own]}
        line |= {"why": [reason[number][:REASON] for reason in reasons], "answer": answer}
        line |= {"wrong": wrong, "attack": rules(each.attack) if is_attack else None}
        lines.append(line | {"failed": pairs[number] in check.scorer.failed})
    return lines


def rules(attack: Attack) -> dict[str, Any]:
    """Return what the browser has to know of an attack to say whether it wins."""
    kind = {"empty form": "form", SAMPLED: "sampled"}.get(attack.family, attack.kind)
    return {"name": attack.name, "kind": kind, "knows": amounts.may_earn(attack)}


def _reasons(check: RewardCheck, pairs: Sequence[tuple[int, str]]) -> list[list[str]]:
    """Return each reward's reasons, [rewards][pairs]; "" of rewards that give none, or are slow."""
    scorer, reasons = check.scorer, []
    for number, func in enumerate(scorer.funcs):
        texts = [""] * len(pairs)
        if fault := scorer.faults.get(number):
            message = f"{fault.rule}: {fault.evidence}"
            texts = [message if pair in scorer.failed else "" for pair in pairs]
        elif isinstance(func, Reward) and not scorer.is_slow(number):
            try:
                with redirect_stdout(StringIO()):
                    results = func.explain(**scorer.arguments(number, pairs))
                texts = [each.reason for each in results]
            except Exception as error:  # a user's reward may raise anything, and have no reasons
                texts = [f"{type(error).__name__}: {error}"] * len(pairs)
        reasons.append(texts)
    return reasons


def _answer(check: RewardCheck, text: str) -> str:
    """Return what stands in a completion where the form has the answer; "" if nothing does."""
    form = check.written.form if check.written else ""
    before, _, after = form.partition("{answer}")
    mark, after = written.answer_mark(form), after.strip()
    opened = before[before.rfind(mark) :].strip() if mark else ""  # with a brace after \\boxed
    if not opened or opened not in text:
        return ""
    start = text.rfind(opened) + len(opened)
    end = text.find(after, start) if after else len(text)
    return text[start : end if end >= 0 else len(text)].strip()


def _is_wrong(check: RewardCheck, each: Text, scores: np.ndarray, answer: str) -> bool:
    """Return whether a sampled completion is wrong.

    It is wrong if the rewards that say "right" do not pay it in full, or if the answer that is read
    in it is not the reference answer, a number.
    """
    style, part = check.written, check.roles
    reference = style.answers.get(each.row, "") if style else ""
    ways = (style.right, style.wrong) if reference else ()
    pairs = [(each.row, way(each.row)) for way in ways]
    is_cheap = not check.scorer.any_slow or all(map(check.scorer.has, pairs))
    if part and part.right and pairs and is_cheap:
        earned = check.scorer.payments(pairs)
        full, low = earned[:, part.right].sum(axis=1)
        own = np.nan_to_num(scores * check.scorer.weights)[part.right].sum()
        if own < low + amounts.FULL * (full - low):
            return True
    is_number = re.fullmatch(r"-?[\d.,]+", reference)
    return bool(is_number and answer) and compare_answers(reference, answer)[0] is False


# -- the verdict


def report(check: RewardCheck, verdict: RewardVerdict, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict: its state, a sentence, a card for each finding, and which attacks won.

    Args:
        check: The check.
        verdict: What it returned.
        data: The completions that are shown, of `contents`.
    """
    rows = [group["row"] for group in data["groups"]]
    lines = [line for line in data["completions"] if line["attack"]]
    versions = {line["attack"]["name"]: (rows[line["group"]], line["text"]) for line in lines}
    states = {finding.state for finding in verdict.findings}
    state = next((state for state in ("stop", "warning") if state in states), "passed")
    return {
        "state": state,
        "sentence": str(verdict).partition("\n")[0],
        "cards": [_card(check, finding, versions) for finding in verdict.findings],
        "won": {result.attack.name: result.level for result in check.results},
        "weights": list(map(float, check.scorer.weights)),
    }


def _card(check: RewardCheck, finding: Check, versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finding with the attack that earns most, as it is shown, or the line that raised."""
    card, results = finding._asdict(), [result for result in check.results if result.level]
    each = [result for result in results if result.attack.family == finding.name]
    if not each:
        return card | _fault(check, finding.name)
    is_honest = each[0].attack.kind == "honest"
    worst = (min if is_honest else max)(each, key=lambda r: (r.level == "stop", r.total - r.right))
    others = ", ".join([r.attack.name for r in each if r is not worst][:OTHERS])
    amount = f"{worst.total:.3g}; right {worst.right:.3g}, wrong {worst.wrong:.3g}"
    payer = f"`{check.scorer.names[worst.payer]}` pays {worst.scores[worst.payer]:.3g}"
    evidence = f"{worst.because}: {amount}; {payer}{others and f'; so do: {others}'}"
    row, text = versions.get(worst.attack.name, (worst.row, worst.completion))
    difference = _difference(check.written.right(row)[:CARD], text[:CARD])
    card |= {"attack": worst.attack.name, "evidence": evidence, "difference": difference}
    return card


def _difference(reference: str, text: str) -> list[tuple[str, str]]:
    """Return the text in parts, [(mark, part)]: "ins" for what the reference lacks, else "".

    If it lacks nothing, "del" marks what stands only in the reference.
    """
    old, new = TOKEN.findall(reference), TOKEN.findall(text)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    parts = [("ins" * (kind != "equal"), new[a:b]) for kind, _, _, a, b in blocks]
    if not any(mark and part for mark, part in parts):
        parts = [("del" * (kind == "delete"), old[a:b]) for kind, a, b, *_ in blocks]
    texts = [(mark, "".join(part)) for mark, part in parts if part]
    return [(m, text.translate(SPACES) if m and text.isspace() else text) for m, text in texts]


def _fault(check: RewardCheck, name: str) -> dict[str, Any]:
    """Return the line of a reward that raises, and the completion on which it does."""
    scorer = check.scorer
    for number, fault in scorer.faults.items():
        if name != f"{scorer.names[number]}: {fault.rule}" or fault.rule == "slow":
            continue
        # None of them shows a line of a reward that returns no list.
        for pair in sorted(scorer.failed, key=lambda pair: (pair[0], len(pair[1])))[:TRIED]:
            try:
                scorer.call(number, [pair])
            except Exception as error:  # what the reward raises is what is looked for
                if frame := own_frame(error):
                    place = {"line": frame.lineno, "code": frame.line, "completion": pair[1]}
                    return place | {"evidence": f"{type(error).__name__}: {error}"}
    return {}


def _question(row: Mapping[str, Any]) -> str:
    """Return a row's question."""
    text = question(row["prompt"]) if row.get("prompt") else str(row.get("question", ""))
    return " ".join((text or prompt_text(row)).split())


def _purpose(func: Callable[..., Any]) -> str:
    """Return the first line of a reward's docstring."""
    return (getattr(func, "__doc__", "") or "").strip().partition("\n")[0][:REASON]


def _source(func: Callable[..., Any]) -> str:
    """Return the source of a reward, where Python has it."""
    func = func.score if isinstance(func, Reward) else getattr(func, "func", func)
    try:
        return inspect.getsource(inspect.unwrap(func))
    except (OSError, TypeError):  # written in a console, or an instance
        return repr(func)
