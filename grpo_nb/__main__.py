"""The command line, `grpo-nb run` and others. Imports wait until they are needed."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_nb.runs import Run

EXPORTED = ("merged_16bit", "merged_16bit_original_base", "merged_4bit", "adapter")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="grpo-nb", description="Teach a language model a verifiable skill by GRPO."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="execute the four notebooks in order")
    run.add_argument("--name", help="of the run directory runs/NAME; default: profile and time")
    run.add_argument("--profile", default="auto", help="tiny-cpu, t4-16gb … h200-141gb")
    run.add_argument(
        "--from", default="01", dest="first", metavar="STAGE", help="01 to 04; needs --name"
    )
    run.add_argument("--to", default="04", dest="last", metavar="STAGE", help="01 to 04")
    _add_settings(run)
    lab = commands.add_parser("reward-lab", help="serve notebook 2 as a page on this machine")
    lab.add_argument("--name", default="demo", help="of the run; default: demo")
    lab.add_argument("--profile", default="auto", help="for notebook 1, where it is not done yet")
    lab.add_argument("--port", type=int, default=8866, help="default: 8866")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    _add_stage_03(commands)
    _add_stage_04(commands)
    commands.add_parser("doctor", help="say what this machine has, and how to get the rest")
    return parser.parse_args(arguments)


def _add_stage_04(commands: argparse._SubParsersAction) -> None:
    """What is done with a finished run."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("run", metavar="runs/NAME", help="folder of the run, or its name")
    export = commands.add_parser("export", parents=[shared], help="merge again, GGUF, model card")
    export.add_argument("--merge", metavar="MODE", help=" or ".join(EXPORTED))
    export.add_argument("--gguf", metavar="KIND", help="f16, q8_0 or q4_k_m")
    export.add_argument("--llama-cpp", default="", metavar="DIR", help="default: $LLAMA_CPP")
    export.add_argument("--force", action="store_true", help="although it fails the parity gate")
    push = commands.add_parser("push", parents=[shared], help="the merged model to the hub")
    push.add_argument("--repo", required=True, metavar="OWNER/NAME")
    push.add_argument(
        "--yes", action="store_true", help="upload; without it only say what would be"
    )
    push.add_argument("--public", action="store_true", help="default: a private repository")
    again = commands.add_parser("reproduce", parents=[shared], help="run it again and compare")
    again.add_argument("--as", dest="name", help="of the new run; default: NAME-again")
    again.add_argument("--tolerance", type=float, default=1e-3, help="of a figure; default: 1e-3")
    serve = commands.add_parser("serve", parents=[shared], help="OpenAI-compatible server")
    serve.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    serve.add_argument("--port", type=int, default=8000, help="default: 8000")
    serve.add_argument("--adapter", action="store_true", help="base + adapter (vLLM only)")


def _add_stage_03(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser("train", help="stage 03 without its notebook, for launchers")
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


def _existing_run(path: str) -> "Run":
    from grpo_nb.runs import Run, runs_root

    path = path.removesuffix("/config.yaml")
    given = [Path(path), runs_root() / path]
    found = [folder.resolve() for folder in given if (folder / "manifest.json").exists()]
    if not found:
        raise FileNotFoundError(f"{path} is no run: neither {given[0]} nor {given[1]} has one")
    os.environ["GRPO_NB_RUNS"] = str(found[0].parent)
    return Run(found[0].name)


def export(arguments: argparse.Namespace) -> int:
    from grpo_nb import export
    from grpo_nb.profiles import refuse_unknown
    from grpo_nb.runs import atomic_path

    run, mode, kind = _existing_run(arguments.run), arguments.merge, arguments.gguf
    run.lock()
    if mode:
        refuse_unknown("merge", mode, list(EXPORTED))
    if mode == "adapter":
        print(export.copy_adapter(run, run.config()))
    elif mode:
        target = f"model/{mode}"
        folder, report = export.merge(run, run.config(), mode, force=arguments.force, target=target)
        print(f"{export.summary(report)}\n{folder}")
    if kind:
        refuse_unknown("GGUF kind", kind, ["f16", "q8_0", "q4_k_m"])
        print(export.to_gguf(run, kind, arguments.llama_cpp))
    with atomic_path(run / "model/README.md") as temporary:
        temporary.write_text(export.model_card(run), encoding="utf-8")
    print(run / "model/README.md")
    return 0


def train(arguments: argparse.Namespace) -> int:
    from grpo_nb import launch
    from grpo_nb.config import parse_assignment

    settings = dict(parse_assignment(text) for text in arguments.assignments)
    run = _existing_run(arguments.run)
    try:
        launch.train(run, settings, arguments.processes, arguments.force)
    except launch.Failed:  # another process says what it was
        return 1
    return 0


def push(arguments: argparse.Namespace) -> int:
    from grpo_nb import export

    planned = export.plan_push(_existing_run(arguments.run), arguments.repo)
    print(planned.describe())
    if arguments.yes:
        print(export.push(planned, private=not arguments.public))
    else:
        print("Nothing was sent: add --yes to upload.")
    return 0


def reproduce(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grpo_nb import reproduce

    first, console = _existing_run(arguments.run), Console()
    again = reproduce.reproduce(first, arguments.name or f"{first.name}-again", console)
    same = reproduce.show(reproduce.compare(first, again, arguments.tolerance), console)
    return 0 if same else 1


def serve(arguments: argparse.Namespace) -> int:
    from grpo_nb.serve import serve

    return serve(_existing_run(arguments.run), arguments.host, arguments.port, arguments.adapter)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grpo_nb.config import parse_assignment
    from grpo_nb.pipeline import print_summary, run_pipeline

    console = Console()
    settings = dict(parse_assignment(text) for text in arguments.assignments)
    for name in ("data.source", "model.model_path", "rewards.preset"):
        if name in settings and Path(str(settings[name])).exists():
            settings[name] = str(Path(settings[name]).resolve())
    if arguments.name is None and arguments.first != "01":
        raise ValueError(f"--from {arguments.first} continues a run: say which with --name")
    name = arguments.name or f"{arguments.profile}-{time.strftime('%Y%m%d-%H%M%S')}"
    summary = run_pipeline(
        name, arguments.profile, settings, arguments.first, arguments.force, console, arguments.last
    )
    if summary:
        print_summary(summary, console)
    return 0


def reward_lab(arguments: argparse.Namespace) -> int:
    from grpo_nb.app import serve

    serve(arguments.name, arguments.profile, arguments.port, not arguments.no_browser)
    return 0


def doctor(_: argparse.Namespace) -> int:
    from grpo_nb.doctor import report

    text, in_order = report()
    print(text)
    return 0 if in_order else 1


COMMANDS = {
    **{"run": run, "train": train, "reward-lab": reward_lab, "doctor": doctor},
    **{"export": export, "push": push, "reproduce": reproduce, "serve": serve},
}


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 a stage failed, 2 wrong input, 128 + n stopped by signal n."""
    parsed = parse_arguments(arguments)
    try:
        return COMMANDS[parsed.command](parsed)
    except (ValueError, FileNotFoundError) as error:
        print(f"grpo-nb: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"grpo-nb: {error}", file=sys.stderr)
        return 128 + error.signal if hasattr(error, "signal") else 1
    except KeyboardInterrupt as stop:
        said = "interrupted; continue with --from and the same --name"
        print(f"grpo-nb: {stop.args[0] if stop.args else said}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
