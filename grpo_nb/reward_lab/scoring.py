"""Call rewards as TRL's GRPOTrainer calls them, on any completions, and remember the scores."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import copy, deepcopy
from io import StringIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.reward_lab.source import accepted, mentions, missing_columns, words_of
from grpo_nb.rewards.calls import TookTooLong, run
from grpo_nb.rewards.contract import unwrapped
from grpo_nb.rewards.judge import LLMJudge
from grpo_nb.rewards.prompts import message_text

TRLS_ROW = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass to rewards
READ_ROWS = 256  # rows of the dataset that are looked at
SECONDS = 4.0  # limit of one call, plus SECONDS_EACH for each completion
SECONDS_EACH = 0.5
SLOW = 0.004  # seconds a completion
TIE = 1e-6  # totals that are this close differ only by rounding
FIRST, FIRST_ROWS = ("1", "so it is. "), 3  # the texts that are scored before anything else
ALL_BUT, PATIENCE = 0.8, 8  # share of the limit below which a late call is repeated; limit's factor
LONG = 400  # characters of a quotation that says how long it is
IN_FAILURES = 10.0  # seconds of calls that fail, such as a judge's, after which no more are made
SCHEDULER = Path("/proc/thread-self/schedstat")  # nanoseconds: on a processor, waiting for it
Pair = tuple[int, str]  # the number of a row, and a completion's text
Row = dict[str, Any]


class Fault(NamedTuple):
    """Describe a call that failed: the rule that it breaks, and what was observed."""

    rule: str
    evidence: str


def read_rows(dataset: Any, count: int = READ_ROWS) -> list[Row]:
    """Return the first rows of a dataset.

    Args:
        dataset: A list of rows, a `datasets.Dataset`, IterableDataset or DatasetDict (its "train"
            part), or a pandas DataFrame.
        count: The largest number of rows.

    Raises:
        ValueError: There are no rows, or they are not mappings.
    """
    if hasattr(dataset, "to_dict") and hasattr(dataset, "iloc"):  # a DataFrame
        dataset = dataset.iloc[:count].to_dict("records")
    if isinstance(dataset, Mapping):
        dataset = dataset.get("train", next(iter(dataset.values()), []))
    rows = list(islice(dataset, count))
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"dataset = {dataset!r:.80} holds no rows: give the train_dataset of GRPOTrainer, or a "
            'list such as [{"prompt": …, "answer": …}]'
        )
    return [dict(row) for row in rows]


def chats(dataset: Any, count: int = 10**9) -> list[Row]:
    """Return the first rows of a dataset, as `read_rows` does; their prompts must be chats.

    Raises:
        ValueError: A prompt is missing, or is a text and not a chat.
    """
    rows = read_rows(dataset, count)
    for prompt in (row.get("prompt") for row in rows):
        if prompt is None or isinstance(prompt, str):
            raise ValueError(
                f"the prompt {prompt!r:.60} is not a chat: write "
                '[{"role": "user", "content": …}], as the model is asked in training'
            )
    return rows


def names_of(reward_funcs: Sequence[Any]) -> list[str]:
    """Return the rewards' names as TRL logs them, made distinct by numbers."""
    names: list[str] = []
    for func in map(unwrapped, reward_funcs):
        name = getattr(func, "__name__", type(func).__name__)
        number = sum(each == name or each.startswith(f"{name}#") for each in names)
        names.append(f"{name}#{number + 1}" if number else name)
    return names


class Scorer:
    """Score completions with every reward, and each distinct completion of a row only once.

    Args:
        reward_funcs: The rewards, in TRL's shape.
        rows: Dataset rows.
        tokenizer: The tokenizer for `completion_ids`, which are made only for rewards that read
            them; if it is None, each word is a token.
        weights: One weight for each reward; None for 1.

    Attributes:
        faults: {number of a reward: its first fault}.
        failed: The pairs on which a reward failed; their totals mean nothing.
        first: The pairs of the first call; see `begin`.
        grouped: Numbers of the rewards that compare the completions of a batch. Such a reward
            scores each completion in one batch with those of its row in `beside`.
        beside: {row: its honest completions}: the right answer, a wrong one, an empty completion,
            and a wrong answer with the reasoning that earns most.
        group: Number of completions that a prompt has in training.
        copies: For each reward, how often a batch has each completion: `group` times if the reward
            takes only whole groups, else once.
    """

    def __init__(
        self,
        reward_funcs: Sequence[Callable[..., Any]],
        rows: Sequence[Row],
        tokenizer: Any = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.funcs, self.names = list(reward_funcs), names_of(reward_funcs)
        self.rows, self.tokenizer = list(rows), tokenizer
        self.weights = np.ones(len(self.funcs)) if weights is None else np.array(weights, float)
        self.columns = [name for name in rows[0] if name not in TRLS_ROW]
        self.faults: dict[int, Fault] = {}
        self.failed: set[Pair] = set()
        self.grouped: set[int] = set()
        self.beside: dict[int, list[str]] = {}
        self.group, self.copies = 8, [1] * len(self.funcs)
        self.in_failures = np.zeros(len(self.funcs))
        self.seconds = np.zeros(len(self.funcs))
        self.calls = np.zeros(len(self.funcs))
        self.longest = np.zeros(len(self.funcs))
        self.first: list[Pair] = []
        self._kept: list[dict[Pair, float]] = [{} for _ in self.funcs]
        self._taken = [accepted(func) for func in self.funcs]
        self._ids = [mentions(func, "completion_ids") for func in self.funcs]
        self._state = [mentions(func, "trainer_state") for func in self.funcs]

    def scores(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return the raw scores, [pairs, rewards]; NaN for None and where a reward failed."""
        for number in range(len(self.funcs)):
            memory = self._kept[number]
            fresh = [pair for pair in dict.fromkeys(pairs) if pair not in memory]
            if number in self.grouped:
                for row, text in fresh:
                    group = [(row, text), *((row, other) for other in self.beside.get(row, []))]
                    memory[row, text] = self.safe(number, group)[0]
            elif fresh:
                memory.update(zip(fresh, self.safe(number, fresh), strict=True))
        table = [[memory[pair] for memory in self._kept] for pair in pairs]
        return np.array(table, dtype=float).reshape(-1, len(self.funcs))

    def has(self, pair: Pair) -> bool:
        """Return whether all rewards have scored a completion."""
        return all(pair in memory for memory in self._kept)

    def payments(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return what each reward adds to the total, [pairs, rewards]; None counts as 0."""
        return np.nan_to_num(self.scores(pairs) * self.weights)

    def totals(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return the weighted totals, [pairs]."""
        return self.payments(pairs).sum(axis=1)

    def totals_again(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return the weighted totals after another call of each reward, [pairs]."""
        scores = [self.safe(number, pairs) for number in range(len(self.funcs))]
        return (np.nan_to_num(scores).T * self.weights).sum(axis=1)

    def compared(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return what completions and the four of `beside` on their row earn, [5, pairs, rewards].

        Rewards that compare a batch get all five at once. If a reward fails on the empty completion
        or the one with the longer reasoning, the payments for the wrong answer are used instead.
        """
        groups = [[text, *self.beside[row]] for row, text in pairs]
        each = [
            (row, texts[n]) for n in range(5) for (row, _), texts in zip(pairs, groups, strict=True)
        ]
        table = self.payments(each).reshape(5, len(pairs), len(self.funcs))
        for number in self.grouped:
            for place, (row, _) in enumerate(pairs):
                group = self.safe(number, [(row, text) for text in groups[place]])
                table[:, place, number] = np.nan_to_num(group) * self.weights[number]
        has_failed = np.array([pair in self.failed for pair in each], bool).reshape(5, -1, 1)
        table[3:] = np.where(has_failed[3:], table[2], table[3:])
        return table

    def begin(self) -> None:
        """Make the first call of each reward, whose time is ignored because it includes imports.

        The scores of this call show later whether a reward remembers earlier calls.
        """
        rows = range(min(FIRST_ROWS, len(self.rows)))
        self.first = [(row, text) for row in rows for text in FIRST]
        self.scores(self.first)
        self.seconds[:], self.calls[:] = 0, 0

    def takes_groups(self, number: int, pairs: Sequence[Pair]) -> bool:
        """Return whether a reward works on whole groups; if it does, give it whole groups only.

        The reward is called on the pairs in two orders, with copies of each completion.
        """
        if self.copies[number] > 1 or isinstance(self.funcs[number], LLMJudge):
            return False
        self.copies[number] = self.group
        try:
            first, again = self.call(number, pairs), self.call(number, pairs[::-1])[::-1]
            is_steady = bool(np.allclose(first, again, atol=TIE, equal_nan=True))
        except Exception:  # of a user's reward: it fails on whole groups as well
            is_steady = False
        self.copies[number] = self.group if is_steady else 1
        return is_steady

    def is_slow(self, number: int) -> bool:
        """Return whether a reward takes so long that it is called as rarely as possible."""
        if isinstance(self.funcs[number], LLMJudge):
            return True
        return bool(self.each[number] > SLOW)

    @property
    def any_slow(self) -> bool:
        """Return whether one of the rewards is slow."""
        return any(map(self.is_slow, range(len(self.funcs))))

    @property
    def words(self) -> list[str]:
        """Return the texts that the rewards' code looks for; [] if a reward is slow."""
        names = [*self.columns, *self.names]
        return [] if self.any_slow else words_of(self.funcs, names)

    @property
    def each(self) -> np.ndarray:
        """Return the seconds per completion of each reward, [rewards].

        Each is the mean time, or the time of a right completion if that is long and above the mean.
        """
        return np.maximum(self.seconds / np.maximum(self.calls, 1), self.longest)

    def retime(self, pair: Pair) -> None:
        """Measure how long each reward takes for a right completion, and store long times.

        Some rewards run a program only if the completion is right.
        """
        for number in range(len(self.funcs)):
            if isinstance(self.funcs[number], LLMJudge) or number in self.faults:
                continue
            times = []
            for _ in range(2):  # the first time may be another process's
                start = self.seconds[number]
                self.safe(number, [pair])
                times.append(self.seconds[number] - start)
            self.longest[number] = min(times) if min(times) > SLOW else 0.0

    def all_scores(self) -> np.ndarray:
        """Return the scores of all completions that every reward has scored, [pairs, rewards]."""
        return self.scores([p for p in self._kept[0] if self.has(p) and p not in self.failed])

    def forget(self, number: int) -> None:
        """Forget a reward's scores, for example when it turns out to compare completions."""
        self._kept[number] = {}

    def safe(self, number: int, pairs: Sequence[Pair]) -> list[float]:
        """Score a batch without raising an error; a completion has NaN if the reward fails on it.

        The completions on which the reward fails are found by halving the batch, and recorded.
        """
        is_slow = number in self.faults and self.faults[number].rule == "slow"
        is_spent = number in self.faults and self.in_failures[number] > IN_FAILURES
        if is_slow or is_spent:  # it is not waited for again
            self.failed.update(pairs)
            return [np.nan] * len(pairs)
        start = time.monotonic()
        try:
            return self.call(number, pairs)
        except Exception as error:  # a user's reward may raise anything
            self.in_failures[number] += time.monotonic() - start
            if isinstance(error, TookTooLong) or len(pairs) == 1:
                if number not in self.faults:
                    if not isinstance(error, TookTooLong) and self.takes_groups(number, pairs):
                        return self.call(number, pairs)
                    self.faults[number] = self._fault(number, error, pairs)
                self.failed.update(pairs)
                return [np.nan] * len(pairs)
            whole = Fault("raises", f"a batch of {len(pairs)} fails, its halves pass")
            whole = Fault(error.rule, str(error)) if isinstance(error, _Misfit) else whole
        half, copies = len(pairs) // 2, self.copies[number]
        scores = self.safe(number, pairs[:half]) + self.safe(number, pairs[half:])
        if copies == self.copies[number]:  # else it was no whole group
            self.faults.setdefault(number, whole)
        return scores

    def _fault(self, number: int, error: Exception, pairs: Sequence[Pair]) -> Fault:
        row, text = pairs[0]
        message = f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]
        if isinstance(error, TookTooLong):
            return Fault("slow", f"it took too long on {cut(text)}")
        if isinstance(error, _Misfit):
            return Fault(error.rule, str(error))
        absent = missing_columns(self.funcs[number], self.columns)
        key = error.args[0] if isinstance(error, KeyError) and error.args else ""
        absent += [key] if isinstance(key, str) and key and key not in self.columns else []
        if isinstance(error, NameError | ImportError):
            return Fault("undefined", message)
        if absent:
            return Fault("missing column", f"it reads {absent[0]!r}; the rows have {self.columns}")
        is_text = isinstance(self.rows[row].get("prompt"), str)
        types = ("str",) if is_text else ("list", "dict")
        value = re.search(r"'(\w+)' object", message)  # it may be a column's
        if (not value or value[1] in types) and self._runs(number, pairs[:1], is_other=True):
            have, want = ("text", "messages") if is_text else ("messages", "text")
            return Fault("wrong type", f"{message}: completions are {have}, it reads {want}")
        is_ever = any(self._runs(number, [(row, other)]) for other in ("", *FIRST))
        return Fault("raises", f"{message} on {cut(text) if is_ever else 'every text tried'}")

    def _runs(self, number: int, pairs: Sequence[Pair], is_other: bool = False) -> bool:
        """Return whether the reward raises no error; if `is_other`, on chats instead of texts.

        In the same way, chats are replaced by texts.
        """
        scorer = copy(self)
        if is_other:
            other = [{**row, "prompt": _other_prompt(row.get("prompt", ""))} for row in self.rows]
            scorer.rows = other
        try:
            scorer.call(number, pairs)
        except Exception:  # a user's reward may raise anything
            return False
        return True

    def call(
        self,
        number: int,
        pairs: Sequence[Pair],
        seed: str = "",
        limit: float = 0.0,
        patient: bool = True,
    ) -> list[float]:
        """Call one reward as TRL does, and return its unweighted scores; its errors are raised.

        The call may take `limit` seconds; by default, the limit grows with the batch. A `patient`
        call is repeated if it was late because other processes had the processor.
        """
        copies = self.copies[number]
        arguments = self.arguments(number, pairs)
        limit, start = limit or SECONDS + SECONDS_EACH * len(pairs), clock()
        with silent():
            try:
                scores = run(self.funcs[number], limit, arguments, seed)
            except TookTooLong:
                if not patient or clock() - start > limit * ALL_BUT:
                    raise
                start = clock()  # other processes took the time: once more, with patience
                scores = run(self.funcs[number], limit * PATIENCE, arguments, seed)
        self.seconds[number] += clock() - start
        self.calls[number] += len(pairs)
        if len(scores) != copies * len(pairs):
            count = copies * len(pairs)
            raise _Misfit("wrong length", f"{len(scores)} scores for {count} completions")
        each = np.array([_number(score) for score in scores]).reshape(-1, copies)
        if not np.isclose(each, each[:, :1], atol=TIE, equal_nan=True).all():
            raise _Misfit("order", "copies of one completion earn different scores in their group")
        return each[:, 0].tolist()

    def arguments(self, number: int, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return the keyword arguments with which TRL would call a reward on these completions.

        A reward that takes only whole groups gets copies of each completion, side by side.
        """
        pairs = [pair for pair in pairs for _ in range(self.copies[number])]
        rows = [self.rows[row] for row, _ in pairs]
        columns = {name: [_copied(row.get(name)) for row in rows] for name in self.columns}
        prompts = [_copied(row.get("prompt", "")) for row in rows]
        texts = [text for _, text in pairs]
        columns["prompts"] = prompts
        columns["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns["completion_ids"] = self._tokens(texts) if self._ids[number] else [[0]] * len(texts)
        columns["trainer_state"] = _trainer_state() if self._state[number] else None
        columns |= {"log_extra": ignore, "log_metric": ignore}
        names = self._taken[number]
        return columns if names is None else {k: v for k, v in columns.items() if k in names}

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        if self.tokenizer is None:
            return [[1] * len(text.split()) for text in texts]
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)  # inside a processor
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def clock() -> float:
    """Return seconds that go by only while this thread runs or waits for something.

    Time in which another process holds this thread's processor is not counted (Linux reports it),
    so that no reward looks slow only because the machine is busy.
    """
    try:
        waiting = int(SCHEDULER.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # another system
        waiting = 0.0
    return time.perf_counter() - waiting


@contextmanager
def silent() -> Iterator[None]:
    """Hide what rewards print and log, because they are called hundreds of times here."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(level)


class _Misfit(ValueError):
    """Report a return value that is not a list of numbers, one for each completion."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


def _number(score: Any) -> float:
    """Return a score as a number; None, which TRL takes for "no score", as NaN.

    Raises:
        ValueError: The score is NaN, infinite, or not a number.
    """
    if score is None:
        return float("nan")
    try:
        number = float(score)
    except (TypeError, ValueError):
        raise _Misfit("no number", f"a score is {score!r:.80}") from None
    if not np.isfinite(number):
        raise _Misfit("not finite", f"a score is {number}")
    return number


def cut(text: str, length: int = 120) -> str:
    """Return a text in quotes, shortened in the middle so that both ends can be read."""
    if len(text) <= length:
        return repr(text)
    size = f" ({len(text):,} characters)" if len(text) > LONG else ""
    return repr(f"{text[: length - 45]} … {text[-40:]}") + size


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the text of a row's prompt, all turns of a chat."""
    prompt = row.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message_text(turn) for turn in prompt if isinstance(turn, Mapping))


def _other_prompt(prompt: Any) -> Any:
    """Return a text as a chat, and a chat as a text."""
    is_text = isinstance(prompt, str)
    return [{"role": "user", "content": prompt}] if is_text else prompt_text({"prompt": prompt})


def _copied(value: Any) -> Any:
    """Return a copy of a value that a reward might change."""
    return deepcopy(value) if isinstance(value, list | dict) else value


def _trainer_state() -> Any:
    """Return a trainer's state before its first step, without importing transformers for it."""
    state = {"epoch": 0.0, "global_step": 0, "max_steps": 100, "num_train_epochs": 1}
    if callback := sys.modules.get("transformers.trainer_callback"):
        return callback.TrainerState(**state)
    return SimpleNamespace(**state, log_history=[], is_world_process_zero=True, best_metric=None)


def ignore(*_: Any, **__: Any) -> None:
    """Do nothing, in place of TRL's `log_extra` and `log_metric`."""
