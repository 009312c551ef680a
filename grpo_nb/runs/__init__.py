# ruff: noqa: F401 (what is imported here is what the room hands out)
"""The run directory and its settings: what every stage reads first and writes last.

`settings` holds every setting with its meaning, `config` resolves them with their sources,
`profiles` are sets of them for a machine, `tasks` for what is taught, `directory` is the folder
of a run with its manifest, `checks` what the stages have looked at, `files` how files are read and
written, `names` how a wrong name is refused.
"""

from grpo_nb.machine import PROJECT_ROOT, git_commit, installed_versions
from grpo_nb.runs.checks import Check
from grpo_nb.runs.directory import (
    NOTEBOOKS,
    Run,
    Stage,
    check_stages_before,
    find_run,
    project_path,
    resolve_stages,
    runs_root,
    start_stage,
)
from grpo_nb.runs.files import atomic_path, sha256, write_json
from grpo_nb.runs.names import refuse_unknown
