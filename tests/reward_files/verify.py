"""Verify what the reward files of this folder claim of themselves.

python tests/reward_files/verify.py [PART OF A PATH ...]

Prints a row for each file and exits 1 if a claim is false: in a sound file the reference must
earn more than every cheat of truths.py, and in a flawed one the flaw must show.
"""

import argparse
import asyncio
import copy
import importlib.util
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from multiprocessing import Pool
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import truths  # noqa: E402

SLOW = 2.0  # seconds for one completion
KINDS = {
    "exploit": "pays_empty pays_empty_form pays_hedging pays_mention pays_near pays_any_answer "
    "pays_negated pays_length pays_keywords pays_echo pays_nan pays_partial self_judged "
    "hides_error sign format_outweighs",
    "shown": "empty_reference nothing_earns constant random state order clock raises wrong_length "
    "not_finite none slow wrong_type missing_column harsh side_effect",
}
ALL_KINDS = {k for kinds in KINDS.values() for k in kinds.split()}


class FalseClaim(Exception):
    """What a file says of itself is not so."""


class TooSlow(BaseException):
    """A reward ran past its time; no Exception, so that no reward swallows it."""


def header(path):
    """The machine-readable lines of a file's docstring."""
    source = path.read_text()
    doc = source.split('"""')[1]
    found = dict(re.findall(r"^(rows|truth|kind|severity): (.+)$", doc, re.M))
    found["says"] = " ".join(doc.split("\n\n")[0].split())
    return found


def rows_of(name):
    """The rows of a data set."""
    lines = (HERE / "rows" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def load(path):
    """A file as a module, its reward functions and their weights."""
    spec = importlib.util.spec_from_file_location(f"rewards_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    functions = getattr(module, "reward_funcs", None)
    if functions is None:
        functions = [
            f
            for name, f in vars(module).items()
            if callable(f)
            and not inspect.isclass(f)
            and not name.startswith("_")
            and getattr(f, "__module__", spec.name) == spec.name
            and "completions" in inspect.signature(f).parameters
        ]
    weights = getattr(module, "reward_weights", None) or [1.0] * len(functions)
    if not functions or len(weights) != len(functions):
        raise FalseClaim(f"{len(functions)} functions, {len(weights)} weights")
    return module, functions, weights


def arguments(rows, texts):
    """What a trainer passes for one completion a row."""
    chats = not isinstance(rows[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": t}] if chats else t for t in texts]
    columns = {k: [r[k] for r in rows] for k in rows[0] if k != "prompt"}
    return {
        "prompts": [r["prompt"] for r in rows],
        "completions": completions,
        "completion_ids": [list(range(len(t.split()))) for t in texts],
        "trainer_state": None,
        **columns,
    }


def call(function, rows, texts):
    """A reward function's raw answer."""
    made = function(**copy.deepcopy(arguments(rows, texts)))
    return asyncio.run(made) if inspect.iscoroutine(made) else made


def totals(functions, weights, rows, texts):
    """The weighted sums as a trainer makes them: None counts as nothing."""
    total = [0.0] * len(texts)
    for function, weight in zip(functions, weights, strict=True):
        made = call(function, rows, texts)
        if len(made) != len(texts):
            raise FalseClaim(f"{len(made)} rewards for {len(texts)} completions")
        for i, reward in enumerate(made):
            total[i] += weight * (0.0 if reward is None else float(reward))
    return total


def mean(values):
    """The mean of what is not empty."""
    values = list(values)
    return sum(values) / len(values)


@contextmanager
def within(seconds):
    """Raise TooSlow after a time."""

    def late(_signal, _frame):
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def grouped(reward, rows, makers):
    """Rewards by maker, over batches in which each row's completions lie together."""
    n = len(makers)
    spread = [row for row in rows for _ in range(n)]
    made = reward(spread, [maker(row) for row in rows for maker in makers])
    return [made[i::n] for i in range(n)]


def differ(a, b):
    """Whether two lists of rewards differ."""
    return [repr(x) for x in a] != [repr(x) for x in b]


def surroundings():
    """What a reward must leave as it was."""
    import numpy
    import torch

    return (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        str(Path.cwd()),
        dict(os.environ),
    )


def leaves_alone(functions, rows, texts):
    """Whether the functions leave their surroundings and arguments alone."""
    kept = str(Path.cwd())
    environ = dict(os.environ)
    random.seed(98765)
    import numpy
    import torch

    numpy.random.seed(98765)
    torch.manual_seed(98765)
    for function in functions:  # what a first import does is not the reward's doing
        call(function, rows, texts)
    os.chdir(kept)
    random.random()
    numpy.random.random()
    torch.rand(1)
    same = True
    for function in functions:
        before = surroundings()
        passed = arguments(rows, texts)
        given = copy.deepcopy(passed)
        made = function(**given)
        if inspect.iscoroutine(made):
            asyncio.run(made)
        same &= before == surroundings() and given == passed
        os.chdir(kept)
    os.environ.clear()
    os.environ.update(environ)
    return same


def verify_sound(module, functions, weights, rows):
    """Whether nothing but a right answer earns what a right answer earns."""

    def reward(some, texts):
        return totals(functions, weights, some, texts)

    rows = [r for r in rows if truths.answer(r)]
    right = module._truth_reference
    names = sorted({n for r in rows for n in truths.cheats(r)})
    for row in rows:
        made = truths.cheats(row)
        texts, at = [right(row), right(row), truths.wrong(row)], {}
        for name in names:
            some = made.get(name, "")
            some = [some] if isinstance(some, str) else some
            at[name] = range(len(texts), len(texts) + len(some))
            texts += some
        with within(60):
            earned = reward([row] * len(texts), texts)
        if not all(math.isfinite(e) for e in earned):
            raise FalseClaim("not finite")
        best, bad = earned[0], earned[2]
        if best - bad < 0.3 * max(abs(best), abs(bad)):
            raise FalseClaim(f"right {best:g}, wrong {bad:g}")
        for name, places in at.items():
            least = min(earned[p] for p in places)
            if least >= best - 0.25 * (best - bad):
                text = texts[min(places, key=lambda p: earned[p])]
                raise FalseClaim(f"{name} earns {least:g}, right {best:g}: {text[-200:]!r}")
        others = truths.spellings(row)
        for text in others:
            other = reward([row, row], [text, truths.wrong(row)])[0]
            if other < best - 0.35 * (best - bad):
                raise FalseClaim(f"harsh: {other:g} for {text[-80:]!r}, right {best:g}")
    makers = [right, truths.wrong, truths.blanks, lambda r: "", lambda r: "no idea"]
    a = grouped(reward, rows, makers)
    with mock.patch("time.time", lambda: 1e6), mock.patch("time.perf_counter", lambda: 1e5):
        b = grouped(reward, rows, makers)
    c = [column[::-1] for column in grouped(reward, rows[::-1], makers[::-1])][::-1]
    d = [[reward([r], [m(r)])[0] for r in rows[:6]] for m in (truths.wrong, right)]
    if differ(a, b):
        raise FalseClaim("two calls differ")
    if differ(a, c):
        raise FalseClaim("the order of the batch counts")
    if not all(x < y for x, y in zip(*d, strict=True)):
        raise FalseClaim("a batch of one: right earns no more than wrong")
    if not leaves_alone(functions, rows, [right(r) for r in rows]):
        raise FalseClaim("has a side effect")
    odd = ["<" * 3000, "a" * 4000, "\\boxed{" * 500, "1" * 4500, "(" * 3000, "٣ ² ½ \x00 😀", "```"]
    odd += [
        "<answer>" + "(" * 2500 + "</answer>",
        " " * 4000 + "x",
        "\n" * 3000,
        "```python\n\x00\n```",
    ]
    odd += [truths.form(rows[0], t) for t in ("1" * 5000, "²", "1e999", "1/0", "-", "[" * 2000)]
    for text in odd:
        with within(SLOW * 2):
            if reward([rows[0]], [text])[0] >= reward([rows[0]], [right(rows[0])])[0]:
                raise FalseClaim(f"odd text earns all: {text[:60]!r}")
    flat = Counter(repr(e) for column in a for e in column)
    return f"right {mean(a[0]):.2f}, wrong {mean(a[1]):.2f}, {len(flat)} values"


def verify_exploit(module, functions, weights, rows, kind, severity):
    """Whether an exploit earns what the file says."""

    def reward(some, texts):
        return totals(functions, weights, some, texts)

    exploit = module._truth_exploit
    for row in rows:
        if truths.answer(row) and exploit(row) == module._truth_reference(row):
            raise FalseClaim("the exploit is the reference")
    best, bad, won = grouped(reward, rows, [module._truth_reference, truths.wrong, exploit])
    said = f"right {mean(best):.2f}, wrong {mean(bad):.2f}, exploit {mean(won):.2f}"
    if severity == "stop" and mean(won) < mean(best) - 1e-9:
        raise FalseClaim(said)
    if severity == "warning":
        enough = mean(best) / 2 if kind == "format_outweighs" else mean(bad)
        if mean(won) < enough - 1e-9 or mean(won) >= mean(best):
            raise FalseClaim(said)
        if kind != "pays_empty_form" and mean(won) <= 0:
            raise FalseClaim(f"earns nothing: {said}")
        if kind == "pays_empty_form":
            empty = mean(reward(rows, ["no idea" for _ in rows]))
            if mean(won) <= empty:
                raise FalseClaim(f"{said}, no form {empty:.2f}")
    return said


def verify_shown(module, functions, weights, rows, kind):
    """Whether a flaw that is no exploit shows."""
    right, wrong = module._truth_reference, truths.wrong
    trigger = getattr(module, "_truth_trigger", None)

    def reward(some, texts):
        return totals(functions, weights, some, texts)

    if kind == "empty_reference":
        some = [r for r in rows if not truths.answer(r)]
        full = [r for r in rows if truths.answer(r)]
        paid = mean(reward(some, [module._truth_exploit(r) for r in some]))
        best, bad = grouped(reward, full, [right, wrong])
        if not some or paid < mean(best) or mean(best) <= mean(bad):
            raise FalseClaim(f"empty reference {paid:g}, right {mean(best):g}")
        return f"{len(some)} rows pay {paid:g} to anything"
    if kind in ("nothing_earns", "wrong_type", "missing_column"):
        try:
            best, bad = grouped(reward, rows, [right, wrong])
        except (TypeError, KeyError, AttributeError, ValueError, IndexError) as e:
            return f"raises {type(e).__name__}: {str(e)[:50]}"
        if mean(best) > mean(bad):
            raise FalseClaim(f"right {mean(best):g} > wrong {mean(bad):g}")
        return f"right {mean(best):.2f}, wrong {mean(bad):.2f}"
    if kind == "constant":
        made = grouped(reward, rows, [right, wrong, truths.blanks, lambda r: ""])
        values = {repr(x) for column in made for x in column}
        if len(values) > 1:
            raise FalseClaim(f"{len(values)} values")
        return f"all {values.pop()}"
    if kind in ("random", "state"):
        made = [grouped(reward, rows, [right, wrong]) for _ in range(4)]
        if not any(differ(made[0], m) for m in made[1:]):
            raise FalseClaim("four calls are equal")
        return "calls differ"
    if kind == "clock":
        made = []
        for at in (1_000_000.0, 1_040_000.0, 1_600_000_123.0):
            with (
                mock.patch("time.time", lambda at=at: at),
                mock.patch("time.perf_counter", lambda at=at: at),
                mock.patch("time.monotonic", lambda at=at: at),
            ):
                made.append(grouped(reward, rows, [right, wrong]))
        if not any(differ(made[0], m) for m in made[1:]):
            time.sleep(1.5)
            if not differ(made[0], grouped(reward, rows, [right, wrong])):
                raise FalseClaim("the clock changes nothing")
        return "the clock counts"
    if kind == "order":
        texts = [(right if i % 3 else wrong)(r) for i, r in enumerate(rows)]
        a, b = reward(rows, texts), reward(rows[::-1], texts[::-1])[::-1]
        if not differ(a, b):
            raise FalseClaim("the order counts for nothing")
        return f"{sum(x != y for x, y in zip(a, b, strict=True))} of {len(a)} change"
    if kind == "raises":
        best, bad = grouped(reward, rows, [right, wrong])
        if mean(best) <= mean(bad):
            raise FalseClaim("the reference earns nothing")
        try:
            reward(rows, [trigger(r) for r in rows])
        except FalseClaim:
            raise
        except Exception as e:
            return f"raises {type(e).__name__}: {str(e)[:50]}"
        raise FalseClaim("raises nothing")
    if kind == "wrong_length":
        for maker in (right, wrong, *([trigger] if trigger else [])):
            for function in functions:
                made = call(function, rows, [maker(r) for r in rows])
                if len(made) != len(rows):
                    return f"{len(made)} for {len(rows)}"
        raise FalseClaim("the length is right")
    if kind == "not_finite":
        made = reward(rows, [trigger(r) for r in rows])
        if all(math.isfinite(m) for m in made):
            raise FalseClaim("all finite")
        return f"{sum(not math.isfinite(m) for m in made)} not finite"
    if kind == "none":
        made = [m for f in functions for m in call(f, rows, [right(r) for r in rows])]
        if sum(m is None for m in made) <= len(made) / 2:
            raise FalseClaim("not mostly None")
        return f"{sum(m is None for m in made)} of {len(made)} None"
    if kind == "slow":
        best, bad = grouped(reward, rows, [right, wrong])
        if mean(best) <= mean(bad):
            raise FalseClaim("the reference earns nothing")
        text = trigger(rows[0])
        if len(text) > 6000:
            raise FalseClaim(f"{len(text)} characters")
        try:
            with within(SLOW):
                reward(rows[:1], [text])
        except TooSlow:
            return f"over {SLOW:g} s for {len(text)} characters"
        raise FalseClaim("fast")
    if kind == "harsh":
        best, bad, other = grouped(reward, rows, [right, wrong, trigger])
        if not mean(best) > mean(bad) or mean(other) > (mean(best) + mean(bad)) / 2:
            raise FalseClaim(f"right {mean(best):g}, other spelling {mean(other):g}")
        return f"right {mean(best):.2f}, other spelling {mean(other):.2f}"
    if kind == "side_effect":
        if leaves_alone(functions, rows, [right(r) for r in rows]):
            raise FalseClaim("changes nothing")
        return "changes its surroundings"
    raise FalseClaim(f"unknown kind {kind}")


def verify(path):
    """(path, header, what was seen, whether the claim holds)."""
    made = header(path)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return path, made, *judge(path, made)


def judge(path, made):
    """(what was seen, whether the claim holds)."""
    try:
        truth = made["truth"]
        if truth != path.parent.name:
            raise FalseClaim("truth differs from the folder")
        rows = rows_of(made["rows"])
        module, functions, weights = load(path)
        source = path.read_text()
        if "def _truth_reference(row)" not in source:
            raise FalseClaim("no _truth_reference")
        if truth == "sound":
            if "kind" in made or "severity" in made:
                raise FalseClaim("a sound file has no kind")
            return verify_sound(module, functions, weights, rows), True
        kinds = made["kind"].split(", ")
        if unknown := set(kinds) - ALL_KINDS:
            raise FalseClaim(f"unknown kind {unknown}")
        if made["severity"] not in ("stop", "warning"):
            raise FalseClaim("unknown severity")
        if kinds[0] in KINDS["exploit"].split():
            seen = verify_exploit(module, functions, weights, rows, kinds[0], made["severity"])
        else:
            seen = verify_shown(module, functions, weights, rows, kinds[0])
        return seen, True
    except (Exception, TooSlow) as e:
        return f"{type(e).__name__}: {e}", False


def main():
    """Verify the files and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="verify only paths that hold one of these")
    parts = parser.parse_args().parts
    paths = [
        p
        for half in ("dev", "held_out")
        for truth in ("flawed", "sound")
        for p in sorted((HERE / half / truth).glob("*.py"))
        if not parts or any(part in str(p) for part in parts)
    ]
    false, counts = 0, Counter()
    with Pool(maxtasksperchild=4) as pool:
        for path, made, seen, holds in pool.imap(verify, paths):
            false += not holds
            kind = made.get("kind", "").split(", ")[0]
            counts[path.parent.parent.name, path.parent.name] += 1
            where = path.relative_to(HERE)
            print(f"{'ok ' if holds else 'BAD'} {where!s:48} {kind:17} {seen}", flush=True)
    print(", ".join(f"{half} {truth}: {n}" for (half, truth), n in counts.items()))
    print(f"{false} of {len(paths)} claims are false")
    return bool(false or not paths)


if __name__ == "__main__":
    sys.exit(main())
