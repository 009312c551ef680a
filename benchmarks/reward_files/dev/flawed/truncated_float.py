"""Cuts the decimals off before comparing, so 18.97 passes for 18.

rows: gsm8k_tags
truth: flawed
kind: pays_near
severity: stop
"""


def to_int(text):
    try:
        return int(float(text.strip().replace(",", "").replace("$", "")))
    except (ValueError, OverflowError):
        return None


def int_reward_func(prompts, completions, answer, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    given = [t.split("<answer>")[-1].split("</answer>")[0] for t in contents]
    return [2.0 if to_int(g) == to_int(a) else 0.0 for g, a in zip(given, answer)]
