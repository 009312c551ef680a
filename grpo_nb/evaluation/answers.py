"""`python -m grpo_nb answer`: a file of questions answered by a run's model, a JSON line a row.

Lines are appended a batch at a time. A run that was killed goes on at the batch it was in, and
writes what an uninterrupted one would have; beside the target lies what it was begun with.
"""

import json
import math
from collections import Counter
from contextlib import closing
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from grpo_nb.data import sources
from grpo_nb.data.validate import LONG, TEMPLATE, Fault, row_to_ask
from grpo_nb.export import check_complete, trained_paths
from grpo_nb.models import Engine, open_engine
from grpo_nb.models.chat import count_tokens, find_model, load_tokenizer
from grpo_nb.reward_lab import Bench, fingerprint
from grpo_nb.rewards import RewardSet, load_preset
from grpo_nb.runs import Run, refuse_unknown, sha256, write_json
from grpo_nb.runs.config import DataConfig, RunConfig
from grpo_nb.runs.files import read_json

DATA_SETTINGS = {"question_column", "answer_column", "answer_format", "answer_kind"}
DATA_SETTINGS |= {"extra_columns", "system_prompt"}
MODELS = ("merged", "adapter", "base")
Line = dict[str, Any]


class Sampling(NamedTuple):
    """How a file is answered.

    temperature: 0 is greedy.
    seed: Of the sampling; each batch starts from one of its own.
    batch_size: Rows answered and written at once.
    """

    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 64


GREEDY = Sampling()


def answer_file(
    run: Run,
    source: Path,
    target: Path,
    *,
    model: str = "merged",
    question_column: str = "",
    answer_column: str = "",
    sampling: Sampling = GREEDY,
    engine: str = "detect",
) -> str:
    """Ask every row of a file, going on where a call with the same settings was cut off.

    A line of the target: row (its number in the source), question, completion, answer (as
    extracted), tokens, truncated; where the row has a reference answer also
    reference (that answer), each reward, and reward (their weighted total). What cannot be asked
    has a `fault` alone; a reference answer that cannot be used is one as well, beside the answer.

    Args:
        source: CSV, TSV, JSON, JSON lines or Parquet.
        target: JSON lines; `<target>.settings.json` beside it says what it was begun with.
        model: "merged", or "adapter" or "base" in the weights of the training.
        question_column: Default: as in the run's data.
        answer_column: Reference answers; default: as in the run's data, where the source has it.
        engine: As `open_engine` takes it.

    Returns:
        A line for the reader: how many rows, how many faults, mean scores.

    Raises:
        FileNotFoundError: No such source, or no such model in the run.
        ValueError: No row can be asked, the target was begun with other settings, or the merged
            model is of an earlier training.
        RuntimeError: Another process writes it.
    """
    if sampling.batch_size < 1:
        raise ValueError(f"batch_size {sampling.batch_size}: answer at least one row at a time")
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        raise ValueError(f"temperature {sampling.temperature}: give 0 for greedy, or more")
    config, weights = run.config(), weights_of(run, model)
    preset = load_rewards(config)
    data = _questions(config, preset, source, question_column, answer_column)
    total = _count(data, answer_column)
    begun = _settings(config, data, model, weights, sampling) | {"engine": engine}
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = run.lock(f".{target.name}.lock")
    try:
        done = _resume(target, begun, total)
        if done < total:
            bench = Bench(preset, config.train, load_tokenizer(weights["model_path"]))
            with closing(open_engine(**weights, engine=engine)) as opened:
                _write(target, _Asker(config, data, opened, bench, sampling), done, total)
    finally:
        lock.release(force=True)
    return _summary(target, preset.names)


def _questions(
    config: RunConfig, preset: RewardSet, source: Path, question: str, answer: str
) -> DataConfig:
    """The run's data settings, for this file."""
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file: give a table of questions")
    change = {"source": str(source.resolve()), "max_rows": 0, "sft_rows": 0}
    change["question_column"] = question or config.data.question_column
    change["answer_column"] = answer or config.data.answer_column
    change["system_prompt"] = system_prompt(config, preset)
    return config.data.model_copy(update=change)


def weights_of(run: Run, model: str) -> dict[str, Any]:
    """What `open_engine` loads.

    Args:
        run: It was trained.
        model: "merged", "adapter" or "base".

    Raises:
        ValueError: The merged model is of an earlier training.
        FileNotFoundError: No complete merged model, or no adapter.
    """
    refuse_unknown("model", model, list(MODELS))
    if model == "merged":
        run.refuse_stale()
        folder = str(check_complete(run / "model/merged").resolve())
        return {"model_path": folder, "adapter": None, "quantization": "16bit"}
    config = run.config()
    base, policy, adapter = check_trained(run, config)
    path, adapter = (base, None) if model == "base" else (policy, adapter)
    return {"model_path": path, "adapter": adapter, "quantization": config.model.quantization}


def _count(data: DataConfig, answer_column: str) -> int:
    """Rows of the source; the first of them must hold a question that can be asked."""
    batches = sources.read(data)
    first, faults = next(batches, []), []
    for number, raw in first:
        try:
            row_to_ask(number, raw, data)
            break
        except Fault as fault:
            faults.append(fault)
    else:
        why = faults[0] if faults else "it holds no rows"
        raise ValueError(f"{data.source}: nothing to ask: {why}")
    columns = dict.fromkeys(name for _, raw in first if isinstance(raw, dict) for name in raw)
    if answer_column and answer_column not in columns:
        known = ", ".join(map(str, columns))
        raise ValueError(f"{data.source} has no column {answer_column!r}; it has {known}")
    return len(first) + sum(map(len, batches))


def _settings(
    config: RunConfig, data: DataConfig, model: str, weights: dict, sampling: Sampling
) -> dict[str, Any]:
    """All that the lines depend on; the weights by their digests, wherever they lie."""
    folders = [Path(find_model(weights["model_path"])), *filter(None, [weights["adapter"]])]
    files = sorted(file for folder in folders for file in folder.glob("*.safetensors"))
    return {
        "source": sha256(Path(data.source)),
        "model": model,
        "model_path": config.model.model_path,  # a hub name has no files to digest here
        "quantization": weights["quantization"],
        "weights": [sha256(file) for file in files],
        **data.model_dump(mode="json", include=DATA_SETTINGS),
        "max_completion_length": config.train.max_completion_length,
        "rewards": fingerprint(load_rewards(config)),
        **sampling._asdict(),
    }


def _resume(target: Path, begun: dict[str, Any], total: int) -> int:
    """Rows that are answered already; the target is cut back to the last whole batch."""
    beside = target.with_name(f"{target.name}.settings.json")
    if not target.exists():
        write_json(beside, begun)
        return 0
    if not beside.exists():
        raise ValueError(f"{target} was not written by this command: choose another target")
    before = read_json(beside)
    for name in [name for name in begun if before.get(name) != begun[name]]:
        raise ValueError(
            f"{target} was begun with {name} = {before.get(name)!r:.90} and this is "
            f"{begun[name]!r:.90}: choose another target, or remove it to begin again"
        )
    with target.open("rb+") as file:
        ends = [0, *accumulate(len(line) for line in file if line.endswith(b"\n"))]
        done = len(ends) - 1  # a line without an end was cut off
        done = done if done == total else done - done % begun["batch_size"]
        file.truncate(ends[done])
    return done


class _Asker(NamedTuple):
    """Answers batches of rows, and scores them where they have a reference answer."""

    config: RunConfig
    data: DataConfig
    engine: Engine
    bench: Bench
    sampling: Sampling

    def answer(self, batch: sources.Batch, seed: int) -> list[Line]:
        """A line for each row, in order."""
        lines = [{"row": number} for number, _ in batch]
        rows: dict[int, sources.Row] = {}  # those that can be asked, by their place
        for place, (number, raw) in enumerate(batch):
            try:
                rows[place] = self._prepared(number, raw)
            except Fault as fault:
                lines[place]["fault"] = str(fault)
        samples = self.engine.generate(
            [row["prompt"] for row in rows.values()],
            max_completion_length=self.config.train.max_completion_length,
            temperature=self.sampling.temperature,
            seed=seed,
            batch_size=self.sampling.batch_size,
        )
        for (place, row), [sample] in zip(rows.items(), samples, strict=True):
            lines[place] |= {"question": row["question"], "completion": sample.text}
            lines[place]["answer"] = self.bench.preset.extract(sample.text)
            lines[place] |= {"tokens": sample.tokens, "truncated": sample.truncated}
            lines[place] |= {"fault": row["fault"]} if "fault" in row else {}
        self._score({place: row for place, row in rows.items() if "answer" in row}, lines)
        return lines

    def _prepared(self, number: int, raw: sources.Row | str) -> sources.Row:
        row = row_to_ask(number, raw, self.data)
        try:
            [tokens] = count_tokens(self.bench.tokenizer, [row["prompt"]])
        except ValueError as error:
            raise Fault(TEMPLATE, self.data.question_column, str(error), number) from None
        room = self.config.model.max_seq_length - self.config.train.max_completion_length
        if tokens > room:
            why = f"{tokens} tokens, where {room} leave room for a completion"
            raise Fault(LONG, "prompt", why, number)
        return row

    def _score(self, rows: dict[int, sources.Row], lines: list[Line]) -> None:
        """Reference answer, rewards and their total, into the lines of rows that have one."""
        if not rows:
            return
        names = {name for row in rows.values() for name in row}  # a choice may lack in one
        alike = [{name: row.get(name) for name in names} for row in rows.values()]
        scores = self.bench.score(alike, [lines[place]["completion"] for place in rows])
        scores = np.column_stack([scores, self.bench.totals(scores)])
        for (place, row), scored in zip(rows.items(), scores.tolist(), strict=True):
            known = [score if math.isfinite(score) else None for score in scored]
            lines[place] |= {"reference": row["answer"]}
            lines[place] |= dict(zip([*self.bench.preset.names, "reward"], known, strict=True))


def _write(target: Path, asker: _Asker, done: int, total: int) -> None:
    """Answer what is left of the source, a batch at a time."""
    rows = islice(chain.from_iterable(sources.read(asker.data)), done, None)
    with (
        # Half a surrogate pair, which a fault may quote, becomes JSON's escape of it.
        target.open("a", encoding="utf-8", newline="\n", errors="backslashreplace") as file,
        tqdm(total=total, initial=done, unit=" questions") as bar,
    ):
        while batch := list(islice(rows, asker.sampling.batch_size)):
            lines = asker.answer(batch, asker.sampling.seed + done)
            text = [json.dumps(line, ensure_ascii=False, allow_nan=False) for line in lines]
            file.write("\n".join(text) + "\n")
            file.flush()
            done += len(batch)
            bar.update(len(batch))


def _summary(target: Path, names: list[str]) -> str:
    """How many rows and faults, and each reward's mean over rows with a reference answer."""
    seen = Counter()
    with target.open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            seen.update(["rows", *(key for key in ("fault", "reference") if key in line)])
            seen.update({name: line.get(name) or 0 for name in names})
    means = "".join(
        f", {name} {seen[name] / seen['reference']:.3f}" for name in names if seen["reference"]
    )
    return f"{target}: {seen['rows']} rows, {seen['fault']} with a fault{means}"


def system_prompt(config: RunConfig, preset: RewardSet) -> str:
    """What stood above each question in the training."""
    given = config.data.system_prompt
    return preset.system_prompt if given == "preset" else given


def load_rewards(config: RunConfig) -> RewardSet:
    """The run's rewards."""
    return load_preset(config.rewards.preset, config.rewards.reward_weights)


def check_trained(run: Run, config: RunConfig) -> tuple[str, str, Path | None]:
    """(base, policy, adapter) of `export.trained_paths`; FileNotFoundError before a training."""
    if not (run / "train/adapter").is_dir():
        raise FileNotFoundError(f"run {run.name!r} holds no train/adapter: run 03_train_grpo first")
    return trained_paths(run, config)
