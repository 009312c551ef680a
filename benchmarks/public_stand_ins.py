"""Stand-ins for what public GRPO sources need and a laptop lacks: benchmarks/public_rewards.py.

A source runs as its author wrote it, but loads no model, reaches no network and starts no program.
Whatever it calls of Unsloth, vLLM, peft and the like is a `StandIn`, which accepts everything; so
is every package that the source imports and that is not installed. torch, trl.rewards, datasets and
math_verify stay real, as do the functions of Unsloth by which rewards run a model's code.
"""

import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import re
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import packaging.version

# Installed or not, these need a GPU, a network or a model.
REPLACED = ("unsloth", "unsloth_zoo", "vllm", "peft", "wandb", "bitsandbytes", "trackio", "openenv")
REPLACED += ("trl.experimental", "google.colab", "marimo", "IPython")

LARGE = 2**24  # numbers in one array
OF_A_MODEL = ("peft_config", "quantization_config", "kbit_device_map")  # trl.get_…


class _Accepting(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class StandIn(int, metaclass=_Accepting):
    """Accepts every call, attribute and item; counts as 0; remembers its keywords."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        return int.__new__(cls, 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand back a function (as a decorator does) or a tokenizer; else another stand-in."""
        first = args[0] if args else None
        handed = inspect.isfunction(first) or hasattr(first, "apply_chat_template")
        return first if handed and not isinstance(first, StandIn) else StandIn()

    def __getitem__(self, key: Any) -> "StandIn":
        return StandIn()

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def keys(self) -> list[str]:
        return []

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *raised: Any) -> None: ...


class Enough(BaseException):
    """Ends a source: every trainer that it names was made."""


class Trainer(StandIn):
    """Stands in for every trainer, and notes what a trainer with rewards was given."""

    made: ClassVar[list[dict[str, Any]]] = []
    expected = sys.maxsize

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
        given = dict(zip(names, args, strict=False)) | kwargs
        if "reward_funcs" in given or "environment_factory" in given:
            Trainer.made.append(given)
        if len(Trainer.made) >= Trainer.expected:
            raise Enough


class Server2048:
    """Stands in for OpenEnv's server of 2048: a game of 6 x 6 that ends as OpenSpiel's does."""

    SIZE, GOAL = 6, 2048

    def reset(self) -> types.SimpleNamespace:
        self.tiles, self.dice = [0] * self.SIZE**2, random.Random(random.random())
        self._appear()
        self._appear()
        return self._seen(0.0)

    def step(self, action: Any) -> types.SimpleNamespace:
        before, self.tiles = self.tiles, self._moved(action.action_id)
        self._appear()
        return self._seen(float(sum(self.tiles) - sum(before)))

    def close(self) -> None: ...

    def _appear(self) -> None:
        place = self.dice.choice([n for n, tile in enumerate(self.tiles) if not tile])
        self.tiles[place] = 4 if self.dice.random() < 0.1 else 2

    def _moved(self, direction: int) -> list[int]:
        """Return the tiles after a move up, right, down or left."""
        size, tiles = self.SIZE, list(self.tiles)
        for line in range(size):
            places = [
                line + size * n if direction in (0, 2) else line * size + n for n in range(size)
            ]
            places = places if direction in (0, 3) else places[::-1]
            row, merged = [tiles[place] for place in places if tiles[place]], []
            while row:
                first = row.pop(0)
                merged.append(2 * row.pop(0) if row and row[0] == first else first)
            for place, tile in zip(places, [*merged, *[0] * size], strict=False):
                tiles[place] = tile
        return tiles

    def _seen(self, reward: float) -> types.SimpleNamespace:
        legal = [move for move in range(4) if self._moved(move) != self.tiles]
        done = not legal or self.GOAL in self.tiles
        state = types.SimpleNamespace(info_state=self.tiles, legal_actions=legal, done=done)
        return types.SimpleNamespace(observation=state, reward=reward)


class StandInModule(types.ModuleType):
    """A module that has every name: a class where it begins with a capital, else a `StandIn`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base = Trainer if name.endswith("Trainer") else StandIn
        value = type(name, (base,), {}) if name[0].isupper() else StandIn()
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `StandInModule`s: the first for REPLACED, the last for what a source's file lacks."""

    def __init__(self, folders: tuple[str, ...] = ()) -> None:
        self.folders = folders  # the files that may import what is not installed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parent = sys.modules.get(name.rpartition(".")[0], self)
        lacking = parent is self or isinstance(parent, StandInModule)
        wanted = lacking and self._asked_by_source() if self.folders else _replaced(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def _asked_by_source(self) -> bool:
        frame = sys._getframe(2)
        while frame and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return bool(frame) and frame.f_code.co_filename.startswith(self.folders)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _replaced(name: str) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in REPLACED)


def filled(kind: type, given: dict[str, Any]) -> Any:
    """Return an instance of a dataclass with its defaults, or with what a recipe gives."""
    made = kind.__new__(kind)
    if issubclass(kind, StandIn):
        vars(made).update(given)
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        value = given.get(field.name, value)
        vars(made)[field.name] = None if value is dataclasses.MISSING else value
    return made


def parser(recipe: dict[str, Any]) -> type:
    """Return what stands in for TrlParser and HfArgumentParser: it reads the recipe only."""

    class Parser(StandIn):
        def __init__(self, kinds: Any = (), *args: Any, **kwargs: Any) -> None:
            kinds = kinds if isinstance(kinds, (tuple, list)) else (kinds,)
            parsed = tuple(filled(kind, recipe) for kind in kinds)
            for name in ("parse_args_and_config", "parse_args_into_dataclasses"):
                setattr(self, name, lambda *args, **kwargs: parsed)

    return Parser


# In the form of gpt-oss: a source that asks the template how a reply to the user begins finds it.
TEMPLATE = """\
{% for m in messages %}<|start|>{{ m['role'] }}{{ ' to=user' if m['role'] == 'assistant' else '' }}\
<|message|>{{ m['content'] }}<|eom|>{% endfor %}\
{{ '<|start|>assistant' if add_generation_prompt else '' }}"""


def tokenizer(folder: Path) -> Any:
    """Load a small tokenizer that takes every message, as those of large models do."""
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    loaded.add_tokens(["<think>", "</think>"])
    loaded.chat_template = TEMPLATE
    apply = loaded.apply_chat_template

    def apply_chat_template(messages: Any, *args: Any, **kwargs: Any) -> Any:
        many = bool(messages) and isinstance(messages[0], list)
        plain = [[joined(m) for m in chat] for chat in (messages if many else [messages])]
        return apply(plain if many else plain[0], *args, **{"return_dict": False} | kwargs)

    loaded.apply_chat_template = apply_chat_template
    return loaded


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its parts, such as images, joined into a text."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part.get("text") or f"<|{part['type']}|>" for part in content)
    return message | {"content": content}


def auto_models() -> list[type]:
    """Return transformers' classes that load a model by its name."""
    import transformers

    names = [name for name in dir(transformers) if name.startswith("AutoModel")]
    return [kind for name in names if inspect.isclass(kind := getattr(transformers, name))]


def code_runners() -> types.ModuleType | None:
    """Return Unsloth's own functions that run a model's code: they need no GPU."""
    package = importlib.util.find_spec("unsloth_zoo")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "rl_environments.py"
    spec = importlib.util.spec_from_file_location("public_rl_environments", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def standing_in(
    folders: tuple[str, ...], shared: dict[str, Any], recipe: dict[str, Any]
) -> Iterator[None]:
    """Replace models, networks, trainers and programs while a source runs."""
    import datasets
    import huggingface_hub
    import numpy
    import transformers
    import trl

    tokenizer = shared["tokenizer"]

    def loaded(*args: Any, **kwargs: Any) -> Any:
        return tokenizer

    def processor(*args: Any, **kwargs: Any) -> Any:
        apply = tokenizer.apply_chat_template  # a processor's gives a text
        tokenizer.apply_chat_template = functools.partial(apply, tokenize=False)
        return tokenizer

    zeros = numpy.zeros

    def small_zeros(shape: Any, *args: Any, **kwargs: Any) -> Any:
        large = isinstance(shape, int) and shape > LARGE  # a buffer that only empties the cache
        return zeros(LARGE if large else shape, *args, **kwargs)

    patched: list[tuple[Any, str, Any]] = [
        (numpy, "zeros", small_zeros),
        *((datasets, name, shared["load_dataset"]) for name in ("load_dataset", "load_from_disk")),
        (datasets.fingerprint.Hasher, "hash", staticmethod(lambda value: uuid.uuid4().hex)),
        *((huggingface_hub, name, StandIn()) for name in ("login", "notebook_login")),
        *((trl, name, type(name, (StandIn,), {})) for name in dir(trl) if name.endswith("Config")),
        *((trl, name, type(name, (Trainer,), {})) for name in dir(trl) if name.endswith("Trainer")),
        (trl, "ModelConfig", type("ModelConfig", (StandIn, trl.ModelConfig), {})),
        (transformers, "HfArgumentParser", parser(recipe)),
        (trl, "TrlParser", parser(recipe)),
        *((trl, f"get_{name}", StandIn()) for name in OF_A_MODEL),
        (transformers.PreTrainedModel, "from_pretrained", StandIn()),
        *((kind, "from_pretrained", StandIn()) for kind in auto_models()),
        (transformers.AutoTokenizer, "from_pretrained", loaded),
        (transformers.AutoProcessor, "from_pretrained", processor),
        *((subprocess, name, StandIn()) for name in ("run", "call", "check_call", "check_output")),
        (subprocess, "Popen", StandIn),
        (os, "system", StandIn()),
    ]
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _replaced(name)}
    first, last = Finder(), Finder(folders)
    with contextlib.ExitStack() as stack:
        for owner, name, value in patched:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(mock.patch.object(sys, "meta_path", [first, *sys.meta_path, last]))
        _unsloth(tokenizer, shared["runners"], shared.get("pins", {}))
        yield
    for name in [name for name in sys.modules if _replaced(name)]:
        del sys.modules[name]
    sys.modules.update(kept)


def _unsloth(tokenizer: Any, runners: Any, pins: dict[str, str]) -> None:
    """Let Unsloth's loaders return a model's stand-in and a tokenizer, and its code runners run."""
    import unsloth
    import unsloth_zoo.utils

    # A source that asks which version of TRL there is means the one that it installs.
    unsloth_zoo.utils.Version = lambda name: packaging.version.Version(pins.get(name, name))

    for name in ("FastLanguageModel", "FastVisionModel", "FastModel"):
        getattr(unsloth, name).from_pretrained = lambda *args, **kwargs: (StandIn(), tokenizer)
    for name in getattr(runners, "__all__", ()):
        setattr(unsloth, name, getattr(runners, name))
    unsloth.launch_openenv = lambda port, process, **options: (port, process or Server2048())
    if importlib.util.find_spec("langid") is None:
        sys.modules["langid"] = types.SimpleNamespace(classify=language)


def language(text: str) -> tuple[str, float]:
    """Stand in for langid, for the languages that a source tells apart."""
    if re.search(r"[\u4e00-\u9fff]", text):
        return "zh", 0.0
    indonesian = r"\b(yang|dan|adalah|aku|kita|dengan|untuk|jumlah|jadi|ini|itu|dari)\b"
    return ("id" if re.search(indonesian, text, re.I) else "en"), 0.0
