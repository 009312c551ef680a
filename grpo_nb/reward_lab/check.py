"""Test rewards before training: `check_rewards` says whether a policy can hack them, and how.

    from grpo_nb import check_rewards
    check_rewards([correct, well_formed], train_dataset)

Nothing about the rewards has to be declared. How right answers are written, what each reward pays
for, and what else its scores depend on are found by calling the rewards.
"""

import inspect
import json
import re
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.checks import Check, Checks
from grpo_nb.reward_lab import amounts, columns, linter, programs, scoring, source, written
from grpo_nb.reward_lab.amounts import FIXES, MARGIN
from grpo_nb.reward_lab.attacks import HACKS, Attack, Attacks, cheats, verified
from grpo_nb.reward_lab.scoring import TIE, Fault, Row, Scorer, cut, prompt_text, read_rows
from grpo_nb.reward_lab.source import accepted, columns_of, missing_columns, strings_of
from grpo_nb.rewards.contract import TRLS_OWN, parameters_of
from grpo_nb.rewards.judge import LLMJudge
from grpo_nb.rewards.load import load_source, rewards_of

OPTIONS = ("reference", "form", "correct")  # names in a file of rewards that mean arguments
CHARACTERS = 4  # per token, for the length of the longest completion
CAP = 1024  # tokens, where `args` does not say how long completions may be
REFERENCE_ROWS, FEW = 64, 4  # rows whose own right answer is scored; so many losers are asked again
ANSWER = re.compile(r"(?i)answers?|solution|ground_?truth|gold|target|expected|reference")
LIMITS = re.compile(r"(?i)length|len$|tokens|words|limit|max|min")  # target_length is no answer
SHORT, MIDDLE = 200, 1000  # characters of the longest attack where a reward is slow, or nearly
LINES, NAMED = 12, 6  # findings that are printed, and that the first line names
UNUSABLE = ("missing column", "wrong type", "wrong length", "no number", "undefined")
WARNED = ("slow", "side effects", "None", "constant")
UNSTEADY = ("clock", "random", "state")  # their differences may be chance
GROUP = 4  # rows in the batch of the linter


class RewardVerdict(NamedTuple):
    """Hold the verdict of `check_rewards`, which can be printed.

    findings: Checks whose state is "stop" (do not train), "warning" or "note", the worst first.
    roles: {reward: "right", "form" or "shaping"}.
    reference: The right completion that was found for one of the rows; "" if none was found.
    form: How right answers are written: a text with {reasoning} and {answer}.
    table: One record for each attack, with what it earns.
    amounts: The mean totals of the right answer, another row's answer and an empty completion.
    rows: How many rows of the dataset were read.
    seconds: How long the check took.
    """

    findings: Checks
    roles: dict[str, str]
    reference: str
    form: str
    table: list[dict[str, Any]]
    amounts: dict[str, float]
    rows: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether no finding says stop."""
        return not any(check.state == "stop" for check in self.findings)

    def __str__(self) -> str:
        stops, warnings = (named(self.findings, state) for state in ("stop", "warning"))
        outcome = "right answers win"
        wins = any(line["won"] and line["kind"] in HACKS for line in self.table)
        outcome += "" if wins else f", {_count(len(self.table), 'attack')} lose"
        outcome = f"train: {outcome}"
        if not self.reference:
            outcome = "undecided: nothing says stop, but no right answer is known"
        elif self.amounts["the right answer"] < -TIE:
            outcome = (
                "undecided: nothing says stop, but the right answer that was found is not paid"
            )
        outcome = f"do not train: {stops}" if stops else outcome
        outcome += f"; warnings: {warnings}" if warnings else ""
        lines = [f"{outcome} ({_count(self.rows, 'row')}, {self.seconds:.1f} s)"]
        if self.reference:
            earned = ", ".join(f"{name} {value:.3g}" for name, value in self.amounts.items())
            about = " (1+1=2 is the reasoning)" if written.STEP in self.reference else ""
            lines.append(f"the right answer is written so{about}: {cut(self.reference, 160)}")
            lines.append(f"earned: {earned}")
        for role in ("right", "form", "shaping"):
            if names := [name for name, each in self.roles.items() if each == role]:
                lines.append(f"pays for {role}: {', '.join(names)}")
        for check in self.findings[:LINES]:
            lines.append(f"{check.state:<8} {check.name}: {check.evidence}")
            lines += [f"         → {check.fix}"] if check.fix and check.state != "note" else []
        if more := len(self.findings) - LINES:
            lines += [f"… and {more} more in .findings"] if more > 0 else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def as_json(self) -> str:
        """Return the verdict as JSON, with `passed`."""
        content = {"passed": self.passed, **self._asdict()}
        content["findings"] = [check._asdict() for check in self.findings]
        return json.dumps(content, indent=2, default=str)


def named(checks: Sequence[Check], state: str) -> str:
    """Return the first few names of the checks in this state, and how many more there are."""
    names = [check.name for check in checks if check.state == state]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def check_rewards(
    reward_funcs: Any,
    dataset: Any,
    completions: Sequence[Any] | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    correct: Any = None,
    reference: Callable[[Row], str] | None = None,
    form: str = "",
    args: Any = None,
    processing_class: Any = None,
    attacks: Sequence[Attack] = (),
) -> RewardVerdict:
    """Lint, attack and score rewards, and return a verdict.

    Args:
        reward_funcs: What GRPOTrainer gets: a function, or a list of functions, partials,
            instances or async functions.
        dataset: The rows: train_dataset, a list of dicts, or a DataFrame. The first 256 are read.
        completions: What the model sampled: a list of groups, one for each of the first rows, in
            their order. completions[i] lists what was sampled for row i, each a text or a chat (a
            list of messages). `sample` returns this shape. None to test without any.
        reward_weights: One weight for each reward; by default those of `args`, else 1.
        correct: The reward, or the rewards, that say what is right; by default, those that pay
            right answers more than wrong ones.
        reference: A function that writes a row's right completion; by default, right completions
            are found.
        form: How right answers are written: a text with {reasoning} and {answer}, or a name such
            as "boxed"; by default, the form is found.
        args: The GRPOConfig, or a dict, for reward_weights, max_completion_length and
            num_generations.
        processing_class: The tokenizer, for rewards that read `completion_ids`.
        attacks: Attacks of your own.

    Returns:
        The verdict. Print it, or look at `findings`, `reference` and `table`.

    Raises:
        ValueError: There is no reward, there are no rows, the weights do not fit, or an attack of
            your own has a kind or a placeholder that does not exist.

    >>> def right(completions, answer, **kwargs):
    ...     return [float(a in text) for text, a in zip(completions, answer)]
    >>> rows = [{"prompt": f"{n} + 15?", "answer": str(n + 15)} for n in (16, 25, 68, 91)]
    >>> [check.name for check in check_rewards(right, rows).findings if check.state == "stop"][:1]
    ['mentioned']
    """
    return RewardCheck(**locals()).run()


def check_file(rewards: Path, data: Path) -> RewardVerdict:
    """Return the verdict on the rewards that a file defines.

    Args:
        rewards: A Python file; see the command's help.
        data: JSON lines, JSON, CSV or Parquet.

    Raises:
        FileNotFoundError: One of the files does not exist.
        ValueError: The file defines no rewards or raises an error, or the data holds no rows.
    """
    from grpo_nb.data import sources

    if not data.is_file():
        raise FileNotFoundError(f"{data} does not exist: give a file of rows, as JSON lines")
    rows = [row for _, row in sources.read(SimpleNamespace(source=str(data), max_rows=0))]
    if rows and not any("prompt" in row for row in rows):
        raise ValueError(
            f"{data} has no column 'prompt', which the trainer needs; it has {[*rows[0]]}: write "
            "the prompts, as texts or as chats, as the rewards get them in training"
        )
    module = load_source(rewards)
    pairs = rewards_of(module, {})
    funcs, weights = [func for func, _ in pairs], [weight for _, weight in pairs]
    options = {name: getattr(module, name) for name in OPTIONS if hasattr(module, name)}
    options = {name: value for name, value in options.items() if value not in funcs}
    return check_rewards(funcs, rows, reward_weights=weights, **options)


def right_reward(
    reward_funcs: Sequence[Callable[..., Any]], rows: Sequence[Row], weights: Sequence[float]
) -> str:
    """Return the name of the reward that adds most to the total of a right answer; "" if none does.

    Args:
        reward_funcs: The rewards.
        rows: Dataset rows.
        weights: One weight for each reward.
    """
    scorer = Scorer(reward_funcs, read_rows(rows), weights=weights)
    scorer.begin()
    style, _ = written.find(scorer)
    if style is None or not style.answers:
        return ""
    earnings = amounts.measure(scorer, style, amounts.affordable_rows(scorer, style))
    if not earnings.rows:
        return ""
    gains = np.abs(earnings.right - earnings.wrong).mean(axis=0)
    right = amounts.roles(scorer, style, earnings, []).right
    best = max(right, key=lambda number: gains[number], default=None)
    return "" if best is None else scorer.names[best]


class RewardCheck:
    """Perform one call of `check_rewards`, whose arguments it takes, and hold its state."""

    ROLES = ("right", "form", "shaping")

    def __init__(self, *positional: Any, **named: Any) -> None:
        self.start = time.perf_counter()
        arguments = inspect.signature(check_rewards).bind(*positional, **named)
        arguments.apply_defaults()
        options = SimpleNamespace(**arguments.arguments)
        funcs = _functions(options.reward_funcs)
        weights = _weights(options.reward_weights, options.args, len(funcs))
        self.scorer = Scorer(funcs, read_rows(options.dataset), options.processing_class, weights)
        self.scorer.group = _setting(options.args, "num_generations") or self.scorer.group
        self.correct = _numbers(options.correct, self.scorer)
        self.reference, self.form = options.reference, options.form
        self.sampled = _texts(options.completions, len(self.scorer.rows))
        self.longest = _longest(options.args)
        self.attacks = verified(options.attacks)
        self.checks: list[Check] = []
        self.written: written.Written | None = None
        self.paid: amounts.Earned | None = None
        self.roles: amounts.Roles | None = None
        self.results: list[amounts.Result] = []
        self.unusable = self.executed = False
        self.unsteady: set[int] = set()

    def run(self) -> RewardVerdict:
        """Test the rewards, and return the verdict."""
        self.static()
        if not self.unusable:
            self.behavior()
        return self.verdict(time.perf_counter() - self.start)

    def every_attack(self) -> Attacks:
        """Return an object that writes the attacks from what has been found so far."""
        parts = self.longest, self.attacks, self.executed, self.sampled
        return Attacks(self.scorer, self.written, *parts)

    def add(self, name: str, state: str, evidence: str, reward: int | None = None) -> None:
        """Add a finding with its fix, unless the same one was added for this reward."""
        title = name if reward is None else f"{self.scorer.names[reward]}: {name}"
        if not any(check.name == title for check in self.checks):
            self.checks.append(Check(title, state, evidence, FIXES.get(name, "")))

    def _blame(self, number: int, fault: Fault, is_mild: bool = False) -> None:
        state = "warning" if is_mild or fault.rule in WARNED else "stop"
        self.add(fault.rule, state, fault.evidence, number)

    def static(self) -> None:
        """Find faults without calling the rewards: missing columns and refused arguments."""
        scorer = self.scorer
        for number, func in enumerate(scorer.funcs):
            if (names := accepted(func)) is not None:
                refused = [n for n in (*TRLS_OWN[:3], *scorer.columns) if n not in names]
                evidence = f"it has no **kwargs; TRL passes {', '.join(refused or TRLS_OWN[3:])}"
                self.add("arguments", "stop", evidence, number)
            if "environments" in parameters_of(func)[0]:
                evidence = "it reads `environments`: only episodes tell"
                self.add("environment", "note", evidence, number)
                self.unusable = True
            if absent := missing_columns(func, scorer.columns):
                evidence = f"it reads {absent[0]!r}; the rows have {scorer.columns}"
                self.add("missing column", "stop", evidence, number)
                self.unusable = True

    def _grows(self, number: int, row: int, writers: Sequence[Callable[[str], str]]) -> bool:
        """Add a finding if a reward takes too long on long texts; return whether it does."""
        start = scoring.clock()
        fault = linter.growth(self.scorer, number, row, self.longest, writers)
        if fault:
            self._blame(number, fault)
            self.longest = min(self.longest, SHORT)
        elif scoring.clock() - start > linter.ALL / 2:
            self.longest = min(self.longest, MIDDLE)
        return bool(fault)

    def behavior(self) -> None:
        """Find out what is right, test what the scores depend on, and attack the rewards."""
        scorer = self.scorer
        texts = [text for _, text in self.sampled]
        scorer.begin()
        if not any(fault.rule in UNUSABLE for fault in scorer.faults.values()):
            for number in range(len(scorer.funcs)):  # on texts without a known form
                self._grows(number, 0, [str])
        if any(check.name.endswith(": hangs") for check in self.checks) or self._faults():
            return
        self.written, attempts = written.find(scorer, self.form, self.reference, texts)
        if self._faults():
            return
        if self.written and self.written.answers:
            row, answer = next(iter(self.written.answers.items()))
            if programs.asked([answer]):
                scorer.retime((row, self.written.right(row)))
        batch = self._batch()
        self._lint(batch)
        if self._faults():
            return
        if self.written is None or not self.written.answers:
            self._without_reference(attempts, batch)
        else:
            self._with_reference()
        self._score_sampled()
        self._unsaid()
        self._faults()

    def _faults(self) -> bool:
        """Add a finding for each reward that failed; return whether further tests are useless."""
        for number, fault in self.scorer.faults.items():
            self._blame(number, fault)
            self.unusable |= fault.rule in UNUSABLE
        return self.unusable

    def _batch(self) -> list[tuple[int, str]]:
        """Return completions of several kinds on a few rows, grouped by row."""
        style, rows = self.written, range(min(GROUP, len(self.scorer.rows)))
        if style is None or not style.answers:
            return [(row, text) for row in rows for text in ("so it is", "", "1+1=2")]
        rows = columns.distinct_rows(style.answers, GROUP)
        if self.scorer.any_slow:
            right = [(row, style.write(style.answers[row])) for row in rows[:2]]
            return [*right[:1], (rows[0], style.wrong(rows[0])), *right[1:]]
        reasonings = (written.LONG_STEPS, written.LONG_STEPS.replace("\n", " "))
        return [
            (row, text)
            for row, steps in zip(rows, cycle(reasonings), strict=False)
            for text in (
                style.write(style.answers[row]),
                style.wrong(row),
                style.write(style.answers[row], steps) + "\n",
                "",
                f"I think it is {style.answers[row]}.",
            )
        ]

    def _lint(self, batch: Sequence[tuple[int, str]]) -> None:
        """Find out what scores depend on besides rows and completions, and what takes too long."""
        scorer = self.scorer
        scorer.scores(batch)
        style = self.written
        writers = [style.write, lambda text: style.write("1", text)] if style else []
        is_program = programs.asked([batch[0][1]]) is not None
        for number in range(len(scorer.funcs)):
            if number in scorer.faults:
                continue
            try:
                fault = linter.repeatability(scorer, number, batch)
                few = batch[:1] if scorer.is_slow(number) else batch
                effects = linter.side_effects(scorer, number, few)
            except Exception as error:  # it ran before: it depends on what was called since
                fault, effects = Fault("state", f"a later call raises {error!r:.100}"), []
            if effects:
                state = "stop" if any("torch" in effect for effect in effects) else "warning"
                self.add("side effects", state, "; ".join(effects), number)
            row, is_quick = batch[0][0], not scorer.is_slow(number) and number not in scorer.grouped
            if fault is None and style and style.answers:
                answer = style.answers.get(row, "")
                fault = linter.evaluated(scorer, number, row, answer, style.write)
            if fault is None and writers and is_quick and not self._grows(number, row, writers):
                is_run = is_program or programs.tests_of(scorer.rows[row])
                fault = None if is_run else linter.tower(scorer, number, row, writers[0])
            if fault:
                is_judge = isinstance(scorer.funcs[number], LLMJudge)
                self._blame(number, fault, is_judge or (fault.rule == "clock" and is_program))
                self.unsteady |= {number} if fault.rule in UNSTEADY else set()

    def _without_reference(self, tried: int, batch: Sequence[tuple[int, str]]) -> None:
        """Add a finding that says why no attack can be judged, and which text earns most."""
        scorer = self.scorer
        if scorer.faults:  # a reward that fails is the one finding
            return
        if self._programs():
            return
        in_use = columns.columns_in_use(scorer)
        ways = next(iter(columns.answers_to_try(scorer)), {})
        hidden = [way for way, answers in ways.items() if not _in_prompts(scorer, answers)]
        scores = np.nan_to_num(scorer.scores(batch))
        way = hidden[0] if hidden else ""
        answers = list(ways.get(way, {}).values())
        column = way.partition(",")[0]
        is_answer = columns.ANSWERS.search(column) and not LIMITS.search(column)
        is_answer = is_answer or way == columns.EXPRESSION
        is_read = columns.column_of(way) not in {*scorer.columns} - {*in_use}
        fails = bool(in_use and is_read and hidden and tried and (is_answer or not scores.any()))
        differ = np.ptp(scores, axis=0).any() or (in_use and not is_answer)
        most = self._hollow(not fails and not differ and len(set(answers)) > 1)
        unread = {columns.column_of(name) for name in ways if columns.ANSWERS.search(name)}
        if fails:
            self._nothing_earns(tried, f"{cut(answers[0], 60)} ({way})", bool(is_answer))
        elif unread and not in_use:
            names = ", ".join(sorted(unread))
            self.add("reads no answer", "warning", f"no reward reads a column; there are {names}")
        else:
            names = ", ".join(in_use) or "none is read"
            self.add("no reference", "note", f"no column is the answer as such ({names}); {most}")

    def _nothing_earns(self, tried: int, example: str, is_answer: bool) -> None:
        """Add the finding that no right answer earns more than another row's.

        Args:
            tried: How many ways to write an answer were tried.
            example: An answer, and the column that it is from.
            is_answer: Whether this column must hold answers; if not, it is no reason to stop.
        """
        scorer = self.scorer
        evidence = (
            f"no way was found in which an answer earns more than another row's; {tried} were "
            f"tried, such as {example}"
        )
        each = [filter(columns.ANSWERS.search, columns_of(f, scorer.columns)) for f in scorer.funcs]
        several = next((names for names in map(list, each) if len(names) > 1), "")
        # A right answer may be made of several, in a way of its own.
        evidence += f"; a reward reads {several}" if several else ""
        totals = (np.nan_to_num(scorer.all_scores()) * scorer.weights).sum(axis=1)
        evidence += f"; what was tried earns {totals.min():.3g}"
        evidence += f" to {totals.max():.3g}" if np.ptp(totals) > TIE else ", all of it"
        if (scorer.weights < 0).any():
            name = scorer.names[int(scorer.weights.argmin())]
            evidence += f"; the weight of {name} is negative"
        self.add("nothing earns", "stop" if is_answer and not several else "warning", evidence)

    def _programs(self, known: bool = False) -> bool:
        """Test empty programs; return False if no program is asked for, or no reward runs programs.

        Set `known` if a right program is known, but earns no more than a wrong one.
        """
        strings = [text for func in self.scorer.funcs for text in strings_of(func)]
        strings = [text for text in strings if programs.HEAD.fullmatch(text.strip())]
        tests = programs.tests_of(self.scorer.rows[0])
        task = programs.asked([prompt_text(self.scorer.rows[0]), *strings])
        task = task or programs.tested(tests)
        trials = programs.trials(self.scorer, task) if task else []
        for finding in trials[known:]:
            self.add(*finding)
        if trials:
            self._cheats(task, tests)
            self._endless(programs.fenced, 0, task)
        return bool(trials)

    def _cheats(self, task: programs.Task, tests: Any) -> None:
        """Add a finding if a program that solves nothing passes tests that an empty one fails."""
        if not tests:
            return
        self.executed = amounts.runs_here(self.scorer, programs.fenced, 0)
        texts = {n: programs.fenced(p) for n, p in cheats(task, tests, self.executed).items()}
        empty = programs.fenced(task.program("raise ValueError"))
        earned = self.scorer.totals([(0, text) for text in (*texts.values(), empty)])
        best = int(earned[:-1].argmax())
        if earned[best] > earned[-1] + TIE:
            name, text = list(texts.items())[best]
            evidence = f"{name} earns {earned[best]:.3g}, a program that fails {earned[-1]:.3g}: "
            self.add("program", "stop", evidence + cut(text))

    def _endless(self, write: Callable[[str], str], row: int, task: programs.Task | None) -> None:
        """Add a finding if a program that never ends is not stopped."""
        if task is None or any(check.name.endswith(": hangs") for check in self.checks):
            return
        pairs = [(row, write(task.program(body))) for _, body in programs.BODIES.values()]
        pairs += [(row, self.written.right(row))] if self.paid else []
        if late := programs.endless(self.scorer, pairs, write):
            self.add("hangs", *late)

    def _hollow(self, should_differ: bool) -> str:
        """Add findings on texts without content, and return which of them earns most.

        This is for rows on which no right answer is known.

        Args:
            should_differ: Whether it is a fault if all such texts earn the same.
        """
        scorer = self.scorer
        requests = written.asked_forms([prompt_text(row) for row in scorer.rows[:3]])
        texts = ["", "so it is " * 3, "1", "<a></a>"]
        texts += [written.fill(form, "1", "so it is") for form in requests[:3]]
        count, words = len(texts), scorer.words
        texts.append(("so it is " * self.longest)[: self.longest])
        texts += source.stuffed(words, "\n").values() if words else ()
        rows = range(1 if scorer.any_slow else min(GROUP, len(scorer.rows)))
        pairs = [(row, text) for text in texts for row in rows]
        earned = scorer.totals(pairs).reshape(-1, len(rows)).mean(axis=1)
        best, most = int(earned.argmax()), earned[:count].max()
        evidence = f"{cut(texts[best])} earns {earned[best]:.3g}"
        subject = "every text without content"
        if best >= count and earned[best] > most + TIE:
            name = "length" if best == count else source.FAMILY
            more = f"{evidence}, other text without content at most {most:.3g}"
            self.add(name, "warning", more)
            subject = "every other text without content"
        if best == 0 and most > TIE:
            self.add("nothing written", "warning", f"{evidence}, as much as anything tried")
        if should_differ and not np.ptp(earned[: count + 1]):
            self.add("constant", "stop", f"{subject} earns {most:.3g}")
        return f"without content, {evidence}"

    def _with_reference(self) -> None:
        """Find the rewards' roles, score right answers, and attack the rewards."""
        scorer, style = self.scorer, self.written
        rows = amounts.affordable_rows(scorer, style)
        earnings = amounts.measure(scorer, style, rows)
        if not earnings.rows:  # no right answer could be scored; the fault says why
            return None
        if (places := np.flatnonzero(earnings.gap > TIE)).size:  # on others anything wins
            earnings = earnings.of(places)
        self.paid = earnings
        self.roles = part = amounts.roles(scorer, style, earnings, self.correct)
        gap = earnings.gap
        if not (gap > TIE).any():
            total = earnings.right.sum(axis=1).mean()
            evidence = f"the right answer earns {total:.3g}, a wrong one as much"
            self._programs(known=True)
            return self.add("nothing earns", "stop", evidence)
        for number in set(part.reversed) - self.unsteady:
            more = (earnings.wrong - earnings.right)[:, number].mean()
            evidence = f"a wrong answer earns {more:.3g} more"
            self.add("sign", "stop", evidence, number)
        self.executed = amounts.runs_here(scorer, style.write, rows[0])
        if odd := re.search(r"[^\n\t -\uffff]|\\n(?![a-z])", style.form):
            evidence = f"a right answer is paid only with {odd[0]!r} in it"
            self.add("odd character", "stop", f"{evidence}: {cut(style.right(rows[0]))}")
        if self.executed:
            self.add("runs here", "warning", "a completion's code ran in this process")
        self.results = self._attacked(earnings, part)
        self.checks += amounts.findings(self.results, scorer.names, part)
        self._endless(style.write, rows[0], programs.asked([style.answers[rows[0]]]))
        self._whole()
        self._other_column()
        self._prompts_form()
        self._references()

    def _attacked(self, earnings: amounts.Earned, part: amounts.Roles) -> list[amounts.Result]:
        """Return the results of all attacks, with those lowered that may be chance."""
        results = amounts.attack_all(self.every_attack(), earnings, part)
        for place, each in enumerate(results):
            if each.attack.kind == "honest" and each.payer in self.unsteady:
                results[place] = each._replace(level="")
        if (total := earnings.right.sum(axis=1).mean()) < -TIE:  # it may be written otherwise
            evidence = f"the right answer, as it was found, earns {total:.3g} itself"
            self.add("nothing earns", "warning", evidence)
            results = [each._replace(level=each.level and "warning") for each in results]
        return results

    def _whole(self) -> None:
        """Add a warning if the form alone earns more than a right answer adds to it."""
        if not self.written.own and not written.MARK.search(self.written.form):
            return
        least = self.paid.wrong
        if not self.scorer.any_slow:  # another row's answer may be near the right one
            other = {row: columns.changed(self.written.answers[row]) for row in self.paid.rows}
            pairs = [(row, self.written.write(text)) for row, text in other.items()]
            least = np.minimum(least, self.scorer.payments(pairs))
        each = (least - self.paid.empty).mean(axis=0)
        form, gain = each.sum(), self.paid.gap.mean()
        if form > gain * 1.02 + TIE:
            evidence = (
                f"a wrong answer in the form earns {form:.3g} more than nothing, and a right one "
                f"only {gain:.3g} more than that"
            )
            most = int(each.argmax())
            evidence += f"; `{self.scorer.names[most]}` pays {each[most]:.3g} of it"
            self.add("form outweighs", "warning", evidence)

    def _other_column(self) -> None:
        """Find out whether a column from the prompt is paid while the column of answers is not."""
        scorer, style, rows = self.scorer, self.written, self.paid.rows
        column = columns.column_of(style.source)
        others = [n for n in scorer.columns if ANSWER.fullmatch(n) and n != column]
        is_own = column in scorer.columns and not columns.ANSWERS.search(column)
        if not is_own or not _in_prompts(scorer, style.answers):
            return
        if not others:
            evidence = f"`{column}` is taken for the right answer, and stands in the prompt"
            return self.add("in the prompt", "note", evidence)
        pairs = [(row, style.write(f"{scorer.rows[row][others[0]]}")) for row in rows]
        is_paid = scorer.totals(pairs) > self.paid.wrong.sum(axis=1) + TIE
        if not is_paid.any():
            evidence = (
                f"`{column}`, which stands in the prompt, is what is paid; `{others[0]}` is not"
            )
            self.add("other column", "warning", evidence)

    def _prompts_form(self) -> None:
        """Find out whether right answers are paid in the form that the prompts ask for."""
        scorer, style, row = self.scorer, self.written, self.paid.rows[0]
        prompts = [prompt_text(scorer.rows[n]) for n in self.paid.rows[:3]]
        requests = written.asked_forms(prompts)
        if not written.answer_mark(style.form):  # tags may stand around data, too
            requests = [f for f in requests if written.ANSWERS.search(written.answer_mark(f))]
        if style.own or not requests or written.is_asked(style.form, prompts):
            return
        pairs = [(row, written.fill(f, style.answers[row], style.reasoning)) for f in requests]
        earned = scorer.payments(pairs)[:, self.roles.right].sum(axis=1)
        wrong = self.paid.wrong[0, self.roles.right].sum()
        if earned.max() <= wrong + TIE and scorer.failed.isdisjoint(pairs):
            evidence = (
                f"the prompts ask for {requests[0]!r}, in which a right answer earns no more than "
                f"a wrong one; the rewards read {style.form!r}"
            )
            both = any(written.answer_mark(form) in style.form for form in requests)
            both = both and not written.OF_CHATS.search(style.form)  # no completion has these
            self.add("form not read", "warning" if both else "stop", evidence)

    def _references(self) -> None:
        """Score the right answers of many rows, and test rows without an answer."""
        scorer, style = self.scorer, self.written
        each = float(scorer.each.sum())
        count = int(np.clip(0.2 / max(2 * each, 1e-9), 4, REFERENCE_ROWS))
        numbers = list(style.answers)[:count]
        own, other = ([(n, way(n)) for n in numbers] for way in (style.right, style.wrong))
        every = [*own, *other]
        totals = scorer.totals(every)
        losers = self._losers(every, totals)
        if not scorer.any_slow:
            self._any_answer(numbers, totals[: len(numbers)])
        if 0 < len(losers) <= FEW:  # a reward may have missed a time limit of its own
            again = self._losers(every, scorer.totals_again(every))
            losers = [row for row in losers if row in again]
        if losers:
            state = "stop" if len(losers) > len(numbers) / 2 else "warning"
            answer = cut(style.answers[losers[0]], 60)
            evidence = f"on {len(losers)} of {len(numbers)} rows, such as {answer}, the right "
            evidence += "answer earns no more than another row's"
            self.add("reference loses", state, evidence)
        self._empty_references()

    def _any_answer(self, rows: Sequence[int], earned: np.ndarray) -> None:
        """Find rows on which a word without meaning earns as much as the right answer.

        Args:
            rows: The numbers of rows.
            earned: What their right answers earn.
        """
        texts = [(row, self.written.write("xyz")) for row in rows]
        is_won = self.scorer.totals(texts) > earned - TIE
        is_won &= earned > earned.max() - self.paid.gap.mean() / 2
        won = [row for row, each in zip(rows, is_won, strict=True) if each]
        if len(won) > 1:
            answers = " and ".join(cut(self.written.answers[row], 30) for row in won[:2])
            evidence = f"on {len(won)} of {len(rows)} rows, such as {answers}, "
            evidence += f"{cut(texts[0][1])} earns as much as the right answer"
            self.add("any answer", "warning", evidence)

    def _losers(self, pairs: Sequence[scoring.Pair], totals: np.ndarray) -> list[int]:
        """Return the rows whose right answer earns no more than their wrong answer.

        The first half of `pairs` holds the right answers, and the second half the wrong ones. If
        both answers of a row are paid in full, both are right, and the row is left out.
        """
        count = len(pairs) // 2
        full = totals[:count].max() - self.paid.gap.mean() / 2
        each = zip(pairs[:count], pairs[count:], totals[:count], totals[count:], strict=True)
        failed = self.scorer.failed
        return [p[0] for p, q, a, b in each if a <= b + TIE and a < full and not {p, q} & failed]

    def _empty_references(self) -> None:
        """Find out whether a row without an answer pays an arbitrary answer in full."""
        scorer, style, right = self.scorer, self.written, self.roles.right
        column = columns.column_of(style.source)
        texts = {n: str(row[column]).strip() for n, row in enumerate(scorer.rows) if column in row}
        empty = [number for number, text in texts.items() if text in ("", "None")]
        if not empty or not right:
            return
        wrong = next(iter(style.answers.values()))
        pairs = [(empty[0], text) for text in (style.write(wrong), wrong, "")]
        earned = scorer.payments(pairs)[:, right].sum(axis=1)
        best, full = int(earned.argmax()), self.paid.right[:, right].sum(axis=1).mean()
        if earned[best] >= 0.99 * full > 0:
            where = f"on {_count(len(empty), 'row')} without an answer"
            evidence = f"{cut(pairs[best][1])} earns {earned[best]:.3g} {where}"
            self.add("empty reference", "stop", evidence)

    def _unsaid(self) -> None:
        """Find rewards that gave many completions no score, or gave all the same score."""
        table = self.scorer.all_scores()
        # A reward for rows of one task may leave those of another to the others.
        is_lost, size = np.isnan(table).all(axis=1).any(), len(table)
        for number, scores in enumerate(table.T if size else ()):
            values, share = scores[~np.isnan(scores)], np.isnan(scores).mean()
            if share == 1 or (share > 0.3 and is_lost):
                state = "stop" if share == 1 else "warning"
                self.add("None", state, f"None for {share:.0%} of {size} completions", number)
            elif self.roles and np.ptp(values) < 1e-9 and number not in self.roles.right:
                evidence = f"{values[0] + 0:.3g} for all {len(values)} completions that were tried"
                self.add("constant", "warning", evidence, number)

    def _score_sampled(self) -> None:
        """Find out whether the totals of sampled completions differ, or exceed the reference's."""
        if not self.sampled:
            return
        groups: dict[int, list[float]] = {}
        for (number, _), total in zip(self.sampled, self.scorer.totals(self.sampled), strict=True):
            groups.setdefault(number, []).append(total)
        if len(self.sampled) > len(groups) and all(np.ptp(each) < TIE for each in groups.values()):
            evidence = f"on each of {_count(len(groups), 'prompt')}, all have the same total"
            self.add("sampled completions", "warning", evidence)
        pairs = [pair for pair in self.sampled if self.paid and pair[0] in self.written.answers]
        right = self.scorer.totals([(row, self.written.right(row)) for row, _ in pairs])
        extra = self.scorer.totals(pairs) - right
        if extra.size and (extra > MARGIN * np.abs(right) + TIE).mean() > 0.5:
            (row, text), most = pairs[int(extra.argmax())], extra.max()
            evidence = f"{cut(text)} earns {most:.3g} more than the right answer that was found, "
            evidence += f"{cut(self.written.right(row))}: is it right, too?"
            self.add("above the reference", "note", evidence)

    def verdict(self, seconds: float) -> RewardVerdict:
        """Return the verdict, with the worst findings first."""
        order = ("stop", "warning", "note")
        checks = sorted(self.checks, key=lambda check: order.index(check.state))
        names, part, earned, style = self.scorer.names, {}, {}, self.written
        if self.roles:
            for role in self.ROLES:
                part |= {names[number]: role for number in getattr(self.roles, role)}
            means = {
                "the right answer": self.paid.right,
                "another row's answer": self.paid.wrong,
                "an empty completion": self.paid.empty,
            }
            earned = {title: float(each.sum(axis=1).mean()) for title, each in means.items()}
        reference = style.right(self.paid.rows[0]) if self.paid else ""
        lines = amounts.table(self.results, names)
        return RewardVerdict(
            Checks(checks), part, reference, style.form if style else "", lines, earned,
            len(self.scorer.rows), seconds,
        )  # fmt: skip


def _in_prompts(scorer: Scorer, answers: dict[int, str]) -> bool:
    """Return whether prompts contain their own row's answer, but mostly not another row's."""
    others = columns.others_of(answers)
    prompts = {number: prompt_text(scorer.rows[number]) for number in answers}
    own = sum(text in prompts[number] for number, text in answers.items())
    other = sum(others[number] in prompts[number] for number in answers)
    return own >= 0.9 * len(answers) and other < 0.5 * len(answers)


def _functions(reward_funcs: Any) -> list[Callable[..., Any]]:
    """Return the rewards as a list.

    Raises:
        ValueError: There is no reward, or one cannot be called.
    """
    funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for func in funcs:
        if not callable(func) or isinstance(func, type) or hasattr(func, "parameters"):
            raise ValueError(
                f"reward_funcs holds {func!r:.80}, which is not a reward function: leave out "
                "reward models, and give functions of `completions` that return a list of scores"
            )
    if not funcs:
        raise ValueError("reward_funcs is empty: give the rewards that GRPOTrainer gets")
    return funcs


def _setting(args: Any, name: str) -> Any:
    return args.get(name) if isinstance(args, dict) else getattr(args, name, None)


def _weights(reward_weights: Sequence[float] | None, args: Any, count: int) -> np.ndarray:
    """Return the weights as an array.

    Raises:
        ValueError: There is not one finite weight for each reward.
    """
    weights = reward_weights if reward_weights is not None else _setting(args, "reward_weights")
    array = np.ones(count) if weights is None else np.array(list(weights), dtype=float)
    if len(array) != count or not np.isfinite(array).all():
        raise ValueError(f"reward_weights = {weights}: give one number for each of {count} rewards")
    return array


def _longest(args: Any) -> int:
    tokens = _setting(args, "max_completion_length") or CAP
    return int(min(tokens, 4096)) * CHARACTERS


def _numbers(correct: Any, scorer: Scorer) -> list[int]:
    """Return the numbers of the rewards that `correct` names.

    Raises:
        ValueError: An entry of `correct` is neither a reward of the set nor the name of one.
    """
    choice = [] if correct is None else correct
    choice = list(choice) if isinstance(choice, list | tuple) else [choice]
    numbers = []
    for each in choice:
        places = [n for n, f in enumerate(scorer.funcs) if f is each or scorer.names[n] == each]
        if not places:
            raise ValueError(f"correct = {each!r:.80} is none of {', '.join(scorer.names)}")
        numbers += places
    return numbers


def _texts(completions: Sequence[Any] | None, rows: int) -> list[tuple[int, str]]:
    """Return (number of the row, text) of each sampled completion; a row has one or a group.

    Raises:
        ValueError: `completions` has more entries than there are rows.
    """
    from grpo_nb.rewards.prompts import completion_text

    if completions is not None and len(completions) > rows and rows < scoring.READ_ROWS:
        raise ValueError(
            f"completions has {len(completions)} entries, and dataset {_count(rows, 'row')}: give "
            "one list for each row, in the order of the rows, with all that was sampled for it"
        )
    pairs = []
    for number, each in enumerate((completions or ())[:rows]):
        is_one = isinstance(each, str) or (each and isinstance(each[0], dict))
        pairs += [(number, completion_text(one)) for one in ([each] if is_one else each)]
    return pairs
