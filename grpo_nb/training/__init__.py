"""Watch and test a training that anybody built with TRL's trainer, or Unsloth's.

`monitor` raises alerts and skips updates that would ruin the weights; `health` holds the alerts
with their rules, and `logs` the keys of every version's logs. `guard` tests whether the samples
come from the policy, `preflight` runs the largest step once, and `placebo` shuffles what rewards
pay. `interruptions` keeps what is trained when an interrupt or an error ends a training. `stock`
reads what a trainer holds. `fast_cpu` speeds up training on a CPU, and `ranks` distributes
training over processes.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.files": "append_line read_lines",
        "grpo_nb.training.interruptions": "newest_checkpoint",
        "grpo_nb.updates": "Update Watcher",
    },
)
