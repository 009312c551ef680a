"""A call of a reward leaves the process as it was, ends it never, and can be limited."""

import asyncio
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

from grpo_nb.rewards import call, reward
from grpo_nb.rewards.calls import TookTooLong, limited


def state():
    numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [*numbers, torch.is_grad_enabled(), Path.cwd()]


def change_everything():
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    torch.set_grad_enabled(False)
    os.chdir("/")


@reward()
def changing(response: str) -> float:
    change_everything()
    return 1 / float(response)


async def awaited(completions, **_):
    change_everything()
    return [1 / float(completion) for completion in completions]


@pytest.mark.parametrize("func", [changing, awaited])
def test_what_a_reward_changes_is_put_back_and_if_it_raises_too(func):
    before = state()
    for _ in range(2):
        assert call(func, completions=["1"]) == [1.0]
        assert state() == before
    with pytest.raises(ZeroDivisionError):
        call(func, completions=["0"])
    assert state() == before


def test_an_async_reward_is_called_where_an_event_loop_runs_already():
    async def notebook_cell():
        return call(awaited, completions=["1"])

    assert asyncio.run(notebook_cell()) == [1.0]


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
