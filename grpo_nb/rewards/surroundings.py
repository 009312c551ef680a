"""Restore what a reward or a tool shares with the training, after each of its calls.

A reward that seeds torch, say, would have the policy sample the same completions at every step.
Each call has its own random numbers. Changes by threads that outlive a call are not noticed. While
one thread of a process trains, no other thread may call a reward: both take the lock `turn`.
"""

import io
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

RANDOM = "random numbers"  # in the names of random states
turn = threading.Lock()
_calls = count()
Part = tuple[Callable[[], Any], Callable[[Any], object]]  # reads a state, and sets it


@contextmanager
def kept(changes: set[str] | None = None, seed: str = "") -> Iterator[None]:
    """Restore the process's state after the block, whose random numbers are seeded.

    Args:
        changes: Receives the names of what the block changed.
        seed: The seed of the block's random numbers, which it may then draw. Without a seed, each
            block gets different numbers, and drawing any of them counts as a change.
    """
    parts = _parts()
    before = original = {name: getter() for name, (getter, _) in parts.items()}
    random.seed(seed or f"call {next(_calls)}")
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(random.getrandbits(32))
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(random.getrandbits(63))
    by_draws = changes is not None and not seed
    if by_draws:  # seeding does not count as a change
        before = {name: parts[name][0]() if RANDOM in name else original[name] for name in parts}
    try:
        yield
    finally:
        for name, (getter, put_back) in parts.items():
            differs = (by_draws or RANDOM not in name) and getter() != before[name]
            if differs and changes is not None:
                changes.add(name)
            if differs or RANDOM in name:
                put_back(original[name])


class Muted(io.StringIO):
    """Collect what the thread that created it prints; other threads still print to `sys.stdout`."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.thread = sys.stdout, threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text to the stream unless this thread is the muted one."""
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)


def _parts() -> dict[str, Part]:
    """Return how to read and set each part of the state, including libraries that are loaded."""
    parts: dict[str, Part] = {
        f"the {RANDOM} of `random`": (random.getstate, random.setstate),
        "the working directory": (_folder, lambda folder: folder and os.chdir(folder)),
        "environment variables": (os.environb.copy, _set_variables),
        "sys.stdout": (lambda: sys.stdout, partial(setattr, sys, "stdout")),
        "sys.stderr": (lambda: sys.stderr, partial(setattr, sys, "stderr")),
    }
    if numpy := sys.modules.get("numpy"):
        parts[f"the {RANDOM} of numpy"] = (_numpy_state, numpy.random.set_state)
    if torch := sys.modules.get("torch"):
        parts |= {
            f"the {RANDOM} of torch": _generators(torch, [torch.default_generator]),
            "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
            "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        }
        if torch.cuda.is_initialized():
            gpus = _generators(torch, torch.cuda.default_generators)
            parts[f"the {RANDOM} of the GPU"] = gpus
    return parts


def _folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # a reward changed to a temporary folder that no longer exists
        return None


def _set_variables(variables: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - variables.keys():
        del os.environb[name]
    os.environb.update(variables)


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = sys.modules["numpy"].random.get_state()
    return (kind, keys.tolist(), *rest)


def _generators(torch: Any, generators: Any) -> Part:
    """Read and set the states of torch's generators, as bytes, which can be compared."""

    def put_back(states: list[bytes]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return lambda: [each.get_state().numpy().tobytes() for each in generators], put_back
