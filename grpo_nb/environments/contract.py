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
`Environment.factory`, which adds what TRL's loop lacks. What becomes of errors:

| event                                  | what happens                                      |
|----------------------------------------|---------------------------------------------------|
| arguments that do not fit the hints    | the model reads why; counted as an error          |
| a tool raises, or calls `sys.exit`     | the model reads the message; counted as an error  |
| a call after `done`                    | the model reads that it is finished               |
| a tool takes more than `tool_seconds`  | the episode earns 0, and later calls are answered |
|                                        | "finished"; the run goes on                       |
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError, validate_call

from grpo_nb.rewards.presets import load_source
from grpo_nb.runs import PROJECT_ROOT, Check, refuse_unknown
from grpo_nb.runs.config import RunConfig

EXAMPLES = ("calculator", "guess", "wordle", "python_sandbox")  # of the class Calculator, and so on
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
    result: str
    error: str
    seconds: float


class Played:
    """What TRL's trainer and `play` hold: an instance of the author's class, with its guard.

    `reset` begins an episode; instances are reused. The author's attributes can be read from it.
    It has no public method but `reset` and the tools, because TRL offers each one to the model.
    """

    environment: "Environment"
    _own: Any = None

    def __init__(self) -> None:
        self._own, self.hung = self.environment.kind(), False
        self.get_reward = self._score  # not a method: TRL would add a reward of its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def reset(self, **row: Any) -> Any:
        """Begin an episode with the row's columns, of which the author's `reset` gets its own."""
        if self.hung:  # the call may go on in its thread
            self._own = self.environment.kind()
        self.calls, self.hung = [], False
        # A dataset fills in None, and the prompt may be rendered in other ways.
        known = {k: v for k, v in row.items() if k != "prompt" and v is not None}
        self._seed = json.dumps(known, sort_keys=True, default=str)
        with self._seeded():
            return self._own.reset(**self.environment.columns(row))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """What the model reads as the tool's result.

        Raises:
            RuntimeError: It is to read of an error, which TRL counts too.
        """
        over, started = self.hung or getattr(self._own, "done", False), time.perf_counter()
        result, error = (FINISHED, "") if over else self._tried(name, arguments)
        self.calls.append(Call(name, arguments, result, error, time.perf_counter() - started))
        if error:
            raise RuntimeError(error)
        return result

    def _tried(self, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
        """(result, error)."""
        method, said = self.environment.methods[name], []

        def run() -> None:
            try:
                said.append((str(method(self._own, **arguments)), ""))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                said.append(("", f"{name}: {place}: {first['msg'].lower()}"))
            except (Exception, SystemExit) as error:
                said.append(("", f"{type(error).__name__}: {error}"))

        with self._seeded():
            thread = threading.Thread(target=run, daemon=True, name=f"tool {name}")
            thread.start()
            thread.join(self.environment.tool_seconds)
        if said:
            return said[0]
        self.hung, limit = True, f"{self.environment.tool_seconds:g} seconds"
        return "", f"{name} took more than {limit}: the episode is over"

    def _score(self) -> float:
        """What the episode earned, in [0, 1]; 0 where a call hung.

        Raises:
            ValueError: The author's `get_reward` gave no such number.
        """
        value = 0.0 if self.hung else self._own.get_reward()
        if isinstance(value, bool | int | float | np.number) and 0 <= value <= 1:
            return float(value)
        raise ValueError(
            f"{self.environment.title}.get_reward() gave {value!r}: return a number from 0 to 1"
        )

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Meanwhile, draws are decided by the row and by how many calls were made."""
        outside = random.getstate(), np.random.get_state()
        random.seed(f"{self._seed} {len(self.calls)}")
        np.random.seed(random.getrandbits(32))
        try:
            yield
        finally:
            random.setstate(outside[0])
            np.random.set_state(outside[1])


class Environment:
    """A class of environments, read and checked.

    Args:
        kind: The author's class.

    Attributes:
        title: For messages.
        system_prompt: The first paragraph of the class's docstring.
        max_turns: Turns with calls in an episode.
        tool_seconds: That a call may take.
        methods: The tools, whose arguments are checked by their type hints.
        tools: The JSON schema of each tool, as chat templates take it.
        factory: TRL's `environment_factory`, a type: TRL looks for tools in one.

    Raises:
        ValueError: It has no tool or no `reset`, or a tool lacks type hints or a docstring.
    """

    def __init__(self, kind: type) -> None:
        self.kind, self.title = kind, f"environment {kind.__name__}"
        self.max_turns: int = getattr(kind, "max_turns", 8)
        self.tool_seconds: float = getattr(kind, "tool_seconds", 10.0)
        first = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        self.system_prompt = " ".join(first.split())
        functions = dict(inspect.getmembers(kind, inspect.isfunction))
        marked = {k: v for k, v in functions.items() if hasattr(v, "is_tool")}
        public = {k: v for k, v in functions.items() if k[0] != "_" and k not in NOT_TOOLS}
        if "reset" not in functions:
            raise ValueError(f"{self.title} has no method reset: it begins an episode with a row")
        if not (marked or public):
            raise ValueError(f"{self.title} has no tool: mark a method with @tool")
        self.tools, self.methods = self._described(marked or public)
        forwards = {name: _forward(name, method) for name, method in self.methods.items()}
        self.factory = type(kind.__name__, (Played,), {**forwards, "environment": self})

    def _described(self, chosen: Mapping[str, Callable[..., Any]]) -> tuple[list, dict]:
        from transformers.utils import get_json_schema

        checked = validate_call(config={"strict": True})
        try:
            tools = [get_json_schema(method.__get__(self.kind)) for method in chosen.values()]
            return tools, {name: checked(method) for name, method in chosen.items()}
        except Exception as error:  # transformers has errors of its own for docstrings and hints
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"a tool of {self.title} cannot be described to a model ({why}): give each "
                "parameter a type hint, and the method a docstring with a line for each under Args:"
            ) from error

    def columns(self, row: Row) -> dict[str, Any]:
        """The row's columns that `reset` takes.

        Raises:
            ValueError: One is missing; the message names it.
        """
        signature = inspect.signature(self.kind.reset)
        takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        taken = {k: v for k, v in row.items() if takes_all or k in signature.parameters}
        try:
            signature.bind(self, **taken)
        except TypeError as error:
            raise ValueError(
                f"{self.title}.reset: {error}; the data has {', '.join(row)}: add the column, or "
                "give the parameter a default"
            ) from None
        return taken

    def solution(self, row: Row) -> list[Any] | None:
        """The turns that win by the author's `solve`: calls and a last text; None without one."""
        return list(self.kind.solve(**row)) if hasattr(self.kind, "solve") else None


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
    return f"{environment.kind.__name__} {hashlib.sha256(source).hexdigest()}"


def load(name: str) -> Environment:
    """The environment of that name, or of a class in a file or a module.

    Args:
        name: A name in EXAMPLES, "mine.py:Guess", or "package.module:Guess".

    Raises:
        FileNotFoundError: No such file.
        ValueError: It cannot be imported, holds no such class, or the class is no environment.
    """
    place, colon, title = name.rpartition(":")
    if not colon:
        refuse_unknown("environment", name, [*EXAMPLES, "a class in a file, as mine.py:Guess"])
        place = f"grpo_nb.environments.examples.{name}"
        title = name.title().replace("_", "")
    try:
        in_file = place.endswith(".py")
        module = load_source(PROJECT_ROOT / place) if in_file else importlib.import_module(place)
    except ImportError as error:
        raise ValueError(f"environment {name!r} cannot be imported: {error}") from error
    classes = {k: v for k, v in vars(module).items() if isinstance(v, type)}
    if title not in classes:
        has = ", ".join(classes) or "none"
        raise ValueError(f"environment {name!r}: {place} has no class {title}; it has {has}")
    return Environment(classes[title])


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
        environment.columns(row)
        for method, given in (("reset", row), ("get_reward", {})):
            try:
                if hasattr(environment.kind, method):
                    getattr(played, method)(**given)
            except Exception as error:
                where = f"{environment.title}.{method} raised on row {number}"
                raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    seen = f"{environment.kind.__name__} begins with each of {len(rows)} rows; the model calls "
    return [Check("environment", "ok", seen + ", ".join(environment.methods))]
