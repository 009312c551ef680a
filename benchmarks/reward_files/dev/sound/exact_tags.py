"""Sound: exactly one answer block, compared as text after commas, dollars and stars are taken off.

rows: gsm8k_tags
truth: sound
"""

import re


def normalize(text):
    return re.sub(r"[,$*\s]", "", text).rstrip(".")


def correctness_reward_func(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, a in zip(completions, answer):
        blocks = re.findall(r"<answer>(.*?)</answer>", completion[0]["content"], re.DOTALL)
        rewards.append(2.0 if len(blocks) == 1 and normalize(blocks[0]) == a else 0.0)
    return rewards
