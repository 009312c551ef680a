"""The reward lab: `check_rewards`, the score table, and the verdict that stage 03 requires.

A `RewardTest` contains rewards and the data for testing them: `open_test` samples the base model
once, and the `Bench` scores the completions as TRL would. `judge` returns the `Verdict`, `save`
writes it, and `refuse_untested` refuses to train without a valid verdict. `try_out` loads your own
rewards without writing anything; `adopt` and `hand_on` write the file that is used in training.
`rewards_cell` is the cell magic `%%rewards`, and `adopt` uses the text of that cell.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.reward_lab.attacks": "Attack read_attacks",
        "grpo_nb.reward_lab.baseline": "RewardTest open_test",
        "grpo_nb.reward_lab.check": "RewardVerdict check_rewards",
        "grpo_nb.reward_lab.gate": "Verdict fingerprint judge refuse_untested save",
        "grpo_nb.reward_lab.own": (
            "adopt fault hand_on in_template rewards_cell source_of try_out"
        ),
        "grpo_nb.reward_lab.table": "Bench bench_of explain signal_table",
    },
)
