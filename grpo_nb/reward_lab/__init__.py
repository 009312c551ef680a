"""Test rewards: `check_rewards`, the score table, and the verdict that stage 03 requires.

A `RewardTest` contains rewards and the data for testing them: `open_test` samples the base model
once, and the `Bench` scores the completions as TRL would. `judge` returns the `Verdict`, `save`
writes it, and `refuse_untested` refuses to train without a valid verdict.

`check_rewards` is told nothing: `written` finds how a right answer is written, from the answers in
the rows (`columns`) and from the rewards' code (`source`). `attacks` and `programs` write
completions that cheat, `amounts` says which of them win, and `linter` finds faults that show
without a right answer. All of them call the rewards by `scoring`.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.reward_lab.attacks": "Attack",
        "grpo_nb.reward_lab.baseline": "RewardTest open_test",
        "grpo_nb.reward_lab.check": "RewardVerdict check_rewards",
        "grpo_nb.reward_lab.gate": "Verdict arguments fingerprint judge refuse_untested save",
        "grpo_nb.reward_lab.table": "Bench bench_of explain",
    },
)
