"""Sound: what stands after the last #### is compared with what stands after it in the reference.

rows: gsm8k_raw
truth: sound
"""


def _final(text):
    if "####" not in text:
        return None
    tail = text.rsplit("####", 1)[1].strip().strip("*").rstrip(".")
    return tail.replace(",", "").replace("$", "").strip()


def gsm8k_reward(prompts, completions, answer, **kwargs):
    golds = [_final(a) for a in answer]
    return [float(_final(c) == g) for c, g in zip(completions, golds)]
