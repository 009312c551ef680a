"""Pays the right number anywhere in the completion, though the final answer may be wrong.

rows: gsm8k_tags
truth: flawed
kind: pays_mention, pays_hedging, pays_negated
severity: stop
"""


def correctness_reward_func(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if a in r else 0.0 for r, a in zip(responses, answer)]
