"""Parse the command line of `grpo-nb`, and import only what its command needs."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_nb.machine import limit_spinning


def run(placebo: str | None, dry_run: bool, force: bool, **options: Any) -> None:
    from grpo_nb.pipeline import caused, notebooks
    from grpo_nb.runs import Run

    only, first, last = (options.pop(name) for name in ("only", "from", "to"))
    if only and (first, last) != ("01", "04"):
        raise ValueError(f"--only {only} runs one stage: leave out --from {first} and --to {last}")
    stages = (first, last) if only is None else (only, only)
    if stages[0] != "01" and not options["name"] and not options["file"]:
        raise ValueError(f"a run that begins with stage {stages[0]} exists: give its --name")
    if placebo is None:
        plan = notebooks.planned_run(**options)
        executed = notebooks.run_pipeline(*plan, *stages, force, dry_run)
    else:
        name = options.pop("name")
        if not name or stages != ("01", "04") or any(options.values()):
            raise ValueError(
                f"--placebo {placebo} repeats a finished run as it was: give its --name, and no "
                "other option except --dry-run and --force"
            )
        executed = caused.run_placebo(name, placebo, force, dry_run)
    if not dry_run:
        notebooks.print_summary(executed, stages[1])
        if placebo:
            for check in caused.caused(Run(name)):
                print(f"{check.name}: {check.evidence}")


def sweep(file: Path, ray: str, dry_run: bool) -> int | None:
    from grpo_nb.pipeline import sweep

    trials = sweep.read_sweep(file, elsewhere=ray not in ("", "local"))
    return print(sweep.plan(trials)) if dry_run else sweep.run_sweep(trials, ray=ray)


def judge_file(rewards: Path, data: Path, as_json: bool) -> int:
    from grpo_nb.reward_lab.check import check_file

    verdict = check_file(rewards, data)
    print(verdict.as_json() if as_json else verdict)
    return 0 if verdict.passed else 1


def diagnose(what: Path, correct: str, html: Path | None) -> int:
    from grpo_nb.diagnosis import autopsy
    from grpo_nb.runs import runs_root

    folder = runs_root() / what  # the name of a run
    result = autopsy(folder if folder.is_dir() and not what.exists() else what, correct=correct)
    print(result)
    if html:
        print(f"{result.save(html)} is written")
    return 0 if result.passed else 1


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
    commands: argparse._SubParsersAction, name: str, do: Callable | str, what: str
) -> Callable:
    """Add a command that calls `do`, a function or "module:function"; return its `add_argument`."""
    parser = commands.add_parser(name, help=what)
    parser.set_defaults(do=do)
    return parser.add_argument


def _add_several(commands: argparse._SubParsersAction) -> None:
    """Add the commands that take a settings file, several runs, or no run."""
    add = _command(commands, "run", run, "execute the four notebooks in order")
    add("-f", "--file", metavar="RUN.yaml", help="name, profile and settings of a run")
    add("--name", help="results go to runs/NAME; default: profile and time")
    add("--profile", help="tiny-cpu, t4-16gb … h200-141gb; default: what fits")
    _add_settings(add)
    add("--from", default="01", metavar="STAGE", help="01 to 04; needs --name")
    add("--to", default="04", metavar="STAGE", help="01 to 04: stop after it")
    add("--only", metavar="STAGE", help="the same as --from STAGE --to STAGE")
    add("--placebo", metavar="KIND", help="shuffled: repeat --name with shuffled rewards")
    add("--dry-run", action="store_true", help="show the plan, start nothing")
    add = _command(commands, "sweep", sweep, "many runs: a grid or a list")
    add("file", type=Path, metavar="SWEEP.yaml")
    what = "several at once by Ray: local, or a cluster's HOST:PORT or auto; default: in turn"
    add("--ray", metavar="ADDRESS", default="", help=what)
    add("--dry-run", action="store_true", help="list the trials, start nothing")
    what = "compare runs: which is best, and how surely"
    add = _command(commands, "report", "grpo_nb.pipeline.leaderboard:report", what)
    add("runs", nargs="+", metavar="runs/NAME")
    add("--csv", metavar="FILE", help="write the table")
    add = _command(commands, "check", judge_file, "test rewards; exit code 1 if one can be hacked")
    add("rewards", type=Path, metavar="REWARDS.py", help="functions in TRL's shape")
    add("--data", type=Path, required=True, metavar="ROWS.jsonl", help="JSON, CSV or Parquet")
    add("--json", action="store_true", dest="as_json", help="print the verdict as JSON")
    add = _command(commands, "autopsy", diagnose, "find out what went wrong in any GRPO run")
    what = "TRL's output_dir, a trainer_state.json, JSON lines, or an executed notebook"
    add("what", type=Path, metavar="WHAT", help=what)
    add("--correct", default="", metavar="REWARD", help="the reward that says what is right")
    add("--html", type=Path, metavar="FILE", help="write the diagnosis with its curves")
    what = "say what this machine has, and how to get the rest"
    _command(commands, "doctor", "grpo_nb.pipeline.checklist:doctor", what)


def _add_of_one_run(commands: argparse._SubParsersAction) -> None:
    """Add the commands that take the folder of one run, or its name."""
    folder = {"metavar": "runs/NAME", "help": "folder of the run, or its name"}
    what = "notebook 3 as a command, for several processes"
    add = _command(commands, "train", "grpo_nb.pipeline.notebooks:train", what)
    add("run", **folder)
    add("--processes", type=int, help="the expected number; refuse any other")
    _add_settings(add)
    what = "does a server (vLLM, llama.cpp, Ollama, …) answer as the run's model? else 1"
    add = _command(commands, "served", "grpo_nb.export.merging:compare_server", what)
    add("run", **folder)
    add("url", metavar="URL", help="where it listens, such as http://127.0.0.1:8000")
    what = "list the checks of a run, and say what to do next"
    _command(commands, "checklist", "grpo_nb.pipeline.checklist:report", what)("run", **folder)


def _add_settings(add: Callable) -> None:
    what = "a setting of docs/settings.md: grpo.max_steps=20; may be given several times"
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
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, FileNotFoundError) as error:
        reason, code = error, 2
    except (RuntimeError, OSError) as error:
        number = getattr(error, "signal", 0)
        reason, code = error, 128 + number if number else 1
    except KeyboardInterrupt as stop:
        reason, code = stop.args[0] if stop.args else "interrupted", 130
    print("\n".join([f"grpo-nb: {reason}", *getattr(reason, "__notes__", [])]), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
