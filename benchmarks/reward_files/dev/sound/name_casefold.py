"""Sound: the answer block is the name but for case, accents and an article.

rows: names_qa
truth: sound
"""

import re
import unicodedata


def simplify(name):
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^a-z0-9 ]", "", plain.lower())
    return re.sub(r"^(the|a) ", "", " ".join(plain.split()))


def exact_match_reward(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        _, think, rest = completion[0]["content"].rpartition("</think>")
        m = re.fullmatch(r"\s*<answer>([^<>]*)</answer>\s*", rest)
        rewards.append(1.0 if think and m and simplify(m.group(1)) == simplify(gold) else 0.0)
    return rewards
