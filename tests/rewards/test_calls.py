"""A call of a reward leaves the process as it was, ends it never, and can be limited."""

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hackable import lifted

from grpo_nb.rewards import call
from grpo_nb.rewards.calls import TookTooLong, limited

ROW = {"question": "2+2?", "prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}
CHANGES = {
    "the random numbers of torch": lambda: torch.manual_seed(0),
    "the random numbers of `random`": lambda: random.seed(0),
    "the random numbers of numpy": lambda: np.random.seed(0),
    "the working directory": lambda: os.chdir("/"),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
}


def state():
    numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [*numbers, torch.is_grad_enabled(), Path.cwd()]


def scorer(change):
    def score(response: str, answer: str) -> float:
        change()
        return float(f">{answer}<" in response)

    return lifted(score, "mine")


async def awaited(completions, **_):
    torch.manual_seed(0)
    return [1.0 for _ in completions]


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_reward_changes_is_put_back(what):
    func, before = scorer(CHANGES[what]), state()
    for _ in range(2):
        assert call(func, completions=["<answer>4</answer>"], answer=["4"]) == [1.0]
        assert state() == before


def test_an_async_reward_and_one_that_raises_change_nothing_either():
    before = state()
    assert call(awaited, completions=["a"]) == [1.0]
    with pytest.raises(ZeroDivisionError):
        call(scorer(lambda: [torch.manual_seed(0), 1 / 0]), completions=["a"], answer=["4"])
    assert state() == before


def loop():
    while True:
        pass


def stubborn():
    for _ in range(2):
        with contextlib.suppress(BaseException):
            loop()


@pytest.mark.parametrize("block", [loop, stubborn, lambda: re.match(r"(a+)+!", "a" * 50)])
def test_a_loop_and_a_regular_expression_end_at_the_limit_and_name_the_reward(block):
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if block is not stubborn:  # it returns after its second interruption
            stack.enter_context(pytest.raises(TookTooLong, match=r"mine took more than 0\.2 s"))
        limited("mine", 0.2, block)
    assert time.monotonic() - start < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def wait(end):
    while time.perf_counter() < end:
        pass


def test_a_call_that_ends_at_its_limit_is_left_alone_afterwards():
    for _ in range(500):
        with contextlib.suppress(TookTooLong):
            limited("mine", 0.001, wait, end=time.perf_counter() + 0.001)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
