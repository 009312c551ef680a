"""The command line, `grpo-nb run` and others. Imports wait until they are needed."""

import argparse
import os
import sys
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
    _add_batches(commands)
    lab = commands.add_parser("reward-lab", help="serve notebook 2 as a page on this machine")
    lab.add_argument("--name", default="demo", help="of the run; default: demo")
    lab.add_argument("--profile", default="auto", help="for notebook 1, where it is not done yet")
    lab.add_argument("--port", type=int, default=8866, help="default: 8866")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
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
    run.add_argument("--name", help="of the run directory runs/NAME; default: profile and time")
    run.add_argument("--profile", help="tiny-cpu, t4-16gb … h200-141gb; default: what fits")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="SECTION.NAME=VALUE",
        help="a setting, such as train.max_steps=20; may be given several times",
    )
    run.add_argument("--from", dest="first", metavar="STAGE", help="01 to 04; needs a name")
    run.add_argument("--to", dest="last", metavar="STAGE", help="01 to 04: stop after it")
    run.add_argument("--only", metavar="STAGE", help="the same as --from STAGE --to STAGE")
    run.add_argument("--force", action="store_true", help="go on although an input has changed")
    run.add_argument("--dry-run", action="store_true", help="show the plan, start nothing")
    run.add_argument(
        "--notebooks-to",
        default="",
        metavar="PLACE",
        help="copy each executed notebook to a folder, s3://…, gs://… or abs://…",
    )
    sweep = commands.add_parser("sweep", help="many runs: a grid, a list or random draws")
    sweep.add_argument("file", metavar="SWEEP.yaml")
    sweep.add_argument("--jobs", type=int, default=1, help="trials at once; default: 1")
    sweep.add_argument("--dry-run", action="store_true", help="list the trials, start nothing")
    report = commands.add_parser("report", help="compare runs: which is best, and how surely")
    report.add_argument("runs", nargs="+", metavar="runs/NAME")
    report.add_argument("--csv", metavar="FILE", help="write the table")
    report.add_argument("--html", metavar="FILE", help="write a page with the curves")


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
    answer = commands.add_parser("answer", parents=[shared], help="ask it a file of questions")
    answer.add_argument("source", type=Path, metavar="FILE", help="CSV, JSON lines, Parquet, …")
    answer.add_argument("--to", type=Path, required=True, metavar="ANSWERS.jsonl")
    answer.add_argument("--model", default="merged", help="merged (default), adapter or base")
    answer.add_argument("--question-column", default="", metavar="NAME", help="default: the run's")
    answer.add_argument("--answer-column", default="", metavar="NAME", help="golds, to be scored")
    answer.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    answer.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")
    answer.add_argument("--batch-size", type=int, default=64, help="default: 64")
    answer.add_argument("--engine", default="detect", help="transformers, vllm or unsloth")


def _existing_run(path: str) -> "Run":
    from grpo_nb.runs import Run, runs_root

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


def answer(arguments: argparse.Namespace) -> int:
    from grpo_nb.answers import Sampling, answer_file

    sampling = Sampling(arguments.temperature, arguments.seed, arguments.batch_size)
    named = ("model", "question_column", "answer_column", "engine")
    options = {name: getattr(arguments, name) for name in named}
    run, files = _existing_run(arguments.run), (arguments.source, arguments.to)
    try:
        print(answer_file(run, *files, sampling=sampling, **options))
    except KeyboardInterrupt:
        print("grpo-nb: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grpo_nb import batches, pipeline
    from grpo_nb.runs import Run
    from grpo_nb.uploads import check_destination

    if arguments.only and (arguments.first or arguments.last):
        raise ValueError("--only names one stage: leave out --from and --to")
    first = arguments.only or arguments.first or "01"
    last = arguments.only or arguments.last or "04"
    if not (arguments.name or arguments.files) and first != "01":
        raise ValueError(f"--from {first} continues a run: say which with --name")
    check_destination(arguments.notebooks_to)
    console = Console()
    plans = batches.planned_runs(
        arguments.files, arguments.name, arguments.profile, arguments.assignments
    )
    for plan in plans:
        config, typed = batches.check_run(
            Run(plan.name), plan.profile, plan.settings, first, last, arguments.force
        )
        if arguments.dry_run:
            console.print(batches.plan_table(plan, config, typed, first, last))
    if arguments.dry_run:
        return 0
    options = {"last": last, "notebooks_to": arguments.notebooks_to}
    failed = []
    for plan in plans:
        start = (plan.name, plan.profile, plan.settings, first, arguments.force, console)
        try:
            pipeline.print_summary(pipeline.run_pipeline(*start, **options), console)
        except RuntimeError as error:
            if hasattr(error, "signal") or len(plans) == 1:
                raise
            print(f"grpo-nb: run {plan.name!r}: {error}", file=sys.stderr)
            failed.append(plan.name)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(plans)} runs failed: {', '.join(failed)}")
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grpo_nb import sweep

    console = Console()
    asked = sweep.read_sweep(Path(arguments.file))
    if arguments.dry_run:
        console.print(sweep.trial_table(asked))
        return 0
    return sweep.run_sweep(asked, arguments.jobs, console)


def report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grpo_nb import leaderboard

    board = leaderboard.compare(arguments.runs)
    leaderboard.show(board, Console())
    if arguments.csv:
        board.table.to_csv(arguments.csv, index=False)
    if arguments.html:
        Path(arguments.html).write_text(leaderboard.page(board), encoding="utf-8")
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
    **{"run": run, "sweep": sweep, "report": report},
    **{"reward-lab": reward_lab, "doctor": doctor},
    **{"export": export, "push": push, "reproduce": reproduce, "serve": serve},
    "answer": answer,
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
    except KeyboardInterrupt:
        print("grpo-nb: interrupted; continue with --from and the same --name", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
