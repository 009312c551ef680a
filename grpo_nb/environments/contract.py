"""Load and guard an environment: a user's class whose tools a model calls, turn by turn.

    class Guess:
        \"\"\"Find the secret number.\"\"\"         # the system prompt
        max_turns = 4                            # limit of turns with calls per episode
        tool_seconds = 5.0                       # time limit of a call

        def reset(self, low: int, secret: int) -> str | None: ...  # columns of the row
        @tool
        def guess(self, number: int) -> str: ...  # type hints and a docstring with Args
        def get_reward(self) -> float: ...        # in [0, 1], once the episode is over
        done: bool                                # optional: whether the episode is over
        @classmethod
        def solve(cls, **row) -> list: ...        # optional: the turns that win

TRL's GRPOTrainer takes such a class unchanged as its `environment_factory`. A class written for TRL
works here too: if no method is marked with `@tool`, every public method is a tool. Training uses
`Environment.factory`, which adds what TRL's loop lacks. Errors are handled as follows:

| event                                  | what happens                                      |
|----------------------------------------|---------------------------------------------------|
| arguments that do not fit the hints    | the model reads the reason; counted as an error   |
| a tool raises, or calls `sys.exit`     | the model reads the message; counted as an error  |
| a call after `done`                    | the model reads that the episode is finished      |
| a tool takes more than `tool_seconds`  | the episode earns 0, and later calls are answered |
|                                        | "finished"; the run continues                     |
| `reset` or `get_reward` raises, or the reward is not in [0, 1] | the run stops with an error   |

`random`, `numpy.random` and torch are seeded from the row, so that all episodes of a group start
alike. Their states and the working directory are restored after each call to a method. The time
limit of a tool works only in the main thread.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from numbers import Real
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, validate_call

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.calls import TookTooLong, kept, limited
from grpo_nb.rewards.load import load_source, source_digest

if TYPE_CHECKING:
    from grpo_nb.runs.config import RunConfig

EXAMPLES = ("calculator", "guess")  # classes in examples.py
NOT_TOOLS = ("reset", "get_reward", "solve")
FINISHED = "The episode is finished: no more calls are answered."
Row = Mapping[str, Any]


def tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method as a tool; if a class marks none, each of its public methods is a tool."""
    method.is_tool = True
    return method


class Played:
    """Wrap an instance of the author's class, for TRL's trainer and for `play`.

    `reset` begins an episode; one instance serves many episodes. The attributes of the author's
    instance can be read through the wrapper. The only public methods are `reset` and the tools,
    because TRL offers every public method to the model.
    """

    environment: "Environment"
    _instance: Any = None

    def __init__(self) -> None:
        self._instance, self.hung = self.environment.kind(), False
        self.get_reward = self._score  # a method would make TRL add a reward of its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)

    def reset(self, **row: Any) -> Any:
        """Begin an episode with a row; the author's `reset` gets the columns that it takes."""
        self._count, self.hung = 0, False  # calls so far; whether one took too long
        # The seed ignores None, which fills missing columns, and the prompt, whose form may vary.
        columns = {k: v for k, v in row.items() if k != "prompt" and v is not None}
        self._seed = json.dumps(columns, sort_keys=True, default=str)
        with self._seeded():
            return self._instance.reset(**self.environment.columns(row))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result, as the model reads it.

        Raises:
            RuntimeError: The call failed; TRL counts it and shows the message to the model.
        """
        over = self.hung or getattr(self._instance, "done", False)
        texts = (FINISHED, "") if over else self._execute(name, arguments)
        # No tokenizer takes a lone surrogate, which a model can write as "\\ud800".
        result, error = (text.encode(errors="replace").decode() for text in texts)
        self._count += 1
        if error:
            raise RuntimeError(error)
        return result

    def _execute(self, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
        """Run a tool within its time limit; return (result, error)."""
        seconds = self.environment.tool_seconds
        call = functools.partial(self.environment.methods[name], self._instance)
        try:
            with self._seeded():
                return str(limited(name, seconds, call, **arguments)), ""
        except TookTooLong:
            self.hung = True
            return "", f"{name} took more than {seconds:g} seconds: the episode is over"
        except ValidationError as error:
            first = error.errors()[0]
            return "", f"{name}: {first['loc'][0]}: {first['msg'].lower()}"
        except (Exception, SystemExit) as error:
            return "", f"{type(error).__name__}: {error}"

    def _score(self) -> float:
        """Return the episode's reward, in [0, 1]; 0 if a call hung.

        Raises:
            ValueError: The author's `get_reward` did not return a number from 0 to 1.
        """
        with self._seeded():
            value = 0.0 if self.hung else self._instance.get_reward()
        if isinstance(value, Real) and 0 <= value <= 1:
            return float(value)
        raise ValueError(
            f"{self.environment.title}.get_reward() gave {value!r}: return a number from 0 to 1"
        )

    def _seeded(self) -> AbstractContextManager[None]:
        """Seed random numbers in the block, from the row and the number of calls so far."""
        return kept(f"{self._seed} {self._count}")


class Environment:
    """Parse and check an author's environment class.

    Args:
        kind: The author's class.

    Attributes:
        title: The environment's name in messages.
        system_prompt: The first paragraph of the class's docstring.
        max_turns: The maximum number of turns with calls in an episode.
        tool_seconds: The time limit of a call.
        methods: The tools by name, with arguments validated against their type hints.
        tools: The JSON schema of each tool, as chat templates take it.
        factory: TRL's `environment_factory`; a class, because TRL looks for tools in a class.

    Raises:
        ValueError: The class has no tool or no `reset`.
        Exception: A tool lacks type hints or a docstring; the message says what is missing.
    """

    def __init__(self, kind: type) -> None:
        if not isinstance(kind, type):
            raise ValueError(f"{kind!r:.80} is no class: give the class of the environment itself")
        self.kind, self.title = kind, f"environment {kind.__name__}"
        self.max_turns: int = getattr(kind, "max_turns", 8)
        self.tool_seconds: float = getattr(kind, "tool_seconds", 10.0)
        first = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        self.system_prompt = " ".join(first.split())
        functions = dict(inspect.getmembers(kind, inspect.isfunction))
        explicit = {k: v for k, v in functions.items() if hasattr(v, "is_tool")}
        public = {k: v for k, v in functions.items() if k[0] != "_" and k not in NOT_TOOLS}
        if "reset" not in functions:
            raise ValueError(f"{self.title} has no method reset, which begins an episode: add it")
        if not (explicit or public):
            raise ValueError(f"{self.title} has no tool: mark a method with @tool")
        from transformers.utils import get_json_schema

        methods, validate = explicit or public, validate_call(config={"strict": True})
        self.tools = [get_json_schema(method.__get__(kind)) for method in methods.values()]
        self.methods = {name: validate(method) for name, method in methods.items()}
        forwards = {name: _forward(name, method) for name, method in self.methods.items()}
        self.factory = type(kind.__name__, (Played,), {**forwards, "environment": self})

    def columns(self, row: Row) -> dict[str, Any]:
        """Return the columns of the row that `reset` takes.

        Raises:
            ValueError: A column is missing; the message names it.
        """
        signature = inspect.signature(self.kind.reset)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        columns = {k: v for k, v in row.items() if takes_all or k in signature.parameters}
        try:
            signature.bind(self, **columns)
        except TypeError as error:
            raise ValueError(
                f"{self.title}.reset: {error}; the data has {', '.join(row)}: add the column, or "
                "give the parameter a default"
            ) from None
        return columns

    def solution(self, row: Row) -> list[Any] | None:
        """Return the winning turns of the author's `solve`; None if the class has no `solve`."""
        return list(self.kind.solve(**row)) if hasattr(self.kind, "solve") else None


def _forward(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Played` that calls a tool, with the signature of the author's method."""

    @functools.wraps(method)
    def forward(self: Played, **arguments: Any) -> str:
        return self._call(name, arguments)

    return forward


def of(config: "RunConfig") -> Environment | None:
    """Return the environment of a run, or None if it has none; raise the errors of `load`."""
    return load(config.data.environment) if config.data.environment else None


def identity(environment: Environment | None) -> str:
    """Return the class name with the SHA-256 of its file, or "" without an environment."""
    return source_digest(environment.kind) if environment else ""


def load(name: str) -> Environment:
    """Load an example environment, or a class from a file or a module.

    Args:
        name: A name in EXAMPLES, "mine.py:Guess", or "package.module:Guess".

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The class is not an environment.
        ImportError, AttributeError: The module cannot be imported, or has no such class.
    """
    place, colon, title = name.rpartition(":")
    if not colon:
        refuse_unknown("environment", name, [*EXAMPLES, "a class in a file, as mine.py:Guess"])
        place, title = "grpo_nb.environments.examples", name.title()
    in_file = place.endswith(".py")
    module = load_source(PROJECT_ROOT / place) if in_file else importlib.import_module(place)
    return Environment(getattr(module, title))
