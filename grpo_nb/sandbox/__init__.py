# ruff: noqa: F401 (the imports below are the package's public names)
"""Run generated Python against tests in a sandbox, where it can do no harm and cannot cheat.

Each program has its own sandbox: bubblewrap with resource limits, or else pydantic-monty,
which interprets a subset of Python (for example in default Docker, where bubblewrap fails).
The program never judges itself: inputs go in, plain values come out, and this process
compares them. No expected value enters the sandbox, so no program can know or forge one.
`run_tests` returns a `Verdict`.

Tests come in two shapes, as Python objects or as JSON text:
    {"function": "f", "cases": [[[2], 4], [[3], 9]]}    [[arguments, result], ...]
    ["assert f(2) == 4", "assert not f(0)"]             see `parse_assert`

Type and value must be equal: True is not 1, [1] is not (1,), and an instance of a subclass
of int is not an int. There are three exceptions: an expected float accepts an equal int, NaN
equals NaN, and a subclass of dict counts as a dict. In bubblewrap, programs can import the
standard library.
"""

from grpo_nb.sandbox.run import choose_backend, run_tests
from grpo_nb.sandbox.values import DEFAULT_LIMITS, Limits, Verdict
