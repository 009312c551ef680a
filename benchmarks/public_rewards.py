"""What does `check_rewards` say of the GRPO rewards that others published?

    git clone https://github.com/unslothai/notebooks ../public/unsloth    # huggingface/trl, …
    python benchmarks/public_rewards.py --clones ../public/* --list       # what can be had
    python benchmarks/public_rewards.py --clones ../public/* --markdown table.md

Takes clones of unslothai/notebooks, huggingface/trl, huggingface/open-r1 and huggingface/cookbook;
nothing of theirs is committed. Each notebook, script, recipe and page that makes a trainer with
`reward_funcs` is run statement by statement, in a process of its own, until the trainer is made:
the rewards are the functions that its author wrote, with its weights, settings and prompts. What
needs a GPU, a network or a model is stood in for (public_stand_ins.py), and a statement that still
fails is skipped and named. The rows are stand-ins too, GSM8K's in the form of the data set that the
source asks for (public_rows.py). Copies of a set (the same functions, constants, weights and form
of the prompt) are checked once. benchmarks/public_rewards.yaml holds what a person found by
reading, and references for kernels and games, whose rows hold no right program.
"""

import os

if __name__ == "__main__":  # before the libraries are imported, which read these
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import argparse
import ast
import contextlib
import functools
import glob
import hashlib
import inspect
import json
import multiprocessing
import multiprocessing.connection
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import public_rows
import public_stand_ins as stand_ins
import yaml
from public_sources import Source, run_source, sources, trainers

HERE = Path(__file__).resolve().parent
NOTES = HERE / "public_rewards.yaml"
OUTSIDE = ("environment_factory", "rollout_func", "tools")  # what a reward may read besides rows


def described(made: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what a trainer was given, as JSON; `missing` says why it cannot be checked."""
    rewards, dataset = given_rewards(made), given_rows(made)
    settings = given_settings(made)
    found = {
        "rewards": [reward_name(reward) for reward in rewards],
        "weights": settings.get("reward_weights"),
        "settings": sorted(settings),
        "outside": [name for name in OUTSIDE if made.get(name)],
        "rows": 0,
        "columns": [],
        "prompt": "",
        "missing": missing(rewards, dataset),
    }
    if isinstance(dataset, datasets.Dataset):
        found |= {"rows": len(dataset), "columns": dataset.column_names}
        found["prompt"] = prompt_form(dataset[0].get("prompt")) if len(dataset) else ""
    parts = [*(code_of(reward, folder) for reward in rewards), found["weights"], found["prompt"]]
    found["key"] = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return found


def given_rewards(made: dict[str, Any]) -> list[Any]:
    rewards = made.get("reward_funcs")
    return list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]


def given_settings(made: dict[str, Any]) -> dict[str, Any]:
    return dict(vars(made["args"])) if isinstance(made.get("args"), stand_ins.StandIn) else {}


def given_rows(made: dict[str, Any]) -> Any:
    rows = made.get("train_dataset")
    return rows["train"] if isinstance(rows, dict) and "train" in rows else rows


def missing(rewards: list[Any], dataset: Any) -> str:
    """Say why a set cannot be checked, if it cannot."""
    for reward in rewards:
        if isinstance(reward, (str, stand_ins.StandIn)) or inspect.isclass(reward):
            return f"the reward {reward_name(reward)} is a model, or was not defined"
        if not callable(reward):
            return "no rewards are given"
    if not isinstance(dataset, datasets.Dataset):
        return "its data set could not be had"
    return "" if len(dataset) else "its data set has no rows"


def reward_name(reward: Any) -> str:
    if isinstance(reward, stand_ins.StandIn):
        return "stand-in"
    return reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)


def prompt_form(prompt: Any) -> str:
    """Return "text", or the roles of the messages."""
    if not isinstance(prompt, list):
        return "text" if isinstance(prompt, str) else type(prompt).__name__
    parts = any(isinstance(message["content"], list) for message in prompt)
    return ", ".join(message["role"] for message in prompt) + (" with parts" if parts else "")


def code_of(value: Any, folder: str, seen: set[int] | None = None) -> Any:
    """Return a function's code with the helpers and constants of its source that it names."""
    seen = set() if seen is None else seen
    if isinstance(value, functools.partial):
        return [code_of(value.func, folder, seen), repr(value.args), repr(value.keywords)]
    function = value if inspect.isfunction(value) else vars(type(value)).get("__call__")
    if not inspect.isfunction(function):
        return reward_name(value)
    if id(function) in seen:
        return None
    seen.add(id(function))
    try:
        code = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):
        code = reward_name(value)
    named = [function.__globals__.get(name) for name in sorted(set(function.__code__.co_names))]
    named += [cell.cell_contents for cell in function.__closure__ or ()]
    plain = (str, int, float, re.Pattern, tuple)
    parts = [repr(found) for found in named if isinstance(found, plain)]
    for helper in filter(inspect.isfunction, named):
        if helper.__code__.co_filename.startswith(folder):
            parts.append(code_of(helper, folder, seen))
    return [code, parts]


def reference(made: dict[str, Any]) -> Any:
    """Return the function of public_rewards.yaml that writes right completions for these prompts.

    Its code may use the names that the source defines, such as its game.
    """
    rows = given_rows(made)
    prompt = json.dumps(rows[0].get("prompt"), default=str, ensure_ascii=False)
    for entry in read_notes().get("references", []):
        if json.dumps(entry["asked"])[1:-1] in prompt or entry["asked"] in prompt:
            namespace = dict(vars(sys.modules["__main__"]))
            exec(entry["code"], namespace)
            return namespace["reference"]
    return None


def read_notes() -> dict[str, Any]:
    return yaml.safe_load(NOTES.read_text(encoding="utf-8")) if NOTES.exists() else {}


def checked(made: dict[str, Any]) -> dict[str, Any]:
    """Check a set; return the verdict as JSON."""
    settings = given_settings(made)
    started = time.perf_counter()
    try:
        from grpo_nb import check_rewards

        started = time.perf_counter()
        verdict = check_rewards(
            given_rewards(made),
            given_rows(made),
            reward_weights=settings.get("reward_weights"),
            reference=reference(made),
            args=types.SimpleNamespace(**settings),
        )
    except Exception as error:  # which rewards the check itself cannot take is what this is to find
        said = f"{type(error).__name__}: {str(error)[:300]}"
        return {"error": said, "seconds": time.perf_counter() - started}
    return {
        "passed": bool(verdict.passed),
        "text": str(verdict),
        "reference": str(verdict.reference),
        "findings": [finding._asdict() for finding in verdict.findings],
        "seconds": time.perf_counter() - started,
    }


def worker(source: Source, chosen: int | None, shared: dict[str, Any], report: Any) -> None:
    """Run a source in this process; report its sets, or the verdict of the chosen one."""
    os.setpgrp()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir(home := tempfile.mkdtemp(dir=shared["folder"]))
    os.environ["HOME"] = home
    skipped: list[str] = []
    recipe = yaml.safe_load(source.recipe.read_text(encoding="utf-8")) if source.recipe else {}
    stand_ins.Trainer.expected = trainers(source.path)
    # A template without versions means those of the notebook that is made from it.
    same = [source.path, *source.clone.rglob(glob.escape(source.path.name))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in reversed(same))
    pins = dict(re.findall(r"\b(\w+)==([\d.]+\d)", text))
    with stand_ins.standing_in((str(source.clone),), shared | {"pins": pins}, recipe):
        run_source(source, skipped)
    made = stand_ins.Trainer.made
    if chosen is not None:
        report.send(checked(made[chosen]))
    else:
        sets = [described(one, str(source.clone)) for one in made]
        report.send({"sets": sets, "skipped": skipped})


def run_all(
    tasks: list[tuple[Source, int | None]], shared: dict[str, Any], limit: float, jobs: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the task, its report), each from a process of its own under a time limit."""
    context, waiting = multiprocessing.get_context("fork"), list(enumerate(tasks))
    running: dict[Any, tuple[int, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, (source, chosen) = waiting.pop(0)
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=worker, args=(source, chosen, shared, writer))
            process.start()
            writer.close()
            running[reader] = number, process, time.monotonic() + limit
        ready = multiprocessing.connection.wait(list(running), timeout=1)
        for reader, (number, process, deadline) in list(running.items()):
            if reader in ready:
                try:
                    yield number, reader.recv()
                except EOFError:
                    yield number, {"error": f"its process ended with {process.exitcode}"}
            elif time.monotonic() > deadline:
                yield number, {"error": f"ran past {limit:.0f} s"}
            else:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            reader.close()
            del running[reader]


def shared_parts(gsm8k: Path, tokenizer: Path, folder: str) -> dict[str, Any]:
    """Import once what every source needs: its process is a fork of this one."""
    import math_verify  # noqa: F401
    import torch
    import trl
    import trl.rewards

    torch.set_num_threads(1)
    stand_ins.auto_models()
    for name in dir(trl):
        getattr(trl, name)
    return {
        "folder": folder,
        "load_dataset": public_rows.loader(gsm8k),
        "tokenizer": stand_ins.tokenizer(tokenizer),
        "runners": stand_ins.code_runners(),
    }


def commit(clone: Path) -> str:
    """Return the short name of the clone's commit."""
    command = ["git", "-C", str(clone), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def grouped(found: list[tuple[Source, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the distinct sets, each with the sources that hold a copy; the plainest name first."""
    groups: dict[str, dict[str, Any]] = {}
    ranked = sorted(found, key=lambda pair: (pair[0].path.suffix == ".py", len(pair[0].name)))
    for source, report in ranked:
        for number, one in enumerate(report.get("sets", ())):
            place = {"source": source, "number": number, "sources": [], "skipped": []}
            group = groups.setdefault(one["key"], one | place)
            group["sources"].append(source.name)
            if group["source"] is source:
                group["skipped"] = report["skipped"]
    return sorted(groups.values(), key=lambda group: group["source"].name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clones", nargs="+", type=Path, required=True)
    parser.add_argument("--only", default="", help="a part of the source's name")
    parser.add_argument("--list", action="store_true", help="check nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--limit", type=float, default=120, help="seconds a source may take")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--gsm8k", type=Path, default=HERE / "../../shared/data/gsm8k_train.jsonl")
    parser.add_argument("--tokenizer", type=Path, default=HERE.parent / "data/tiny_base")
    given = parser.parse_args()
    every = [source for clone in given.clones for source in sources(clone.resolve())]
    every = [source for source in every if given.only in source.name]
    with tempfile.TemporaryDirectory() as folder:
        shared = shared_parts(given.gsm8k.resolve(), given.tokenizer.resolve(), folder)
        limits = {"limit": given.limit, "jobs": given.jobs}
        reports = dict(run_all([(source, None) for source in every], shared, **limits))
        found = [(source, reports[number]) for number, source in enumerate(every)]
        sets = grouped(found)
        if not given.list:
            able = [one for one in sets if not one["missing"]]
            tasks = [(one["source"], one["number"]) for one in able]
            for number, verdict in run_all(tasks, shared, **limits):
                able[number]["verdict"] = verdict
    lost = {source.name: why(report) for source, report in found if not report.get("sets")}
    if given.json:
        plain = [one | {"source": name_of(one)} for one in sets]
        given.json.write_text(json.dumps({"sets": plain, "nothing": lost}, indent=1))
    lines = listing(sets) if given.list else table(sets)
    lines += ["", *(f"{name}: nothing: {reason}" for name, reason in lost.items())]
    if given.markdown and not given.list:
        given.markdown.write_text("\n".join(table(sets)) + "\n", encoding="utf-8")
    print(*lines, sep="\n")


def name_of(one: dict[str, Any]) -> str:
    """Name a set by its source, and by its number where the source has several."""
    return one["source"].name + (f"#{one['number']}" if one["number"] else "")


def why(report: dict[str, Any]) -> str:
    """Say why a source gave no set."""
    skipped = report.get("skipped", ())
    return report.get("error") or "; ".join(skipped[-2:]) or "its trainer was not reached"


def listing(sets: list[dict[str, Any]]) -> list[str]:
    """Return a paragraph for each set."""
    lines = []
    for one in sets:
        copies = len(one["sources"]) - 1
        lines += [
            f"{name_of(one)} @ {commit(one['source'].clone)}, {copies} copies",
            f"    rewards: {', '.join(one['rewards'])}; weights: {one['weights']}",
            f"    {one['rows']} rows of {', '.join(one['columns'])}; prompt: {one['prompt']}",
            f"    settings: {', '.join(one['settings'])}",
        ]
        lines += [f"    reads besides: {', '.join(one['outside'])}"] if one["outside"] else []
        lines += [f"    not checked: {one['missing']}"] if one["missing"] else []
        lines += [f"    skipped: {statement}" for statement in one["skipped"]]
    able = sum(not one["missing"] for one in sets)
    copies = sum(len(one["sources"]) for one in sets)
    return [*lines, "", f"{len(sets)} distinct sets of {copies}; {able} can be checked"]


def table(sets: list[dict[str, Any]]) -> list[str]:
    """Return the Markdown table: a line for each set."""
    notes = read_notes().get("notes", {})
    head = ("source", "rewards", "verdict", "what wins", "seconds", "as read")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for one in sets:
        name, verdict = name_of(one), one.get("verdict", {})
        copies = len(one["sources"]) - 1
        more = f", {copies} cop{'y' if copies == 1 else 'ies'}" if copies else ""
        cells = [
            f"{name} at {commit(one['source'].clone)}{more}",
            ", ".join(one["rewards"]),
            one["missing"] or verdict.get("error") or ("pass" if verdict["passed"] else "stop"),
            findings(verdict),
            f"{verdict['seconds']:.1f}" if "seconds" in verdict else "–",
            notes.get(name, ""),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def findings(verdict: dict[str, Any]) -> str:
    """Name a verdict's stops and warnings."""
    told = [found for found in verdict.get("findings", ()) if found["state"] != "note"]
    return ", ".join(f"{found['state']}: {found['name']}" for found in told) or "–"


if __name__ == "__main__":
    main()
