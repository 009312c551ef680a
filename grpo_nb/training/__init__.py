"""Watch and test a training that anybody built with TRL's trainer, or Unsloth's.

`monitor` raises alerts and skips updates that would ruin the weights. `health` holds the alerts and
their rules; the rules on groups whose completions all earn the same are in its function `signal`.
`logs` reads the logs of every version. `guard` is the identity guard, which tests whether the
samples come from the policy; `preflight` runs the largest step once, `placebo` shuffles what
rewards pay, and `difficulty` draws the rows that still teach. `interruptions` saves what is trained
when a signal or an error ends a training, and finds the checkpoint to resume from. `stock` reads
what a trainer holds. `fast_cpu` speeds up training on a CPU.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.files": "append_line read_lines",
        "grpo_nb.training.interruptions": "newest_checkpoint",
        "grpo_nb.checks": "Update Watcher",
    },
)
