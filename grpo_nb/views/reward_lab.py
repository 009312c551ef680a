"""Look at what rewards pay for any completion, and at the verdict of `check_rewards`.

    from grpo_nb import RewardLab
    RewardLab([correct, well_formed], train_dataset)

To change a reward, edit the cell that defines it, and run that cell and the Lab's cell again.
lab.js draws the Lab: it gets the scores once, and computes totals and advantages itself. A slow
reward is not called again: the Lab then shows only the completions scored for the verdict.
"""

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anywidget
import numpy as np
import traitlets

from grpo_nb import environments, reward_lab
from grpo_nb.answers.compare import compare_answers
from grpo_nb.checks import Check, Checks
from grpo_nb.reward_lab import RewardTest, amounts, written
from grpo_nb.reward_lab.attacks import HACKS, SAMPLED, Attack
from grpo_nb.reward_lab.check import RewardCheck, RewardVerdict, check_rewards
from grpo_nb.reward_lab.scoring import prompt_text, silent
from grpo_nb.rewards import Reward
from grpo_nb.rewards.judge import question
from grpo_nb.views import tables

HERE = Path(__file__).parent
FEW = 4  # rows that are shown if there is neither a sampled completion nor a right answer
REASON, CARD, QUESTION = 200, 600, 300  # characters that are shown


class Text(NamedTuple):
    """Hold a completion of a row, its kind, whether it is known to be wrong, and its attack."""

    row: int
    kind: str
    name: str
    text: str
    wrong: bool | None = None
    attack: Attack | None = None


class RewardLab(anywidget.AnyWidget):
    """Show what each reward pays for every completion and why, and the verdict.

    The arguments are those of `check_rewards`. The Lab shows for each row the right answer, another
    row's answer and the sampled completions, and for some rows also every attack. A completion can
    be edited and scored again.

    Args:
        completions: What the model sampled, completions[i][j]: one list of texts or chats for each
            row, in the order of the rows, as `sample` returns them.

    Attributes:
        verdict: What `check_rewards` returns.
    """

    __signature__ = inspect.signature(check_rewards)
    _esm = (HERE / "lab.js").read_text(encoding="utf-8")
    _css = (HERE / "lab.css").read_text(encoding="utf-8")
    data, report, state = (traitlets.Dict().tag(sync=True) for _ in range(3))
    added = traitlets.List().tag(sync=True)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.check = RewardCheck(*arguments, **options)
        self.verdict = self.check.run()
        self.data = contents(self.check, _conditions(options.get("args")))
        self.report = report(self.check, self.verdict)
        self.on_msg(self._score)

    def __repr__(self) -> str:
        return "RewardLab: run this notebook to use it"

    def _score(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """Score a completion that was edited in the browser, and add it to the table."""
        group = message["group"]
        row = self.data["groups"][group]["row"]
        edited = Text(row, "edited", f"edited {len(self.added) + 1}", message["text"])
        self.added = self.added + completions(self.check, [edited], {row: group})


def lab(test: RewardTest) -> RewardLab | Checks:
    """Return the Reward Lab of a run, or the checks of the environment if the task has one."""
    if environment := environments.of(test.stage.config):
        return environments.check_environment(environment, test.rows)
    return RewardLab(**reward_lab.arguments(test))


def _conditions(args: Any) -> dict[str, str]:
    """Return how advantages are computed, from a GRPOConfig or a dict."""
    values = args if isinstance(args, dict) else vars(args or object)
    scaling = values.get("scale_rewards", "group")
    scaling = {True: "group", False: "none"}.get(scaling, scaling)  # older versions of TRL
    aggregation = values.get("multi_objective_aggregation", "sum_then_normalize")
    return {"scaling": scaling, "aggregation": aggregation}


def contents(check: RewardCheck, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return rewards, groups and completions, after the check has run.

    Args:
        check: The check.
        conditions: "scaling" and "aggregation", on which advantages depend.
    """
    scorer, texts = check.scorer, _texts(check)
    numbers = list(dict.fromkeys(each.row for each in texts))
    roles = {n: role for role in check.ROLES for n in getattr(check.roles, role, ())}
    rewards = [{"name": name, "role": roles.get(n, "")} for n, name in enumerate(scorer.names)]
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
    return {**parts, **conditions}


def _texts(check: RewardCheck) -> list[Text]:
    """Return the completions that are shown, in the order of their rows."""
    scorer, style = check.scorer, check.written
    texts, sizes = [], Counter()
    for row, text in check.sampled:
        sizes[row] += 1
        texts.append(Text(row, "sampled", f"sampled {sizes[row]}", text))
    attacked = check.paid.rows if check.paid else []
    rows = {*attacked, *(each.row for each in texts)} or range(min(FEW, len(scorer.rows)))
    for row in rows:
        if style and row in style.answers:
            texts.append(Text(row, "reference", "the right answer", style.right(row), False))
            texts.append(Text(row, "other", "another row's answer", style.wrong(row), True))
            if (longer := style.wrong(row, style.longer)) != style.wrong(row):
                texts.append(Text(row, "other", "another row's answer, reasoned", longer, True))
        texts.append(Text(row, "empty", "an empty completion", "", True))
    for attack, (row, text) in ((each.attack, each.pair) for each in check.results):
        if attack.family != SAMPLED:  # these are listed above
            texts.append(Text(row, "attack", attack.name, text, attack.kind in HACKS, attack))
    if check.unusable or scorer.any_slow:
        texts = [each for each in texts if scorer.has((each.row, each.text))]
    return sorted(texts, key=lambda each: each.row)


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
    scores = check.scorer.scores(pairs)
    reasons = [_reasons(check, number, pairs) for number in range(len(check.scorer.funcs))]
    lines = []
    for number, (each, own) in enumerate(zip(texts, scores, strict=True)):
        answer = _answer(check, each.text)
        wrong = _is_wrong(check, each, own, answer) if each.wrong is None else each.wrong
        line = {"group": places[each.row], "kind": each.kind, "name": each.name, "text": each.text}
        line |= {"scores": [None if np.isnan(score) else float(score) for score in own]}
        line |= {"why": [reason[number][:REASON] for reason in reasons], "answer": answer}
        line |= {"wrong": wrong, "attack": rules(each.attack) if each.attack else None}
        lines.append(line | {"failed": pairs[number] in check.scorer.failed})
    return lines


def rules(attack: Attack) -> dict[str, Any]:
    """Return what the browser has to know about an attack to say whether it wins."""
    kind = "form" if attack.family == "empty form" else attack.kind
    return {"name": attack.name, "kind": kind, "knows": amounts.may_earn(attack)}


def _reasons(check: RewardCheck, number: int, pairs: Sequence[tuple[int, str]]) -> list[str]:
    """Return a reward's reasons for its scores; "" if it gives none, raises or is slow."""
    scorer, func = check.scorer, check.scorer.funcs[number]
    if not isinstance(func, Reward) or number in scorer.faults or scorer.is_slow(number):
        return [""] * len(pairs)
    with silent():
        return [each.reason for each in func.explain(**scorer.arguments(number, pairs))]


def _answer(check: RewardCheck, text: str) -> str:
    """Return what a completion has in the place of the form's answer; "" if it has nothing."""
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

    It is wrong if the rewards that say "right" do not pay it in full, or if the reference answer is
    a number and the completion gives another answer.
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


def report(check: RewardCheck, verdict: RewardVerdict) -> dict[str, Any]:
    """Return the verdict: its state, a sentence, a card for each finding, and which attacks won."""
    states = {finding.state for finding in verdict.findings}
    state = next((state for state in ("stop", "warning") if state in states), "passed")
    return {
        "state": state,
        "sentence": str(verdict).partition("\n")[0],
        "cards": [_card(check, finding) for finding in verdict.findings],
        "won": {result.attack.name: result.level for result in check.results},
    }


def _card(check: RewardCheck, finding: Check) -> dict[str, Any]:
    """Return a finding with its worst attack: the one that earns most.

    For attacks of kind "honest", which should be paid, it is the one that earns least.
    """
    each = [result for result in check.results if result.attack.family == finding.name]
    winners = [result for result in each if result.level == finding.state]
    if not winners:
        return finding._asdict()
    sign = -1 if winners[0].attack.kind == "honest" else 1
    worst = max(winners, key=lambda result: sign * result.extra)
    return finding._asdict() | {"attack": worst.attack.name, "text": worst.pair[1][:CARD]}


def _question(row: Mapping[str, Any]) -> str:
    """Return a row's question."""
    text = question(row["prompt"]) if row.get("prompt") else str(row.get("question", ""))
    return " ".join((text or prompt_text(row)).split())
