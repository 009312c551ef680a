"""Stage 03: GRPO made safe and legible, over TRL's trainer.

    session = training.Session(stage, policy, rewards, rows)
    metrics = session.run()

`plan` says in which stages, `trainer` builds TRL's with our additions (`checkpoints`,
`measured`), `monitor` acts after each step, `validation` asks whether the policy
gets better, `session` holds it together and resumes what was cut off.
"""

from grpo_nb.training.arguments import grpo_arguments, notable
from grpo_nb.training.control import Controls, Update, Watcher
from grpo_nb.training.metrics import append_line, read_completions, read_lines
from grpo_nb.training.plan import expected
from grpo_nb.training.preflight import refuse
from grpo_nb.training.session import Session
from grpo_nb.training.trainer import build_trainer

__all__ = [
    "Controls",
    "Session",
    "Update",
    "Watcher",
    "append_line",
    "build_trainer",
    "expected",
    "grpo_arguments",
    "notable",
    "read_completions",
    "read_lines",
    "refuse",
]
