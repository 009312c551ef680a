"""The command line: `grpo-nb run`, `sweep`, `report` and more. Imports wait till needed."""

import argparse
import sys
from pathlib import Path


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


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 a stage failed, 2 wrong input, 128 + n stopped by signal n."""
    parsed = parse_arguments(arguments)
    try:
        commands = {"run": run, "sweep": sweep, "report": report}
        commands |= {"reward-lab": reward_lab, "doctor": doctor}
        return commands[parsed.command](parsed)
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
