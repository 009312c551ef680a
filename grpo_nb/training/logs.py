"""Read what a GRPO run has logged, whoever wrote it and wherever it ran.

A `Log` has the metrics under TRL's present names, the completions if they were kept, and what is
known about the run. Nothing is guessed: what a log does not say is not in it.
"""

import ast
import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.files import read_yaml

KEYS = read_yaml(Path(__file__).with_name("log_keys.yaml"))
ALIASES = {alias: key for key, names in KEYS["aliases"].items() for alias in names}
REWARD = re.compile(r"rewards/(?!chosen|rejected|margins|accuracies)([^/]+)(?:/mean)?")
PARQUET = "completions/*.parquet"
LENGTH = "completions/mean_length"
# A line as transformers prints it, or a progress bar before it.
PRINTED = re.compile(r"(?P<line>\{'[^{}]*\})|\b(?P<step>\d+)/(?P<all>\d+) \[\d+:")
CELL = re.compile(r"<t[dh][^>]*>\s*(.*?)\s*</t[dh]>", re.DOTALL)  # of transformers' table
FEWEST = 3  # lines that make a log
MOST = 1024  # completions in a step that are looked for
SETTINGS = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
SETTINGS += ("max_steps", "max_completion_length", "logging_steps")
WANTED = (
    "give TRL's output folder, its trainer_state.json, JSON lines, CSV, an executed notebook, what "
    "a trainer printed (.log, .txt), or a trainer"
)


class Log(NamedTuple):
    """Hold what a run has logged.

    source: Where it was read, for people to read.
    lines: One mapping for each logged step or evaluation, with "step".
    rewards: The names of the rewards.
    completions: One row for each completion: step, prompt, completion, each reward, advantage;
        None if none were kept.
    facts: What is known of the run: any of `SETTINGS`, "completions" (in a step) and "weights".
    """

    source: str
    lines: list[dict[str, Any]]
    rewards: list[str]
    completions: pd.DataFrame | None
    facts: dict[str, Any]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of training steps."""
        return [line for line in self.lines if "reward" in line]


def read_log(what: Any) -> Log:
    """Read a run's log.

    Args:
        what: A folder (TRL's `output_dir`, a checkpoint, a run of ours), a file
            (trainer_state.json, JSON lines, CSV, an executed notebook, what a trainer printed), a
            trainer, or a list of logged mappings.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: It holds no log of GRPO.
    """
    facts: dict[str, Any] = {}
    completions = None
    if hasattr(what, "state") and hasattr(what, "args"):
        source, lines = f"{type(what).__name__}", list(what.state.log_history)
        facts = of_arguments(what.args) | of_trainer(what)
        completions = read_completions(Path(what.args.output_dir))
    elif isinstance(what, str | Path):
        path = Path(what).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: {WANTED}")
        source, lines, facts, completions = _read_path(path)
    else:
        source, lines = "a list of lines", list(what)
    lines = [renamed(line) for line in lines if isinstance(line, Mapping)]
    lines = [line for line in lines if len(line) > 1]
    if sum("reward" in line for line in lines) < FEWEST:
        keys = ", ".join(sorted({key for line in lines for key in line})[:12]) or "nothing"
        raise ValueError(f"{source} has no `reward` in {FEWEST} lines, but {keys}: {WANTED}")
    _number_lines(lines)
    _silent_steps(lines)
    rewards = _reward_names(lines, completions)
    return Log(source, lines, rewards, completions, _completed(facts, lines, completions, rewards))


# -- files


def _read_path(path: Path) -> tuple[str, list[Any], dict[str, Any], pd.DataFrame | None]:
    """Return (source, lines, facts, completions) of a file or a folder."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        path = _log_of(path)
    readers = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".ipynb": _notebook}
    readers |= dict.fromkeys((".log", ".txt", ".out", ".md"), _text)
    if path.suffix not in readers:
        raise ValueError(f"{path} is no log: {WANTED}")
    try:
        lines, facts = readers[path.suffix](path)
    except (ValueError, csv.Error) as error:  # of json, of pandas, of an encoding
        raise ValueError(f"{path} cannot be read ({error}): {WANTED}") from None
    if path.name == "trainer_state.json" and folder.name.startswith("checkpoint-"):
        folder = folder.parent
    return str(path), lines, facts, read_completions(folder)


def _log_of(folder: Path) -> Path:
    """Return the log in a folder: that of the newest checkpoint which is whole.

    transformers writes trainer_state.json last, so a checkpoint that has one is whole.

    Raises:
        FileNotFoundError: The folder has none.
    """
    for place in (folder, folder / "train"):
        if (place / "metrics.jsonl").is_file():
            return place / "metrics.jsonl"
        states = [*place.glob("checkpoint-*/trainer_state.json"), *place.glob("trainer_state.json")]
        states = [path for path in states if _is_json(path)]
        if states:
            return max(states, key=lambda path: json.loads(path.read_text())["global_step"])
    raise FileNotFoundError(
        f"{folder} has no checkpoint-*/trainer_state.json and no metrics.jsonl: {WANTED}. TRL "
        "writes the first with save_strategy='steps', and with trainer.save_state()"
    )


def _is_json(path: Path) -> bool:
    try:
        return "global_step" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _json(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Read trainer_state.json, or a list of lines."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, Mapping):
        lines = content.get("log_history") or content.get("history") or []
        facts = {"max_steps": content["max_steps"]} if content.get("max_steps") else {}
        return list(lines), facts
    return list(content), {}


def _json_lines(path: Path) -> tuple[list[Any], dict[str, Any]]:
    texts = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(text) for text in texts if text.strip()], {}


def _csv(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Read a table, of W&B's too: its charts name columns "RUN - KEY" and "RUN - KEY__MIN"."""
    table = pd.read_csv(path, sep=None, engine="python", encoding="utf-8-sig")
    table = table.select_dtypes("number").rename(columns=lambda name: name.rpartition(" - ")[2])
    records = table.loc[:, ~table.columns.str.endswith(("__MIN", "__MAX"))].to_dict("records")
    return [{key: v for key, v in line.items() if not pd.isna(v)} for line in records], {}


def _value(text: str) -> float | None:
    """Return the number that a cell of a table shows; None if it shows none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _text(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Read what a trainer printed."""
    printed = path.read_text(encoding="utf-8", errors="replace")
    lines, facts = _printed(printed)
    return lines, facts | _settings(printed, printed)


def _printed(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines that transformers printed, with the steps that its progress bar showed."""
    lines, places, place = [], [], (0, 0)
    for match in PRINTED.finditer(text):
        if not match["line"]:
            place = (int(match["step"]), int(match["all"]))
            continue
        with suppress(ValueError, SyntaxError):  # a line that transformers has not written
            line = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", match["line"]))
            if isinstance(line, dict) and "reward" in renamed(line):
                lines.append(line)
                places.append(place)
    if not lines or not places[-1][0]:
        return lines, {}
    last, total = places[-1]
    steps = [step for step, whole in places if whole == total]
    if len(set(steps)) < len(lines):  # the bar was printed apart from the lines
        every = max(1, round(last / len(lines)))
        steps = range(every, every * len(lines) + 1, every)
    numbered = [{**line, "step": step} for line, step in zip(lines, steps, strict=True)]
    return numbered, {"max_steps": total}


def _notebook(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Read the longest log of training steps in a notebook, and the settings before it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    code, best, facts = "", [], {}
    for cell in content.get("cells", ()):
        code += "\n" + "".join(cell.get("source", "")) if cell.get("cell_type") == "code" else ""
        printed = "\n".join(_outputs(cell))
        for lines, extra in (*((table, {}) for table in _tables(printed)), _printed(printed)):
            if len(lines) > len(best):
                best, facts = lines, extra | _settings(code, printed)
    return best, facts


def _outputs(cell: Mapping[str, Any]) -> Iterable[str]:
    for output in cell.get("outputs", ()):
        yield "".join(output.get("text", ""))
        data = output.get("data", {})
        yield "".join(data.get("text/html", data.get("text/plain", "")))


def _tables(html: str) -> Iterable[list[dict[str, Any]]]:
    """Yield the lines of each table that has a reward.

    The table of transformers shows 0 in the first line, and "No Log" afterwards, for what was not
    logged in its first step: these zeros are left out.
    """
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        rows = [CELL.findall(row) for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)]
        names = [re.sub(r"\s*/\s*", "/", name) for name in rows[0]] if rows else []
        if "reward" not in names:
            continue
        cells = [row for row in rows[1:] if len(row) == len(names)]
        pairs = [pair for row in cells for pair in zip(names, row, strict=True)]
        absent = {name for name, text in pairs if text == "No Log"}
        lines = []
        for row in cells:
            values = {n: _value(text) for n, text in zip(names, row, strict=True)}
            line = {name: value for name, value in values.items() if value is not None}
            lines.append({k: v for k, v in line.items() if k not in absent or lines})
        yield lines


def _settings(code: str, printed: str) -> dict[str, Any]:
    """Return the settings in a notebook's code, and what its trainer printed of them."""
    facts: dict[str, Any] = {}
    for name in SETTINGS:
        if matches := re.findall(rf"^[^#\n]*\b{name}\s*=\s*(\d+)\b", code, re.MULTILINE):
            facts[name] = int(matches[-1])
    if matches := re.findall(r"Total (?:train )?batch size \([^)]*\) = ([\d,]+)", printed):
        facts["completions"] = int(matches[-1].replace(",", ""))
    if matches := re.findall(r"\[\s*\d+/(\d+) ", printed):
        facts["max_steps"] = int(matches[-1])
    return facts


def read_completions(folder: Path) -> pd.DataFrame | None:
    """Return what TRL's `log_completions` wrote below a folder; None if there is nothing."""
    files = [path for place in (folder, folder / "train") for path in place.glob(PARQUET)]
    if not files:
        return None
    return pd.concat([pd.read_parquet(file) for file in sorted(files)], ignore_index=True)


# -- names and facts


def renamed(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line under TRL's present names."""
    result: dict[str, Any] = {}
    is_evaluation = any(str(key).startswith(("eval_", "eval/")) for key in line)
    for key, value in line.items():
        name = re.sub(r"\s*/\s*", "/", str(key)).removeprefix("train/")
        if name.startswith("eval_"):
            name = "eval/" + name.removeprefix("eval_")
        name = ALIASES.get(name, name) if ALIASES.get(name) not in line else name
        if REWARD.fullmatch(name) and not name.endswith("/mean"):
            name += "/mean"
        if isinstance(value, str):
            value = _value(value)
        result[name] = math.nan if value is None else value
    if is_evaluation and "loss" not in result:
        result.pop("reward", None)
    return result


def _number_lines(lines: list[dict[str, Any]]) -> None:
    """Give each line its step, where the log has none."""
    for number, line in enumerate(lines, start=1):
        line.setdefault("step", number)
        line["step"] = int(line["step"])


def _silent_steps(lines: list[dict[str, Any]]) -> None:
    """Add the share of silent groups where a log lacks it, as far as a spread of 0 shows it."""
    for line in lines:
        if "frac_reward_zero_std" not in line and "reward_std" in line:
            line["frac_reward_zero_std"] = float(abs(line["reward_std"]) < 1e-9)


def _reward_names(lines: Iterable[Mapping[str, Any]], table: pd.DataFrame | None) -> list[str]:
    """Return the rewards' names, in the order of the completions' columns if there are any."""
    keys = dict.fromkeys(key for line in lines for key in line)
    names = dict.fromkeys(match[1] for key in keys if (match := REWARD.fullmatch(key)))
    if table is None:
        return list(names)
    first = [name for name in table.columns if name in names]
    return [*first, *(name for name in names if name not in first)]


def of_arguments(args: Any) -> dict[str, Any]:
    """Return the facts in a GRPOConfig."""
    facts = {name: getattr(args, name, None) for name in SETTINGS}
    facts = {name: value for name, value in facts.items() if value and value > 0}
    world = getattr(args, "world_size", 1) or 1
    batch = facts.get("per_device_train_batch_size", 0)
    if batch:
        facts["completions"] = batch * facts.get("gradient_accumulation_steps", 1) * world
    return facts


def of_trainer(trainer: Any) -> dict[str, Any]:
    """Return the facts that a trainer knows beyond its arguments."""
    names = getattr(trainer, "reward_func_names", [])
    pairs = zip(names, map(float, getattr(trainer, "reward_weights", [])), strict=False)
    total = getattr(trainer.state, "max_steps", 0)
    return {"weights": dict(pairs)} | ({"max_steps": total} if total else {})


def _completed(
    facts: dict[str, Any],
    lines: Sequence[dict[str, Any]],
    table: pd.DataFrame | None,
    rewards: Sequence[str],
) -> dict[str, Any]:
    """Return the facts with those that the log itself shows."""
    facts = dict(facts)
    steps = [line["step"] for line in lines if "reward" in line]
    between = [late - early for early, late in pairwise(steps) if late > early]
    facts["logging_steps"] = int(np.median(between)) if between else 1
    if table is not None and len(table) and "step" in table:
        facts["completions"] = int(table.groupby("step").size().median())
    if "max_completion_length" not in facts and (cap := _cap(lines)):
        facts["max_completion_length"] = cap
    if "completions" not in facts:
        batch, group = facts.get("per_device_train_batch_size"), facts.get("num_generations", 1)
        if batch:  # Unsloth raises it to a whole group
            batch = max(batch, group) * facts.get("gradient_accumulation_steps", 1)
        facts["completions"] = batch or _smallest(lines, facts["logging_steps"])
    if "weights" not in facts:
        facts["weights"] = _weights(lines, rewards)
    return facts


def _cap(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the cap of completions that their mean length shows; 0 if it shows none.

    A mean that is the highest of all, again and again, is that of completions all cut there.
    """
    lengths = [line[LENGTH] for line in lines if line.get(LENGTH, 0) > 0]
    highest = float(max(lengths, default=0))
    is_often = lengths.count(highest) >= max(FEWEST, len(lengths) / 20)
    return int(highest) if is_often and highest.is_integer() else 0


def _smallest(lines: Iterable[Mapping[str, Any]], every: int) -> int:
    """Return how many completions a step has, from the shares that it logs; 0 if they do not tell.

    A share of n completions is a multiple of 1/n.
    """
    shares = {line.get("completions/clipped_ratio", math.nan) for line in lines}
    shares = np.array([share for share in shares if 0 < share < 1])
    if len(shares) < FEWEST:
        return 0
    for count in range(2, MOST):
        if np.abs(shares * count - np.round(shares * count)).max() < 1e-3:
            return max(1, round(count / every))
    return 0


def _weights(lines: Iterable[Mapping[str, Any]], rewards: Sequence[str]) -> dict[str, float]:
    """Return the weights with which the rewards' means give the total; {} if none do."""
    keys = [f"rewards/{name}/mean" for name in rewards]
    rows = [[line.get(key, math.nan) for key in (*keys, "reward")] for line in lines]
    array = np.array([row for row in rows if all(map(math.isfinite, row))], dtype=float)
    if not keys or len(array) <= len(keys):
        return {}
    weights, _, rank, _ = np.linalg.lstsq(array[:, :-1], array[:, -1], rcond=1e-6)
    if rank < len(keys):  # a reward that is always 0 has no weight to be seen
        plain = array[:, :-1].sum(axis=1)
        weights = np.ones(len(keys)) if np.abs(plain - array[:, -1]).max() < 1e-3 else weights
    gap = np.abs(array[:, :-1] @ weights - array[:, -1]).max()
    scale = max(1e-6, np.ptp(array[:, -1]))
    return dict(zip(rewards, weights.round(4).tolist(), strict=True)) if gap < 0.05 * scale else {}
