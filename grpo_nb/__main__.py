"""Parse the command line of `grpo-nb`, and import only what its command needs."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_nb.machine import limit_spinning

COMMON = """the most common settings; docs/settings.md explains them all:
  --set task=code                    math, code, summarization, qa, json_extraction, guess, …
  --set data.source=problems.csv     a built-in set, a file, or a hub dataset
  --set model.model_name=FOLDER      the base: a folder, or a name on the hub
  --set rewards.preset=mine.py       a set of rewards, or a file of your own
  --set grpo.max_steps=200           optimizer steps
  --set grpo.learning_rate=2e-4      peak learning rate"""

CHECK = """exit code: 0 if nothing says stop, 1 if something does, 2 if the file cannot be used.
docs/check-rewards.md says what else the file may define."""

AUTOPSY = """WHAT: TRL's output_dir, a trainer_state.json, JSON lines, CSV, or an executed notebook.
exit code: 0 if nothing is as grave as --fail-on, 1 if something is, 2 if WHAT cannot be read."""

SERVED = """vLLM's, llama.cpp's, Ollama's or transformers' server; on export.parity_prompts prompts.
exit code: 0 if the answers are the model's, 1 if they are not."""


def run(placebo: str | None, dry_run: bool, force: bool, **options: Any) -> None:
    from grpo_nb.pipeline import notebooks

    if placebo is not None:
        return repeat(placebo, options.pop("name"), dry_run, force, **options)
    only, first, last = (options.pop(name) for name in ("only", "from", "to"))
    stages = (first, last) if only is None else (only, only)
    executed = notebooks.run_pipeline(*notebooks.planned_run(**options), *stages, force, dry_run)
    if not dry_run:
        notebooks.print_summary(executed, stages[1])


def repeat(kind: str, name: str | None, dry_run: bool, force: bool, **options: Any) -> None:
    from grpo_nb.pipeline import caused, notebooks
    from grpo_nb.runs import Run

    stages = (options.pop("from"), options.pop("to")) != ("01", "04")
    if not name or stages or any(options.values()):
        raise ValueError(
            f"--placebo {kind} repeats a finished run as it was: give its --name, and no other "
            "option except --dry-run and --force"
        )
    placebo = caused.run_placebo(name, kind, force, dry_run)
    if not dry_run:
        notebooks.print_summary(placebo)
        print(*(f"{check.name}: {check.evidence}" for check in caused.caused(Run(name))), sep="\n")


def sweep(file: Path, ray: str, dry_run: bool) -> int | None:
    from grpo_nb.pipeline import sweep

    trials = sweep.read_sweep(file, elsewhere=ray not in ("", "local"))
    return print(sweep.plan(trials)) if dry_run else sweep.run_sweep(trials, ray=ray)


def report(runs: list[str], csv: str | None) -> None:
    from grpo_nb.pipeline import leaderboard

    board = leaderboard.compare(runs)
    leaderboard.show(board)
    if csv:
        board.table.to_csv(csv, index=False)


def judge_file(rewards: Path, data: Path, as_json: bool) -> int:
    from grpo_nb.reward_lab.check_file import check_file

    verdict = check_file(rewards, data)
    print(verdict.as_json() if as_json else verdict)
    return 0 if verdict.passed else 1


def diagnose(what: Path, correct: str, html: Path | None, fail_on: str) -> int:
    from grpo_nb.diagnosis import autopsy

    result = autopsy(what, correct=correct)
    print(result)
    if html:
        print(f"{result.save(html)} is written")
    states = ("stop", "warning", "note", "ok")
    return int(states.index(result.worst()) <= states.index(fail_on))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line into `do` (a function or "module:function") and its arguments."""
    parser = argparse.ArgumentParser(
        prog="grpo-nb", description="Teach a language model a verifiable skill by GRPO."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_several(commands)
    _add_of_one_run(commands)
    return parser.parse_args(arguments)


def _command(
    commands: argparse._SubParsersAction, name: str, do: Callable | str, what: str, end: str = ""
) -> Callable:
    """Add a command that calls `do`, a function or "module:function"; return its `add_argument`."""
    kind = argparse.RawDescriptionHelpFormatter  # keeps the lines of `end`
    parser = commands.add_parser(name, help=what, epilog=end, formatter_class=kind)
    parser.set_defaults(do=do)
    return parser.add_argument


def _add_several(commands: argparse._SubParsersAction) -> None:
    """Add the commands that take a settings file, several runs, or no run."""
    add = _command(commands, "run", run, "execute the four notebooks in order", COMMON)
    add("-f", "--file", metavar="RUN.yaml", help="name, profile and settings of a run")
    add("--name", help="results go to runs/NAME; default: profile and time")
    add("--profile", help="tiny-cpu, t4-16gb … h200-141gb; default: what fits")
    _add_settings(add)
    add("--from", default="01", metavar="STAGE", help="01 to 04; needs --name")
    add("--to", default="04", metavar="STAGE", help="01 to 04: stop after it")
    add("--only", metavar="STAGE", help="the same as --from STAGE --to STAGE")
    add("--placebo", metavar="KIND", help="repeat --name with shuffled or format-only rewards")
    add("--dry-run", action="store_true", help="show the plan, start nothing")
    add = _command(commands, "sweep", sweep, "many runs: a grid or a list")
    add("file", type=Path, metavar="SWEEP.yaml")
    what = "several at once by Ray: local, or a cluster's HOST:PORT or auto; default: in turn"
    add("--ray", metavar="ADDRESS", default="", help=what)
    add("--dry-run", action="store_true", help="list the trials, start nothing")
    add = _command(commands, "report", report, "compare runs: which is best, and how surely")
    add("runs", nargs="+", metavar="runs/NAME")
    add("--csv", metavar="FILE", help="write the table")
    what = "test rewards: can they be hacked, and how?"
    add = _command(commands, "check", judge_file, what, CHECK)
    add("rewards", type=Path, metavar="REWARDS.py", help="functions in TRL's shape")
    add("--data", type=Path, required=True, metavar="ROWS.jsonl", help="JSON lines, or Parquet")
    add("--json", action="store_true", dest="as_json", help="print the verdict as JSON")
    what = "find out what went wrong in a GRPO run, whoever trained it"
    add = _command(commands, "autopsy", diagnose, what, AUTOPSY)
    add("what", type=Path, metavar="WHAT", help="an output folder, a log, an executed notebook")
    add("--correct", default="", metavar="REWARD", help="the reward that says what is right")
    add("--html", type=Path, metavar="FILE", help="write the diagnosis with its curves")
    add("--fail-on", default="stop", choices=("stop", "warning"), help="default: stop")
    what = "say what this machine has, and how to get the rest"
    _command(commands, "doctor", "grpo_nb.pipeline.doctor:report", what)


def _add_of_one_run(commands: argparse._SubParsersAction) -> None:
    """Add the commands that take the folder of one run, or its name."""
    folder = {"metavar": "runs/NAME", "help": "folder of the run, or its name"}
    what = "notebook 3 as a command, for several processes"
    add = _command(commands, "train", "grpo_nb.pipeline.launch:train", what)
    add("run", **folder)
    add("--processes", type=int, help="the expected number; refuse any other")
    _add_settings(add)
    what = "does a server answer as the run's merged model does?"
    add = _command(commands, "served", "grpo_nb.export.of_run:compare_server", what, SERVED)
    add("run", **folder)
    add("url", metavar="URL", help="where it listens, such as http://127.0.0.1:8000")
    what = "list the checks of a run, and say what to do next"
    _command(commands, "checklist", "grpo_nb.pipeline.checklist:report", what)("run", **folder)


def _add_settings(add: Callable) -> None:
    what = "a setting, such as grpo.max_steps=20; may be given several times"
    many = {"action": "append", "default": [], "dest": "assignments"}
    add("--set", **many, metavar="SECTION.NAME=VALUE", help=what)
    add("--force", action="store_true", help="go on although an input has changed")


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code.

    The code is 0 for success, 1 for failure, 2 for wrong input, and 128 + n after signal n.
    """
    limit_spinning()
    try:
        options = vars(parse_arguments(arguments))
        if "run" in options:
            from grpo_nb.runs import find_run

            options["run"] = find_run(options["run"])
        if isinstance(do := options.pop("do"), str):
            module, _, function = do.partition(":")
            do = getattr(import_module(module), function)
        result = do(**options)
        if isinstance(result, str):
            print(result)
        return result if isinstance(result, int) else 0
    except (ValueError, FileNotFoundError) as error:
        reason, code = error, 2
    except RuntimeError as error:
        reason, code = error, 128 + error.signal if hasattr(error, "signal") else 1
    except OSError as error:
        reason, code = error, 1
    except KeyboardInterrupt as stop:
        reason, code = stop.args[0] if stop.args else "interrupted", 130
    print("\n".join([f"grpo-nb: {reason}", *getattr(reason, "__notes__", [])]), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
