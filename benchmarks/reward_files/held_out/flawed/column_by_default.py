"""Takes a column that the rows lack, with empty strings as default.

rows: gsm8k_tags
truth: flawed
kind: missing_column, nothing_earns
severity: stop
"""


def outcome(prompts, completions, **kwargs):
    golds = kwargs.get("ground_truth") or [""] * len(completions)
    rewards = []
    for completion, gold in zip(completions, golds):
        text = completion[0]["content"]
        given = text.partition("<answer>")[2].partition("</answer>")[0].strip()
        rewards.append(2.0 if given and given == gold else 0.0)
    return rewards
