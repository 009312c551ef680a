"""The run directory and its settings: what every stage reads first and writes last.

`settings` holds every setting with its meaning, `config` resolves them with their sources,
`profiles` are sets of them for a machine, `directory` is the folder of a run with its manifest,
`checks` what the stages have looked at.
"""

from grpo_nb.runs.checks import Check
from grpo_nb.runs.directory import (
    NOTEBOOKS,
    PROJECT_ROOT,
    Run,
    Stage,
    atomic_path,
    check_stages_before,
    git_commit,
    installed_versions,
    project_path,
    refuse_path,
    resolve_stage,
    runs_root,
    sha256,
    start_stage,
    write_json,
)

__all__ = [
    "NOTEBOOKS",
    "PROJECT_ROOT",
    "Check",
    "Run",
    "Stage",
    "atomic_path",
    "check_stages_before",
    "git_commit",
    "installed_versions",
    "project_path",
    "refuse_path",
    "resolve_stage",
    "runs_root",
    "sha256",
    "start_stage",
    "write_json",
]
