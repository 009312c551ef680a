# ruff: noqa: F401 (what is imported here is what the room hands out)
"""The reward lab: score table, linter, attacks, and the verdict that stage 03 asks for.

`baseline` samples the base model once; a `Bench` scores its completions as TRL would; `judge` gives
the `Verdict`, `save` keeps it, and `check` lets a training begin or refuses it. Rewards of your own
are tried by `try_out`, and trained once `adopt` or `hand_on` wrote them.
"""

from grpo_nb.reward_lab.attacks import Attack, probe, read_attacks, winners
from grpo_nb.reward_lab.gate import Verdict, check, fingerprint, judge, save
from grpo_nb.reward_lab.linter import lint
from grpo_nb.reward_lab.own import adopt, fault, hand_on, in_template, source_of, try_out
from grpo_nb.reward_lab.table import Bench, bench_of, explain, signal_table
