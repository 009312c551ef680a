"""An environment: a class that a person writes, whose tools a model calls, turn by turn.

    class Guess:
        \"\"\"Find the secret number.\"\"\"         # the system prompt
        max_turns = 4                            # turns with calls in an episode
        tool_seconds = 5.0                       # that a call may take

        def reset(self, low: int, secret: int) -> str | None: ...  # columns of the row
        @tool
        def guess(self, number: int) -> str: ...  # type hints and a docstring with Args
        def get_reward(self) -> float: ...        # in [0, 1], once the episode is over
        done: bool                                # optional: there is nothing left to do
        @classmethod
        def solve(cls, **row) -> list: ...        # optional: the turns that win

TRL's GRPOTrainer takes such a class as its `environment_factory`, unchanged, and one written for
TRL works here: without `@tool`, every public method is a tool. What a training here uses is
`Environment.factory`, which adds what TRL's loop lacks. The whole policy of errors:

| event                                  | what happens                                      |
|----------------------------------------|---------------------------------------------------|
| arguments that do not fit the hints    | the model reads why; counted as an error          |
| a tool raises, or calls `sys.exit`     | the model reads the message; counted as an error  |
| a call after `done`                    | the model reads that it is finished               |
| a tool takes more than `tool_seconds`  | the episode is over, and earns 0; the run goes on |
| `reset` raises, `get_reward` raises, or gives no number in [0, 1] | the run stops, and says so |

Randomness (`random` and `numpy.random`) is seeded from the row: a group starts alike.
"""

import functools
import hashlib
import importlib
import inspect
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError, validate_call

from grpo_nb.rewards.presets import load_source
from grpo_nb.runs import PROJECT_ROOT, Check, refuse_unknown
from grpo_nb.runs.config import RunConfig

EXAMPLES = {
    "calculator": "Calculator",
    "guess": "Guess",
    "wordle": "Wordle",
    "python_sandbox": "PythonSandbox",
}
NOT_TOOLS = ("reset", "get_reward", "solve")
FINISHED = "The episode is finished: no more calls are answered."
Row = Mapping[str, Any]


def tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method as a tool; where a class marks none, each of its public methods is one."""
    method.is_tool = True
    return method


class Call(NamedTuple):
    """A call of a tool, and what came of it: a result, or an error."""

    name: str
    arguments: dict[str, Any]
    result: str = ""
    error: str = ""
    seconds: float = 0.0


class Played:
    """What TRL's trainer and `play` hold: one instance of the author's class, and its guard.

    Instances are used again: `reset` begins an episode. The author's attributes are read through.
    TRL takes every public method of the class for a tool, so that it has no other.
    """

    environment: "Environment"

    def __init__(self) -> None:
        self._own = self.environment.kind()
        self._random: tuple[Any, Any] = (None, None)
        self.calls: list[Call] = []
        self.hung = False
        self.get_reward = self._score  # TRL would add a reward that it finds in the class

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # while it is unpickled or copied
            raise AttributeError(name)
        return getattr(self._own, name)

    def reset(self, **row: Any) -> Any:
        """Begin an episode with the row's columns, of which the author's `reset` gets its own."""
        if self.hung:  # the call may go on in its thread
            self._own = self.environment.kind()
        self.calls, self.hung = [], False
        self._random = _seeded(row)
        with self._own_randomness():
            return self._own.reset(**self.environment.columns(row))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the model reads as the tool's result.

        Raises:
            RuntimeError: It is to read of an error, which TRL counts too.
        """
        if self.hung or getattr(self._own, "done", False):
            self.calls.append(Call(name, dict(arguments), FINISHED))
            return FINISHED
        started = time.perf_counter()
        result, error = self._tried(name, arguments)
        taken = time.perf_counter() - started
        self.calls.append(Call(name, dict(arguments), result, error, taken))
        if error:
            raise RuntimeError(error)
        return result

    def _tried(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """(result, error)."""
        method, said = self.environment.methods[name], []

        def run() -> None:
            try:
                said.append(str(method(self._own, **arguments)))
            except (Exception, SystemExit) as error:
                said.append(error)

        with self._own_randomness():
            thread = threading.Thread(target=run, daemon=True, name=f"tool {name}")
            thread.start()
            thread.join(self.environment.tool_seconds)
        if not said:
            self.hung = True
            limit = f"{self.environment.tool_seconds:g} seconds"
            return "", f"{name} took more than {limit}: the episode is over"
        [what] = said
        if isinstance(what, ValidationError):
            first = what.errors()[0]
            return "", f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
        if isinstance(what, BaseException):
            return "", f"{type(what).__name__}: {what}"
        return what, ""

    def _score(self) -> float:
        """What the episode earned, in [0, 1]; 0 where a call hung.

        Raises:
            ValueError: The author's `get_reward` gave no such number.
        """
        if self.hung:
            return 0.0
        value = self._own.get_reward()
        if isinstance(value, bool | int | float | np.number) and 0 <= value <= 1:
            return float(value)
        raise ValueError(
            f"{self.environment.title}.get_reward() gave {value!r}: return a number from 0 to 1"
        )

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Meanwhile, the state of `random` and `numpy.random` is the episode's."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _seeded(row: Row) -> tuple[Any, Any]:
    """The states that the row's seed gives; the prompt may be rendered in other ways."""
    # A dataset fills in None, and the prompt may be rendered in other ways.
    known = {k: v for k, v in row.items() if k != "prompt" and v is not None}
    text = json.dumps(known, sort_keys=True, default=str)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return random.Random(seed).getstate(), np.random.RandomState(seed).get_state()


@dataclass(frozen=True, eq=False)
class Environment:
    """A class of environments, read and checked.

    Args:
        kind: The author's class.
        name: How settings name it.

    Raises:
        ValueError: It has no tool or no `reset`, or a tool lacks type hints or a docstring.
    """

    kind: type
    name: str = ""
    methods: dict[str, Callable[..., Any]] = field(init=False)

    def __post_init__(self) -> None:
        functions = dict(inspect.getmembers(self.kind, inspect.isfunction))
        marked = {k: v for k, v in functions.items() if getattr(v, "is_tool", False)}
        public = {k: v for k, v in functions.items() if k[0] != "_" and k not in NOT_TOOLS}
        chosen = marked or public
        if "reset" not in functions:
            raise ValueError(f"{self.title} has no method reset: it begins an episode with a row")
        if not chosen:
            raise ValueError(f"{self.title} has no tool: mark a method with @tool")
        checked = validate_call(config={"strict": True})
        try:
            valid = {name: checked(method) for name, method in chosen.items()}
            object.__setattr__(self, "methods", valid)
            assert self.tools
        except Exception as error:  # transformers has errors of its own for docstrings and hints
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"a tool of {self.title} cannot be described to a model ({why}): give each "
                "parameter a type hint, and the method a docstring with a line for each under Args:"
            ) from error

    @property
    def title(self) -> str:
        return f"environment {self.kind.__name__}"

    @property
    def system_prompt(self) -> str:
        """What the class's docstring says, as its first paragraph."""
        text = inspect.cleandoc(self.kind.__doc__ or "").partition("\n\n")[0]
        return " ".join(text.split())

    @property
    def max_turns(self) -> int:
        return getattr(self.kind, "max_turns", 8)

    @property
    def tool_seconds(self) -> float:
        return getattr(self.kind, "tool_seconds", 10.0)

    @cached_property
    def factory(self) -> type[Played]:
        """TRL's `environment_factory`: a type, for TRL finds tools by the functions of a type."""
        forwards = {name: _forward(name, method) for name, method in self.methods.items()}
        return type(self.kind.__name__, (Played,), {**forwards, "environment": self})

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """The JSON schema of each tool, as chat templates take it."""
        from transformers.utils import get_json_schema

        played = object.__new__(self.factory)
        return [get_json_schema(getattr(played, name)) for name in self.methods]

    def columns(self, row: Row) -> dict[str, Any]:
        """The row's columns that `reset` takes."""
        parameters = inspect.signature(self.kind.reset).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return dict(row)
        return {one.name: row[one.name] for one in parameters if one.name in row}

    def check_columns(self, row: Row) -> None:
        """Refuse rows that `reset` cannot take.

        Raises:
            ValueError: A column is missing; the message names it.
        """
        for one in list(inspect.signature(self.kind.reset).parameters.values())[1:]:
            fixed = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            if fixed and one.default is one.empty and one.name not in row:
                raise ValueError(
                    f"{self.title}.reset takes {one.name!r}, and the data has {', '.join(row)}: "
                    "add the column, or give the parameter a default"
                )

    def solution(self, row: Row) -> list[Any] | None:
        """The turns that win by the author's `solve`: calls and a last text; None without one.

        Raises:
            ValueError: It gave something else.
        """
        turns = list(self.kind.solve(**row)) if hasattr(self.kind, "solve") else None
        for turn in turns or ():
            called = isinstance(turn, Mapping) and {*turn} == {"name", "arguments"}
            if not called and not isinstance(turn, str):
                raise ValueError(
                    f"{self.title}.solve gave the turn {turn!r}: give a text, or a call as "
                    '{"name": "guess", "arguments": {"number": 4}}'
                )
        return turns


def _forward(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The tool on `Played`, described as the author's method is."""

    @functools.wraps(method)
    def forward(self: Played, **arguments: Any) -> str:
        return self._call(name, arguments)

    return forward


def of(config: RunConfig) -> Environment | None:
    """The environment of a run, if its task has one; errors as of `load`."""
    return load(config.data.environment) if config.data.environment else None


def identity(environment: Environment | None) -> str:
    """What tells an environment from another, and from itself as it was written before."""
    if environment is None:
        return ""
    source = Path(inspect.getfile(environment.kind)).read_bytes()
    return f"{environment.name} {hashlib.sha256(source).hexdigest()}"


def load(name: str) -> Environment:
    """The environment of that name, or of a class in a file or a module.

    Args:
        name: A name in EXAMPLES, "mine.py:Guess", or "package.module:Guess".

    Raises:
        FileNotFoundError: No such file.
        ValueError: It cannot be imported, holds no such class, or the class is no environment.
    """
    file = PROJECT_ROOT / name.rpartition(":")[0]
    return _load(name, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=8)
def _load(name: str, _written: int) -> Environment:
    """The file may be written again while a kernel lives."""
    place, colon, title = name.rpartition(":")
    if not colon:
        refuse_unknown("environment", name, [*EXAMPLES, "a class in a file, as mine.py:Guess"])
        place, title = f"grpo_nb.environments.examples.{name}", EXAMPLES[name]
    if place.endswith(".py"):
        module = load_source(PROJECT_ROOT / place)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ValueError(f"environment {name!r} cannot be imported: {error}") from error
    kind = getattr(module, title, None)
    if not isinstance(kind, type):
        classes = [k for k, v in vars(module).items() if isinstance(v, type)]
        raise ValueError(
            f"environment {name!r}: {place} has no class {title}; it has "
            f"{', '.join(classes) or 'none'}"
        )
    return Environment(kind, name)


def check_rows(environment: Environment | None, rows: Sequence[Row]) -> list[Check]:
    """The check "environment"; none for a task without one.

    Raises:
        ValueError: `reset` cannot take a row, or raises for it, or `get_reward` does or gives no
            number from 0 to 1 where no call was made: said before anything is sampled.
    """
    if environment is None:
        return []
    played = environment.factory()
    for number, row in enumerate(rows):
        environment.check_columns(row)
        for method, given in (("reset", row), ("get_reward", {})):
            try:
                if hasattr(environment.kind, method):
                    getattr(played, method)(**given)
            except Exception as error:
                where = f"{environment.title}.{method} raised on row {number}"
                raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    seen = f"{environment.kind.__name__} begins with each of {len(rows)} rows; the model calls "
    return [Check("environment", "ok", seen + ", ".join(environment.methods))]
