"""Fifteen flawed rewards in the style that circulates, and what has to name each flaw."""

import math
import random
import re

from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import numeric_correctness_reward, reward, reward_set

SUMS = [(47, 38), (1, 1), (9, 6), (30, 12), (5, 8), (21, 3)]
ROWS = [{"prompt": [], "question": f"{a} + {b}?", "answer": str(a + b)} for a, b in SUMS]
SAID = [  # by a base model: right, wrong, without tags, rambling until it is cut
    "<reasoning>it is {0}</reasoning><answer>{0}</answer>",
    "<reasoning>so it must be {1}=1 then</reasoning><answer>{1}</answer>",
    "I think {1}",
    "<reasoning>first we add them, and so we get <answer>{0}",
]
TEXTS_P_G = [[text.format(a + b, a + b + 1) for text in SAID] for a, b in SUMS]
PILOT = Baseline(ROWS, [[Sample(t, len(t), False) for t in of] for of in TEXTS_P_G])
FORM = "<reasoning>[^<]+</reasoning><answer>[^<]+</answer>"


def lifted(func, name, **declared):
    """A function of `completions` has TRL's shape; others score one completion."""
    func.__name__ = name
    return func if "completions" in func.__code__.co_varnames else reward(**declared)(func)


def said(text, tag="answer"):
    return re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)


def texts_of(completions):
    return [completion[0]["content"] for completion in completions]


def echoed(completions, answer, **_):
    pairs = zip(answer, texts_of(completions), strict=True)
    return [float(expected in re.findall(r"\d+", text)) for expected, text in pairs]


def mean_step(completions, **_):
    steps = [re.findall(r"(\d+)=", text) for text in texts_of(completions)]
    return [len(set(of_text)) / len(of_text) if of_text else math.nan for of_text in steps]


def as_first_row(completions, answer, **_):
    return [float(said(text)[-1:] == [answer[0]]) for text in texts_of(completions)]


FLAWED = {  # its flaw: what names it, how, its weight beside correctness (0: in its place), itself
    "empty tags pay": (
        "empty form",
        "warning",
        0.25,
        lambda r: bool(said(r) and said(r, "reasoning")),
    ),
    "the first answer wins": (
        "several answers",
        "warning",
        0,
        lambda r, answer: said(r)[:1] == [answer],
    ),
    "guesses may be listed": (
        "several answers",
        "stop",
        0,
        lambda r, answer: answer in str(said(r)),
    ),
    "the expected counts anywhere, among others": ("every number", "warning", 0.5, echoed),
    "the longer, the better": ("length", "warning", 0.5, lambda r: min(1, len(r) / 2000)),
    "the mean over no step is NaN": ("not finite", "stop", 0.25, mean_step),
    "unseeded noise breaks ties": ("random", "stop", 0.25, lambda r: random.random()),
    "every row has the first row's expected": ("order", "stop", 0, as_first_row),
    "never false": ("nothing earns", "stop", 0, lambda r, answer: answer in answer),
    "reads another tag": (
        "nothing earns",
        "stop",
        0,
        lambda r, answer: said(r, "final") == [answer],
    ),
    "every further tag pays": ("empty form", "warning", 0.25, lambda r: min(1, r.count("<") / 40)),
    "every connective pays": ("stuffing", "warning", 0.25, lambda r: min(1, r.count("so ") / 10)),
    "raises on an empty text": ("raises", "stop", 0.25, lambda r: r[0] == "<"),
    "scores the first row alone": ("wrong length", "stop", 0.25, lambda completions, **_: [1.0]),
    "format outweighs correctness": (
        "form outweighs",
        "warning",
        4.0,
        lambda r: bool(re.fullmatch(FORM, r)),
    ),
}


def bench_with(flaw):
    _, _, weight, func = FLAWED[flaw]
    beside = [(numeric_correctness_reward, 1.0)] if weight else []
    return Bench(reward_set([*beside, (lifted(func, "flawed"), weight or 1.0)]))
