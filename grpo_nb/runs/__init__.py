# ruff: noqa: F401 (the imports below are the package's public names)
"""Keep the directory of a run and its settings, which every stage reads and updates.

`settings` defines every setting, and `config` resolves the values and records where each came from.
The folder `profiles` holds settings for machines, and `tasks` holds settings for tasks. `directory`
reads and writes a run's folder with its manifest.
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
