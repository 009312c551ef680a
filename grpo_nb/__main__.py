"""The command line, `grpo-nb run` and others. Imports wait until they are needed."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_nb.machine import wait_passively

COMMON = """the most common settings; docs/settings.md explains them all:
  --set task=code                    math, code, summarization, qa, json_extraction, guess, …
  --set data.source=problems.csv     a built-in set, a file, or a hub dataset
  --set model.model_path=FOLDER      the base: a folder, or a name on the hub
  --set rewards.preset=mine.py       a set of rewards, or a file of your own
  --set train.max_steps=200          optimizer steps
  --set train.learning_rate=2e-4     peak learning rate"""


def run(
    first: str,
    last: str,
    only: str | None,
    dry_run: bool,
    force: bool,
    control: str | None,
    **asked: Any,
) -> None:
    from grpo_nb.pipeline import notebooks
    from grpo_nb.runs import Run

    if control is not None:
        others = {"file": asked["file"], "profile": asked["profile"], "set": asked["assignments"]}
        others |= {"from": first != "01", "to": last != "04", "only": only is not None}
        return run_control(control, asked["name"], dry_run, force, **others)
    stages = (first, last, force) if only is None else (only, only, force)
    if not (asked["name"] or asked["file"]) and stages[0] != "01":
        raise ValueError(f"--from {stages[0]} continues a run: say which with --name")
    plan = notebooks.planned_run(**asked)
    if dry_run:
        run = Run(plan.name)
        config, _ = notebooks.check_run(run, plan.profile, plan.settings, *stages)
        notebooks.check_inputs(plan, config, stages[0])
        print(notebooks.plan(run, config, *stages[:2]))
    else:
        run = notebooks.run_pipeline(*plan, *stages)
        notebooks.print_summary(run, stages[1])


def run_control(kind: str, name: str | None, dry_run: bool, force: bool, **others: Any) -> None:
    from grpo_nb.evaluation.controls import caused
    from grpo_nb.pipeline import control, notebooks
    from grpo_nb.runs import Run

    if given := ", ".join(f"--{option}" for option, value in others.items() if value):
        raise ValueError(f"--control repeats a training as it was: leave {given} out")
    if not name:
        raise ValueError(f"--control {kind} needs a finished run: say which with --name")
    if dry_run:
        _, run, config = control.check_control(name, kind)
        return print(notebooks.plan(run, config, "03", "04"))
    notebooks.print_summary(control.run_control(name, kind, force))
    for check in caused(Run(name)):
        print(f"{check.name}: {check.evidence}")


def train(assignments: list[str], **asked: Any) -> None:
    from grpo_nb.pipeline import launch
    from grpo_nb.pipeline.notebooks import assigned

    launch.train(settings=assigned(assignments), **asked)


def sweep(file: Path, jobs: int, ray: str | None, dry_run: bool) -> int | None:
    from grpo_nb.pipeline import cluster, sweep

    read = sweep.read_sweep(file, elsewhere=bool(ray))
    if dry_run:
        return print(sweep.plan(read))
    return cluster.run_sweep(read, ray) if ray else sweep.run_sweep(read, jobs)


def report(runs: list[str], csv: str | None) -> None:
    from grpo_nb.evaluation import leaderboard

    board = leaderboard.compare(runs)
    leaderboard.show(board)
    if csv:
        board.table.to_csv(csv, index=False)


def reward_lab(**asked: Any) -> None:
    from grpo_nb.pipeline.app import serve

    serve(**asked)


def checklist(run: Any) -> int:
    from grpo_nb.pipeline import checklist

    lines = checklist.examine(run)
    checklist.show(lines)
    return int(any(line["state"] == "stop" for line in lines))


def card(run: Any) -> None:
    from grpo_nb import export

    path = export.write_card(run)
    print(f"{path} is written. To upload it with the model:\n  hf upload OWNER/NAME {path.parent}")


def answer(**asked: Any) -> None:
    from grpo_nb.evaluation.answer_file import answer_file

    print(answer_file(**asked))


def doctor() -> int:
    from grpo_nb.pipeline.doctor import report

    return report()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="grpo-nb", description="Teach a language model a verifiable skill by GRPO."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_several(commands)
    _add_before(commands)
    _add_after(commands)
    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-"):
        from grpo_nb.runs import refuse_unknown

        refuse_unknown("command", words[0], list(commands.choices))
    parsed, unread = parser.parse_known_args(words)
    if unread:
        from grpo_nb.runs.config import parse_assignment

        for assignment in getattr(parsed, "assignments", []):  # of `--set train.beta 0.1`
            parse_assignment(assignment)
        parser.error(f"unrecognized arguments: {' '.join(unread)}")
    return parsed


def _command(
    commands: argparse._SubParsersAction,
    do: Callable,
    what: str,
    of_run: bool = True,
    end: str = "",
) -> Callable:
    """Its `add_argument`; a command of one run has that as its first."""
    kind = argparse.RawDescriptionHelpFormatter  # keeps the lines of `end`
    name = do.__name__.replace("_", "-")
    parser = commands.add_parser(name, help=what, epilog=end, formatter_class=kind)
    parser.set_defaults(do=do)
    if of_run:
        parser.add_argument("run", metavar="runs/NAME", help="folder of the run, or its name")
    return parser.add_argument


def _add_several(commands: argparse._SubParsersAction) -> None:
    """The commands that take a file of settings, or several runs."""
    add = _command(commands, run, "execute the four notebooks in order", False, COMMON)
    add("-f", "--file", metavar="RUN.yaml", help="name, profile and settings of a run")
    add("--name", help="results go to runs/NAME; default: profile and time")
    add("--profile", help="tiny-cpu, t4-16gb … h200-141gb; default: what fits")
    _add_settings(add)
    add("--from", dest="first", default="01", metavar="STAGE", help="01 to 04; needs a name")
    add("--to", dest="last", default="04", metavar="STAGE", help="01 to 04: stop after it")
    add("--only", metavar="STAGE", help="the same as --from STAGE --to STAGE")
    add("--control", metavar="KIND", help="of the run --name: shuffled or format-only rewards")
    add("--dry-run", action="store_true", help="show the plan, start nothing")
    add = _command(commands, sweep, "many runs: a grid or a list", of_run=False)
    add("file", type=Path, metavar="SWEEP.yaml")
    add("--jobs", type=int, default=1, help="trials at once on this machine; default: 1")
    add("--ray", metavar="ADDRESS", help="on a Ray cluster: HOST:PORT or auto")
    add("--dry-run", action="store_true", help="list the trials, start nothing")
    add = _command(commands, report, "compare runs: which is best, and how surely", of_run=False)
    add("runs", nargs="+", metavar="runs/NAME")
    add("--csv", metavar="FILE", help="write the table")


def _add_before(commands: argparse._SubParsersAction) -> None:
    """What helps until a run is finished."""
    add = _command(commands, reward_lab, "write and test rewards on a page", of_run=False)
    add("name", nargs="?", default="demo", metavar="NAME", help="of the run; default: demo")
    add("--profile", default="auto", help="for notebook 1, where it is not done yet")
    add("--port", type=_port, default=8866, help="default: 8866")
    add("--no-browser", action="store_false", dest="browser", help="only print the address")
    add = _command(commands, train, "notebook 3 as a command, for several processes")
    add("--processes", type=int, help="refuse to start with another number")
    _add_settings(add)
    _command(commands, checklist, "say what of a run is in order, and what is next")
    _command(commands, doctor, "say what this machine has, and how to get the rest", of_run=False)


def _add_after(commands: argparse._SubParsersAction) -> None:
    """What is done with a finished run."""
    _command(commands, card, "write the model card, and say how to upload the model")
    add = _command(commands, answer, "answer a file of questions")
    add("source", type=Path, metavar="FILE", help="CSV, JSON lines, Parquet, …")
    add("--to", type=Path, required=True, dest="target", metavar="ANSWERS.jsonl")
    add("--model", default="merged", help="merged (default), adapter or base")
    add("--question-column", default="", metavar="NAME", help="default: the run's")
    add("--answer-column", default="", metavar="NAME", help="reference answers, to score by")
    add("--engine", default="detect", help="transformers or vllm")


def _add_settings(add: Callable) -> None:
    what = "a setting, such as train.max_steps=20; may be given several times"
    many = {"action": "append", "default": [], "dest": "assignments"}
    add("--set", **many, metavar="SECTION.NAME=VALUE", help=what)
    add("--force", action="store_true", help="go on although an input has changed")


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 1 to 65535")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 a stage failed, 2 wrong input, 128 + n stopped by signal n."""
    wait_passively()
    try:
        asked = vars(parse_arguments(arguments))
        if "run" in asked:
            from grpo_nb.runs import find_run

            asked["run"] = find_run(asked["run"])
        return asked.pop("do")(**asked) or 0
    except (ValueError, FileNotFoundError) as error:
        said, code = error, 2
    except RuntimeError as error:
        said, code = error, 128 + error.signal if hasattr(error, "signal") else 1
    except OSError as error:
        from grpo_nb.runs.files import disk_error

        said, code = disk_error(error.filename or "a file", error), 1
    except KeyboardInterrupt as stop:
        said, code = stop.args[0] if stop.args else "interrupted", 130
    if str(said):  # else another process of a training says what it was
        print("\n".join([f"grpo-nb: {said}", *getattr(said, "__notes__", [])]), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
