"""Read what a GRPO run has logged, whoever wrote it and wherever it ran.

A `Log` has the metrics under TRL's present names, the completions if they were kept, and what is
known about the run. Nothing is guessed: a fact that a log neither says nor shows is left out.
"""

import ast
import io
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
# A metric as verl prints it.
PAIR = re.compile(r"([\w./-]+):(?:np\.\w+\()?(-?(?:\d[\d.e+-]*|nan|inf))\)?(?= - |\s*$)")
PRINTED = re.compile(r"\{'[^{}]*\}")  # a line as transformers prints it
BAR = re.compile(r"\b(\d+)/(\d+) \[\d+:")  # of its progress
CELL = re.compile(r"<t[dh][^>]*>\s*(.*?)\s*</t[dh]>", re.DOTALL)  # of its table
FEWEST = 3  # lines that make a log
LEAST_CAP = 64  # tokens; answers of fewer end by themselves, unless 16 divides their number
MOST = 1024  # completions in a step that are looked for
SETTINGS = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
SETTINGS += ("max_steps", "max_completion_length", "logging_steps")
WANTED = (
    "give TRL's output folder, its trainer_state.json, JSON lines, CSV, an executed notebook, what "
    "a trainer printed, a table of pandas, a trainer, or a run's folder (runs/NAME)"
)


class Log(NamedTuple):
    """Hold what a run has logged.

    source: Where the log was read, as text for people.
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
            trainer, or a table or a list of logged mappings.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: `what` holds no log of GRPO, or one with too few steps.
    """
    facts: dict[str, Any] = {}
    completions = None
    if hasattr(what, "state") and hasattr(what, "args"):
        source, lines, facts = type(what).__name__, what.state.log_history, of_trainer(what)
        completions = read_completions(Path(what.args.output_dir))
    elif isinstance(what, str | Path):
        source, lines, facts, completions = _read_path(Path(what).expanduser())
    else:
        is_table = isinstance(what, pd.DataFrame)
        source, lines = "a table" if is_table else "a list of lines", what
        lines = what.to_dict("records") if is_table else what
        if not isinstance(lines, Iterable):
            raise ValueError(f"{type(what).__name__} is no log: {WANTED}")
    lines = _of_one_run(renamed(line) for line in lines if isinstance(line, Mapping))
    if 0 < (count := sum("reward" in line for line in lines)) < FEWEST:
        raise ValueError(f"{source} has {count} lines with `reward`, and {FEWEST} are the fewest")
    if not count:
        keys = ", ".join(sorted({key for line in lines for key in line})[:12]) or "nothing"
        raise ValueError(f"{source} has no line with `reward`, but {keys}: {WANTED}")
    keys = dict.fromkeys(key for line in lines for key in line)
    rewards = [match[1] for key in keys if (match := REWARD.fullmatch(key))]
    facts = _completed(facts, lines, completions)
    for line in lines:  # a spread of 0 shows a silent group, if there is but one
        if "reward_std" in line:
            line.setdefault("frac_reward_zero_std", float(abs(line["reward_std"]) < 1e-9))
    return Log(source, lines, rewards, completions, facts)


def _of_one_run(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of one training in the order of its steps.

    Lines about something else are left out, such as a tracker's rows of timings, which hold no
    reward. If a training resumed from a checkpoint, or began anew, its lines replace the earlier
    lines of the same and of later steps.
    """
    whole: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        is_lost = math.isnan(line.get("reward", 0)) and math.isnan(line.get("loss", math.nan))
        if is_lost:
            line.pop("reward")
        if len(line) < 2 or (is_lost and not any(key.startswith("eval/") for key in line)):
            continue
        step = line.get("step", math.nan)
        line["step"] = number if math.isnan(step) else int(step)
        if whole and line["step"] < whole[-1]["step"]:
            whole = [each for each in whole if each["step"] < line["step"]]
        whole.append(line)
    return whole


# -- files


def _read_path(path: Path) -> tuple[str, list[Any], dict[str, Any], pd.DataFrame | None]:
    """Return (source, lines, facts, completions) of a file or a folder."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {WANTED}")
    folder = path if path.is_dir() else path.parent
    path = _log_of(path) if path.is_dir() else path
    text = path.read_text(encoding="utf-8", errors="replace")
    readers = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".ipynb": _notebook}
    reader = readers.get(path.suffix, _text)
    try:
        lines, facts = reader(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): {WANTED}") from None
    if path.name == "trainer_state.json" and folder.name.startswith("checkpoint-"):
        folder = folder.parent
    return str(path), lines, facts, read_completions(folder)


def _log_of(folder: Path) -> Path:
    """Return the path of a folder's metrics.jsonl, or else of its last trainer_state.json.

    transformers writes trainer_state.json last, so a checkpoint that has one is complete. The last
    checkpoint is that of the latest step, unless one that was written later belongs to another
    training, which logged other lines.

    Raises:
        FileNotFoundError: The folder has neither file.
    """
    for place in (folder, folder / "train"):
        if (place / "metrics.jsonl").is_file():
            return place / "metrics.jsonl"
        states = {}
        for path in (*place.glob("checkpoint-*/trainer_state.json"), place / "trainer_state.json"):
            with suppress(OSError, ValueError):  # a kill may have cut it
                states[path] = json.loads(path.read_text(encoding="utf-8"))
        if states:
            last = max(states, key=lambda path: states[path]["global_step"])
            newest = max(states, key=lambda path: path.stat().st_mtime_ns)
            lines, others = (states[path].get("log_history", []) for path in (newest, last))
            return last if all(line in others for line in lines[-1:]) else newest
    raise FileNotFoundError(
        f"{folder} has no checkpoint-*/trainer_state.json and no metrics.jsonl: {WANTED}. TRL "
        "writes the first with save_strategy='steps', and with trainer.save_state()"
    )


def _json(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read trainer_state.json, a list of lines under any name, or one list for each metric."""
    content = json.loads(text)
    if not isinstance(content, Mapping):
        return content, {}
    lists = {key: value for key, value in content.items() if isinstance(value, list) and value}
    of_lines = [value for value in lists.values() if isinstance(value[0], Mapping)]
    lines = content.get("log_history") or max(of_lines, key=len, default=[])
    if not lines:
        table = pd.DataFrame({key: pd.Series(value) for key, value in lists.items()})
        lines = table.to_dict("records")
    return lines, {"max_steps": content.get("max_steps", 0)}


def _json_lines(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read JSON lines, and leave out the last one if it was cut off."""
    *lines, last = [line for line in text.splitlines() if line.strip()] or [""]
    contents = [json.loads(line) for line in lines]
    with suppress(ValueError):
        contents.append(json.loads(last))
    return contents, {}


def _csv(text: str) -> tuple[list[Any], dict[str, Any]]:
    return pd.read_csv(io.StringIO(text)).to_dict("records"), {}


def _value(text: str) -> float | None:
    """Return the number that a cell of a table shows; None if it shows none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _text(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read what a trainer printed."""
    lines, facts = _printed(text)
    return lines, facts | _settings(text, text)


def _printed(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the last training's lines of printed output, and {"max_steps": number}.

    The value of max_steps is from the progress bar; it is 0 if none was printed.
    """
    is_over = False
    lines = [{key: _value(number) for key, number in PAIR.findall(line)} for line in _of_verl(text)]
    for part in PRINTED.findall(text):
        with suppress(ValueError, SyntaxError):  # a line that transformers has not written
            line = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", part))
            if isinstance(line, dict) and "reward" in renamed(line):
                lines, is_over = [] if is_over else lines, False
                lines.append(line)
            elif isinstance(line, dict) and "train_runtime" in line:
                is_over = True  # the next line with a reward is of another training
    bars = BAR.findall(text.rpartition("{'")[0]) or [(0, 0)]
    step, total = map(int, bars[-1])
    every = max(1, round(step / max(1, len(lines))))
    has_steps = lines and "step" in renamed(lines[0])
    lines = lines if has_steps else [{"step": n * every} | x for n, x in enumerate(lines, start=1)]
    return lines, {"max_steps": total}


def _of_verl(text: str) -> list[str]:
    return [line for line in text.splitlines() if " - critic/rewards/mean:" in line]


def _notebook(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read the longest log of training steps in a notebook, and the settings before it."""
    code, best, facts = "", [], {}
    for cell in json.loads(text).get("cells", ()):
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

    For a metric that was not logged in the first step, the table of transformers shows 0 in the
    first line and "No Log" in later ones; these zeros are left out.
    """
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        rows = [CELL.findall(row) for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)]
        names = [re.sub(r"\s*/\s*", "/", name) for name in rows[0]] if rows else []
        if "reward" not in names:
            continue
        lines = [dict(zip(names, row, strict=True)) for row in rows[1:] if len(row) == len(names)]
        absent = {name for line in lines for name, text in line.items() if text == "No Log"}
        yield [
            {k: v for k, v in line.items() if v != "No Log" and (place or k not in absent)}
            for place, line in enumerate(lines)
        ]


def _settings(code: str, printed: str) -> dict[str, Any]:
    """Return the settings in a notebook's code, and those that its trainer printed."""
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
    """Return a line whose metrics are renamed to TRL's present names."""
    result: dict[str, Any] = {}
    if isinstance(inner := line.get("data"), Mapping):  # as verl writes JSON lines
        line = {**line, **inner}
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


def of_trainer(trainer: Any) -> dict[str, Any]:
    """Return a trainer's settings, max_steps, completions per step, and reward weights."""
    args, weights = trainer.args, map(float, trainer.reward_weights)
    facts = {name: getattr(args, name) for name in SETTINGS} | {
        "max_steps": trainer.state.max_steps
    }
    rows, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
    facts["completions"] = rows * parts * args.world_size
    return facts | {"weights": dict(zip(trainer.reward_func_names, weights, strict=True))}


def _completed(
    facts: dict[str, Any], lines: Sequence[dict[str, Any]], table: pd.DataFrame | None
) -> dict[str, Any]:
    """Return the facts, completed with those that the log itself shows."""
    facts = dict(facts)
    steps = [line["step"] for line in lines if "reward" in line]
    between = [late - early for early, late in pairwise(steps) if late > early]
    facts["logging_steps"] = int(np.median(between)) if between else 1
    if table is not None and len(table) and "step" in table:
        facts["completions"] = int(table.groupby("step").size().median())
    if "completions" not in facts:
        batch, group = facts.get("per_device_train_batch_size", 0), facts.get("num_generations", 1)
        if batch:  # Unsloth raises it to a whole group
            batch = max(batch, group) * facts.get("gradient_accumulation_steps", 1)
        count = batch or _smallest(lines, facts["logging_steps"])
        facts["completions"] = max(count, group) if count else 0
    facts.setdefault("max_completion_length", _cap(lines))
    return facts


def _cap(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the cap of completions that the mean lengths reveal [tokens]; 0 if they reveal none.

    If several steps have the same mean length, the highest of all, it is the cap: all completions
    of these steps were truncated there.
    """
    lengths = [line[LENGTH] for line in lines if line.get(LENGTH, 0) > 0]
    highest = float(max(lengths, default=0))
    is_often = lengths.count(highest) >= max(FEWEST, len(lengths) / 20)
    is_cap = highest.is_integer() and (highest >= LEAST_CAP or highest % 16 == 0)
    return int(highest) if is_often and is_cap else 0


def _smallest(lines: Iterable[Mapping[str, Any]], every: int) -> int:
    """Return how many completions a step has, judging by the logged shares; 0 if they do not tell.

    Every share of n completions is a multiple of 1/n.
    """
    shares = {line.get("completions/clipped_ratio", math.nan) for line in lines}
    shares = np.array([share for share in shares if 0 < share < 1])
    if len(shares) < FEWEST:
        return 0
    for count in range(2, MOST):
        if np.abs(shares * count - np.round(shares * count)).max() < 1e-3:
            return max(1, round(count / every))
    return 0
