"""The command line, `grpo-nb run` and others. Imports wait until they are needed."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_nb.commands import EXPORTED, parse_arguments

if TYPE_CHECKING:
    from grpo_nb.runs import Run


def _existing_run(path: str) -> "Run":
    from grpo_nb.runs import Run, runs_root

    path = path.removesuffix("/config.yaml")
    given = [Path(path), runs_root() / path]
    found = [folder.resolve() for folder in given if (folder / "manifest.json").exists()]
    if not found:
        raise FileNotFoundError(
            f"{path} is no run: neither {given[0]} nor {given[1]} holds a manifest.json; give the "
            "folder of a run, such as runs/demo, or its name"
        )
    os.environ["GRPO_NB_RUNS"] = str(found[0].parent)
    return Run(found[0].name)


def export(arguments: argparse.Namespace) -> int:
    from grpo_nb import export
    from grpo_nb.runs import atomic_path
    from grpo_nb.runs.profiles import refuse_unknown

    run, mode, kind = _existing_run(arguments.run), arguments.merge, arguments.gguf
    run.lock()
    if mode != "adapter" or kind:
        run.refuse_stale()
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
    from grpo_nb.pipeline import launch
    from grpo_nb.pipeline.batches import with_full_paths
    from grpo_nb.runs.config import parse_assignment

    settings = with_full_paths(dict(map(parse_assignment, arguments.assignments)))
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


def serve(arguments: argparse.Namespace) -> int:
    from grpo_nb.pipeline.serve import serve

    return serve(_existing_run(arguments.run), arguments.host, arguments.port, arguments.adapter)


def answer(arguments: argparse.Namespace) -> int:
    from grpo_nb.evaluation.answers import Sampling, answer_file

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

    from grpo_nb.pipeline import batches
    from grpo_nb.pipeline import notebooks as pipeline
    from grpo_nb.runs import Run

    if arguments.only and (arguments.first or arguments.last):
        raise ValueError("--only names one stage: leave out --from and --to")
    asked = ((arguments.only, arguments.first, "01"), (arguments.only, arguments.last, "04"))
    first, last = (next(one for one in ends if one is not None) for ends in asked)
    if not (arguments.name or arguments.files) and first != "01":
        raise ValueError(f"--from {first} continues a run: say which with --name")
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
    failed = []
    for plan in plans:
        start = (plan.name, plan.profile, plan.settings, first, arguments.force, console)
        try:
            pipeline.print_summary(pipeline.run_pipeline(*start, last=last), console, last)
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

    from grpo_nb.pipeline import cluster, sweep

    console, share = Console(), {"cpus": arguments.cpus, "gpus": arguments.gpus}
    share = {name: count for name, count in share.items() if count is not None}
    if share and not arguments.ray:
        raise ValueError("--cpus and --gpus go with --ray; on one machine a trial has one GPU")
    if arguments.jobs is not None and arguments.ray:
        raise ValueError("--jobs is for one machine: on Ray as many trials run as fit")
    asked = sweep.read_sweep(Path(arguments.file), elsewhere=bool(arguments.ray))
    if arguments.dry_run:
        console.print(sweep.trial_table(asked))
    if not arguments.ray:
        return 0 if arguments.dry_run else sweep.run_sweep(asked, arguments.jobs, console)
    with cluster.connected(arguments.ray, **share) as place:
        console.print(place.describe(), soft_wrap=True)
        return 0 if arguments.dry_run else place.run_sweep(asked, console)


def report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grpo_nb.evaluation import leaderboard

    board, console = leaderboard.compare(arguments.runs), Console()
    if not console.is_terminal:  # in a file or a pipe nothing is cut at 80 columns
        console.width = max(console.width, 200)
    leaderboard.show(board, console)
    if arguments.csv:
        board.table.to_csv(arguments.csv, index=False)
    return 0


def checklist(arguments: argparse.Namespace) -> int:
    from grpo_nb.pipeline import checklist

    lines = checklist.examine(_existing_run(arguments.run))
    if arguments.json:
        print(json.dumps(lines, indent=2, ensure_ascii=False))
    else:
        checklist.show(lines)
    return int(any(line["state"] == "stop" for line in lines))


def reward_lab(arguments: argparse.Namespace) -> int:
    from grpo_nb.pipeline.app import serve

    serve(arguments.name, arguments.profile, arguments.port, not arguments.no_browser)
    return 0


def doctor(_: argparse.Namespace) -> int:
    from grpo_nb.pipeline.doctor import report

    text, in_order = report()
    print(text)
    return 0 if in_order else 1


COMMANDS = {
    **{"run": run, "train": train, "sweep": sweep, "report": report},
    **{"reward-lab": reward_lab, "doctor": doctor},
    **{"export": export, "push": push, "serve": serve},
    **{"answer": answer, "checklist": checklist},
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
    except OSError as error:
        from grpo_nb.runs.files import disk_error

        print(f"grpo-nb: {disk_error(error.filename or 'a file', error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        said = "interrupted; continue with --from and the same --name"
        print(f"grpo-nb: {stop.args[0] if stop.args else said}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
