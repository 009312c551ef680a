"""Text such as "²" is made of digits for isdigit() but not for int(), which raises.

rows: gsm8k_tags
truth: flawed
kind: raises
severity: stop
"""


def int_equal(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"]
        inner = text.split("<answer>")[-1].split("</answer>")[0].strip(" \n$.*").replace(",", "")
        if inner.isdigit():
            rewards.append(1.0 if int(inner) == int(gold) else 0.2)
        else:
            rewards.append(0.0)
    return rewards
