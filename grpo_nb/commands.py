"""What the command line takes; `__main__` does it. Needs argparse alone."""

import argparse
from pathlib import Path

EXPORTED = ("merged_16bit", "merged_16bit_original_base", "adapter")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="grpo-nb", description="Teach a language model a verifiable skill by GRPO."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_batches(commands)
    lab = commands.add_parser("reward-lab", help="serve notebook 2 as a page on this machine")
    lab.add_argument("--name", default="demo", help="of the run, runs/NAME; default: demo")
    lab.add_argument("--profile", default="auto", help="for notebook 1, where it is not done yet")
    lab.add_argument("--port", type=_port, default=8866, help="default: 8866")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    _add_stage_03(commands)
    checklist = commands.add_parser(
        "checklist", help="say what of a run is in order, and what is next"
    )
    checklist.add_argument("run", metavar="runs/NAME", help="folder of the run, or its name")
    checklist.add_argument("--json", action="store_true", help="for machines, instead of a table")
    _add_stage_04(commands)
    commands.add_parser("doctor", help="say what this machine has, and how to get the rest")
    return parser.parse_args(arguments)


def _add_batches(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser("run", help="execute the four notebooks in order")
    run.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        dest="files",
        metavar="RUN.yaml",
        help="name, profile and settings of a run; several run one after another",
    )
    run.add_argument("--name", help="results go to runs/NAME; default: profile and time")
    run.add_argument("--profile", help="tiny-cpu, t4-16gb … h200-141gb; default: what fits")
    _add_settings(run)
    run.add_argument("--from", dest="first", metavar="STAGE", help="01 to 04; needs a name")
    run.add_argument("--to", dest="last", metavar="STAGE", help="01 to 04: stop after it")
    run.add_argument("--only", metavar="STAGE", help="the same as --from STAGE --to STAGE")
    run.add_argument("--dry-run", action="store_true", help="show the plan, start nothing")
    sweep = commands.add_parser("sweep", help="many runs: a grid, a list or random draws")
    sweep.add_argument("file", metavar="SWEEP.yaml")
    sweep.add_argument("--jobs", type=int, help="trials at once; default: 1")
    sweep.add_argument("--ray", metavar="ADDRESS", help="on a Ray cluster: HOST:PORT or auto")
    sweep.add_argument("--cpus", type=int, help="of a trial on Ray; default: 1")
    sweep.add_argument("--gpus", type=int, help="of a trial on Ray; default: 1 if it has any")
    sweep.add_argument("--dry-run", action="store_true", help="list the trials, start nothing")
    report = commands.add_parser("report", help="compare runs: which is best, and how surely")
    report.add_argument("runs", nargs="+", metavar="runs/NAME")
    report.add_argument("--csv", metavar="FILE", help="write the table")


def _add_stage_04(commands: argparse._SubParsersAction) -> None:
    """What is done with a finished run."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("run", metavar="runs/NAME", help="folder of the run, or its name")
    export = commands.add_parser("export", parents=[shared], help="merge, convert, write a card")
    export.add_argument("--merge", metavar="MODE", help=" or ".join(EXPORTED))
    export.add_argument("--gguf", metavar="KIND", help="f16, q8_0 or q4_k_m")
    export.add_argument("--llama-cpp", default="", metavar="DIR", help="default: $LLAMA_CPP")
    export.add_argument("--force", action="store_true", help="although it fails the parity gate")
    push = commands.add_parser("push", parents=[shared], help="upload the merged model")
    push.add_argument("--repo", required=True, metavar="OWNER/NAME")
    push.add_argument(
        "--yes", action="store_true", help="upload; without it only say what would be"
    )
    push.add_argument("--public", action="store_true", help="default: a private repository")
    serve = commands.add_parser("serve", parents=[shared], help="an OpenAI-compatible server")
    serve.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    serve.add_argument("--port", type=_port, default=8000, help="default: 8000")
    serve.add_argument("--adapter", action="store_true", help="base + adapter, not merged")
    answer = commands.add_parser("answer", parents=[shared], help="answer a file of questions")
    answer.add_argument("source", type=Path, metavar="FILE", help="CSV, JSON lines, Parquet, …")
    answer.add_argument("--to", type=Path, required=True, metavar="ANSWERS.jsonl")
    answer.add_argument("--model", default="merged", help="merged (default), adapter or base")
    answer.add_argument("--question-column", default="", metavar="NAME", help="default: the run's")
    answer.add_argument("--answer-column", default="", metavar="NAME", help="golds, to be scored")
    answer.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    answer.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")
    answer.add_argument("--batch-size", type=int, default=64, help="default: 64")
    answer.add_argument("--engine", default="detect", help="transformers, vllm or unsloth")


def _add_stage_03(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser("train", help="notebook 3 as a command, for several processes")
    train.add_argument("run", metavar="runs/NAME", help="the run, its folder or its config.yaml")
    train.add_argument("--processes", type=int, help="refuse to start with another number")
    _add_settings(train)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="SECTION.NAME=VALUE",
        help="a setting, such as train.max_steps=20; may be given several times",
    )
    command.add_argument("--force", action="store_true", help="go on although an input has changed")


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 1 to 65535")
    return int(text)
