# ruff: noqa: F401 (the imports below are the package's public names)
"""Hold the run directory and its settings, with which every stage begins and ends.

`settings` defines every setting, and `config` resolves their values and records where each came
from; the folder `profiles` holds settings for machines and `tasks` settings for tasks. `directory`
is a run's folder with its manifest.
"""

from grpo_nb.runs.directory import (
    NOTEBOOKS,
    Run,
    Stage,
    find_run,
    refuse_undone,
    resolve_stages,
    runs_root,
    start,
)
