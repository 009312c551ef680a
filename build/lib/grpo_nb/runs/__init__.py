# ruff: noqa: F401 (the imports below are the package's public names)
"""Hold the run directory and its settings, with which every stage begins and ends.

`settings` defines every setting, `config` resolves their values and records where each came from,
`profiles` holds settings for machines and `tasks` settings for tasks, `directory` is a run's
folder with its manifest, `checks` holds the results of a stage's checks, `files` reads and writes
files safely, and `names` rejects misspelt names.
"""

from grpo_nb.checks import Check, Checks
from grpo_nb.machine import PROJECT_ROOT, git_commit, installed_versions
from grpo_nb.runs.directory import (
    NOTEBOOKS,
    Run,
    Stage,
    find_run,
    project_path,
    refuse_changed,
    refuse_undone,
    resolve_stages,
    runs_root,
    start_stage,
)
from grpo_nb.runs.files import atomic_path, sha256, write_json
from grpo_nb.runs.names import refuse_unknown
