# ruff: noqa: F401 (the imports below are the package's public names)
"""The reward lab: `check_rewards`, the score table, and the verdict that stage 03 requires.

A `RewardTest` contains rewards and the data for testing them: `open_test` samples the base model
once, and the `Bench` scores the completions as TRL would. `judge` returns the `Verdict`, `save`
writes it, and `refuse_untested` refuses to train without a valid verdict. `try_out` loads your own
rewards without writing anything; `adopt` and `hand_on` write the file that is used in training.
`rewards_cell` is the cell magic `%%rewards`, and `adopt` uses the text of that cell.
"""

from grpo_nb.reward_lab.attacks import Attack, read_attacks
from grpo_nb.reward_lab.baseline import RewardTest, open_test
from grpo_nb.reward_lab.check import RewardVerdict, check_rewards
from grpo_nb.reward_lab.gate import Verdict, fingerprint, judge, refuse_untested, save
from grpo_nb.reward_lab.own import (
    adopt,
    fault,
    hand_on,
    in_template,
    rewards_cell,
    source_of,
    try_out,
)
from grpo_nb.reward_lab.table import Bench, bench_of, explain, signal_table
