"""Read what a reward's code says: the columns it reads, its strings, and its regular expressions.

No source code is parsed: strings are found in the compiled code, in the globals, closures, defaults
and attributes that the code uses, and in the helpers of the same module that it calls.

A regular expression shows the form that its author wants, with tags and words in any language: each
part that may be any text is a place for the reasoning or for the answer. A reward may also pay for
a text that it looks for, such as "=", a password or `Step \\d+`, whatever the answer is.
"""

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from grpo_nb.rewards import Reward
from grpo_nb.rewards.contract import columns_read, parameters_of, unwrapped
from grpo_nb.rewards.load import names_in

DEPTH, MANY = 8, 200  # how deep values are followed, and how many items of a collection


def strings_of(func: Callable[..., Any]) -> list[str]:
    """Return the strings that a reward mentions, regular expressions included, each once.

    >>> tag = "<answer>"
    >>> def right(completions, **kwargs):
    ...     return [float(tag in text and kwargs["gold"][0] in text) for text in completions]
    >>> {"<answer>", "gold"} <= set(strings_of(right))
    True
    """
    leaves = _walked(func, _module(func), set(), 0)
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, str)))


def names_used(func: Callable[..., Any]) -> set[str]:
    """Return the names that are used in the code of a reward and of its helpers.

    >>> import time
    >>> def now(): return time.time()
    >>> def late(completions, **kwargs): return [now()] * len(completions)
    >>> "time" in names_used(late)
    True
    """
    functions = [f for f in _walked(func, _module(func), set(), 0) if not isinstance(f, str)]
    return names_in(func).union(*map(names_in, functions))


def _module(func: Any) -> str:
    return getattr(unwrapped(func), "__module__", "") or ""


def _walked(value: Any, module: str, visited: set[int], depth: int) -> Iterator[str | FunctionType]:
    """Yield the strings and functions in a value and, by `_parts`, in its parts."""
    if isinstance(value, str):
        yield value
        return
    if depth > DEPTH or id(value) in visited:
        return
    visited.add(id(value))
    parts = _parts(value, module, depth)
    if isinstance(value, FunctionType) and parts:
        yield value
    for part in parts:
        if not isinstance(part, int | float):
            yield from _walked(part, module, visited, depth + 1)


def _parts(value: Any, module: str, depth: int) -> Sequence[Any]:
    """Return the parts of a value that a reward may use.

    A function of another module has parts only down to depth 2.
    """
    if isinstance(value, re.Pattern):
        return [value.pattern] if isinstance(value.pattern, str) else []
    if isinstance(value, CodeType):
        return list(value.co_consts)
    if isinstance(value, dict):
        return [part for pair in list(value.items())[:MANY] for part in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)[:MANY]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Reward):
        return [value.score, value.options, [*value.columns, *value._optional]]
    if isinstance(value, FunctionType):
        if depth > 2 and value.__module__ != module:
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = names_in(value) & value.__globals__.keys()
        return [value.__code__, cells, value.__defaults__, value.__kwdefaults__] + [
            value.__globals__[name] for name in sorted(names)
        ]
    if hasattr(type(value), "__call__") and _module(type(value)) == module:  # noqa: B004
        members = [*vars(type(value)).values()] if not isinstance(value, type) else []
        return [getattr(value, "__dict__", {}), *members, getattr(value, "__wrapped__", None)]
    return [value.__wrapped__] if hasattr(value, "__wrapped__") else []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises if the closure's variable is not set yet)
    except ValueError:
        return False
    return True


def columns_of(func: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return which of the dataset's columns a reward reads, in the dataset's order."""
    required, optional, takes_any = parameters_of(func)
    is_lookup = takes_any and not isinstance(func, Reward)
    names = {*required, *optional, *(strings_of(func) if is_lookup else ())}
    return [name for name in columns if name in names]


def mentions(func: Callable[..., Any], name: str) -> bool:
    """Return whether a reward reads an argument of TRL's, such as `completion_ids`."""
    required, optional, _ = parameters_of(func)
    is_lookup = name not in (*required, *optional) and not isinstance(func, Reward)
    return name in strings_of(func) if is_lookup else name in (*required, *optional)


def missing_columns(func: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return the columns that a reward's signature needs and the dataset lacks."""
    return [name for name in columns_read(func, required=True) if name not in columns]


def accepted(func: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments that a reward takes; None if it accepts every name.

    >>> accepted(lambda completions, answer: [0.0]) == {"completions", "answer"}
    True
    """
    required, optional, takes_any = parameters_of(func)
    return None if takes_any else {*required, *optional}


# -- forms, read from patterns

WILD, SPACE = "\0", "\1"  # stand for a part that may be any text, and for space that may be there
LEAST = 3  # times that a part is repeated in a form
MARKS = re.compile(r"[<>\[\]{}#`\\\n:]")  # of what stands around an answer
EXAMPLES = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " "}
REPEATS = 40  # of a part in a sample
FORMS = 12  # that are read from the patterns of a set of rewards
# No sentence holds one of these.
SEARCH = re.compile(r"\\[sdwSDW]|\.[*+]|\[\^|\(\?|\[\w-\w|\][*+{]|\)\$")
_parser = sys.modules["re._parser"]  # the module that `re.compile` itself parses with


def forms_in(strings: Iterable[str]) -> list[str]:
    """Return the forms that the patterns among the strings describe, those with most parts first.

    Args:
        strings: The strings of the rewards' code.

    >>> forms_in([r"^<t>.+?</t>\\s*Cevap\\s*:\\s*([^\\n]+)$", r"-?\\d+", "no pattern"])[:1]
    ['<t>{reasoning}</t>Cevap: {answer}']
    """
    samples = [text for text in map(sample_of, filter(SEARCH.search, strings)) if WILD in text]
    samples = [text for text in samples if text.replace(WILD, "").strip()]  # `\d+` tells nothing
    forms = [
        form
        for text in sorted(samples, key=lambda text: (-text.count(WILD), -len(text)))
        for form in _filled(text)
    ]
    return list(dict.fromkeys(forms))[:FORMS]


def _filled(text: str) -> Iterator[str]:
    """Yield forms in which the last WILD of the text is the answer.

    If nothing follows it, the WILD before it is tried as the answer, too.
    """
    parts = text.split(WILD)
    for place in (len(parts) - 1, len(parts) - 2)[: 1 if parts[-1].strip() else 2]:
        if place > 0:
            before, after = "{reasoning}".join(parts[:place]), "".join(parts[place:])
            yield f"{before}{{answer}}{after}"


def sample_of(pattern: str, text: str = WILD) -> str:
    r"""Return a short text that a pattern matches; "" if there is none.

    Args:
        pattern: The regular expression.
        text: What stands for any text. With WILD, optional parts are left out, and a choice of
            several words counts as any text.

    >>> sample_of(r"(?i)Answer[:=]\s*(yes|no)\b")
    'Answer: \x00'
    >>> sample_of(r"<a>\s*([\s\S]*?)</a>"), sample_of(r"Step \d+(, \w)?", "a")
    ('<a>\x00</a>', 'Step 1, a')
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            sample = _sample(_parser.parse(pattern), text)
    except (re.error, RecursionError, OverflowError):
        return ""
    sample = re.sub(rf"(?<=[\w:=]){SPACE}+(?={WILD})", " ", sample).replace(SPACE, "")
    return re.sub(rf"{WILD}+([-./:]{WILD}+)*", WILD, sample)  # decimals, a date are one answer


def _sample(parts: Iterable[tuple[Any, Any]], text: str) -> str:
    return "".join(_of_one(str(kind), value, text) for kind, value in parts)


def _of_one(kind: str, value: Any, text: str) -> str:
    """Return a text that one part of a regular expression matches; "" for lookarounds."""
    is_form = text == WILD
    if kind == "LITERAL":
        return chr(value)
    if kind == "SUBPATTERN":
        return _sample(value[-1], text)
    if kind == "BRANCH":  # one of several words is as good as any text
        texts = [_sample(each, text) for each in value[1]]
        is_any = is_form and all(texts) and not any(map(MARKS.search, texts))
        return WILD if is_any else texts[0]
    if kind.endswith("_REPEAT"):
        least, most, part = value
        one = _sample(part, text)
        if not is_form:
            return one * min(max(least, 1), most, REPEATS)
        if one == "\n" and not least:
            return SPACE
        return WILD if WILD in one and most > 1 else one * min(least, LEAST)
    if kind == "RANGE":
        return chr(value[0])
    if kind == "CATEGORY" and not is_form:
        return EXAMPLES.get(str(value), text)
    if kind == "IN" and not is_form:
        return _sample(value[:1], text)
    if kind == "IN":
        if {str(one) for one, _ in value} == {"LITERAL"}:
            first = chr(value[0][1])
            return text if first.isalnum() else first
        members = " ".join(str(each) for _, each in value)
        return {"CATEGORY_SPACE": "\n", "CATEGORY_NOT_WORD": ": "}.get(members, text)
    return text if kind in ("ANY", "NOT_LITERAL", "CATEGORY", "NEGATE") else ""


# -- texts that the code looks for

LONGEST, MOST = 40, 12  # characters of a string, and how many strings are tried
TIMES = 4  # how often a string is repeated
FAMILY = "own words"
READ = {"role", "content", "assistant", "user", "system", "type", "text", "utf-8"}  # of chats
PATTERN = re.compile(r"[\\\[\](){}|*+^$]")


def words_of(funcs: Sequence[Callable[..., Any]], names: Collection[str]) -> list[str]:
    """Return the short texts that the rewards' code looks for, each once.

    Args:
        funcs: The rewards.
        names: Names of columns and rewards, which are left out.
    """
    strings = dict.fromkeys(text for func in funcs for text in strings_of(func))
    names = {*names, *READ}
    texts = [_text_of(text) for text in strings if len(text) <= LONGEST and text not in names]
    return list(dict.fromkeys(text for text in texts if text.strip()))[:MOST]


def stuffed(words: Sequence[str], between: str = " ") -> dict[str, str]:
    """Return {attack name: text}: each string repeated, all strings once, and all repeated."""
    whole = " ".join(words)
    texts = {f"{word!r} repeated": between.join([word] * TIMES) for word in words}
    return texts | {"all of its strings": whole, "all, repeated": between.join([whole] * TIMES)}


def _text_of(text: str) -> str:
    """Return the text; for a regular expression, return an example that it matches."""
    sample = sample_of(text, "a") if PATTERN.search(text) else ""
    return sample if sample and re.search(text, sample) else text
