"""Run stage 03 without a notebook server, in one process, or in one per GPU under a launcher.

    python -m torch.distributed.run --nproc_per_node 8 -m grpo_nb train runs/NAME --processes 8
    accelerate launch --config_file docs/launch/fsdp.yaml -m grpo_nb train runs/NAME

Each process executes the cells of notebook 3 as a script. Only the first one writes files and
prints. See docs/launch.md.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_nb import models, ranks
from grpo_nb.files import read_json
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.notebooks import QUIET, assigned
from grpo_nb.runs import NOTEBOOKS, Run, config, resolve_stages

# A process that lost the connection to another one waits this long before it records its error.
# The launcher names the earliest error as the cause. It polls every 0.1 s, and rounds to seconds.
SECONDS_TO_BE_ENDED = 3


def train(
    run: Run, assignments: Sequence[str], processes: int | None = None, force: bool = False
) -> None:
    """Train a run whose rewards were tested.

    Args:
        run: A run whose stages 01 and 02 are done.
        assignments: Settings of stage 03 as `--set` takes them; they override the run's.
        processes: How many processes share each step; None for all that the launcher started.
        force: Whether to start even if an earlier stage has changed, or a check fails.

    Raises:
        ValueError: Before the first step: the number of processes or a setting is wrong, a stage is
            missing, the policy cannot be trained by several processes, or a check failed.
        RuntimeError: The run is in use, or training failed, here or in another process, whose error
            the launcher prints.
        KeyboardInterrupt: A signal stopped training; a checkpoint is kept.
    """
    os.environ.update(QUIET | {"GRPO_NB_RUNS": str(run.path.parent)})
    ranks.start(processes)
    if not ranks.is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process ends
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher prints the first error from it
            sys.stderr = sys.stdout
    settings = config.of_stage("03", run.settings("03")) | assigned(assignments)
    ranks.recorded(_train)(run, settings, force)
    ranks.end()


def _train(run: Run, settings: Mapping[str, Any], force: bool) -> None:
    try:
        _refuse(resolve_stages(run, settings, "03", "03"))
        notebook = PROJECT_ROOT / f"notebooks/{NOTEBOOKS['03']}.ipynb"
        execute_cells(notebook, {"run_name": run.path, "settings": settings, "force": force})
    except RuntimeError as error:
        if ranks.count() == 1 or not ranks.is_lost_connection(error):
            raise
        time.sleep(SECONDS_TO_BE_ENDED)
        notes = "; ".join(["see its error", *getattr(error, "__notes__", [])])
        raise RuntimeError(f"another process of this run died; {notes}") from error


def execute_cells(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook's code cells in this process; what they only show is left out.

    Args:
        notebook: The notebook; its code uses no magics.
        parameters: Values that replace those of the cell with the tag "parameters".
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in read_json(notebook)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        code = compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec")
        exec(code, names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= parameters


def _refuse(settings: config.RunConfig) -> None:
    """Raise ValueError if several processes cannot train with these settings."""
    if ranks.count() > 1 and settings.policy.backend == "unsloth":
        raise ValueError(
            f"Unsloth trains in one process, and there are {ranks.count()}: start one, or use "
            "--set policy.backend=transformers"
        )
    packed, steps = settings.model.load_in_4bit, settings.train.sft_steps
    if models.sharded() and (packed or steps):
        raise ValueError(
            "FSDP and ZeRO-3 need model.load_in_4bit = False and train.sft_steps = 0, and these "
            f"are {packed} and {steps}: set them, or use ddp.yaml"
        )
