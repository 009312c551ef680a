"""Sound: a little scanner with find(); later blocks or text after the answer cost the pay.

rows: gsm8k_tags
truth: sound
"""


def between(text, start, end):
    i = text.find(start)
    j = text.find(end, i + len(start))
    if i < 0 or j < 0:
        return None, text
    return text[i + len(start) : j], text[j + len(end) :]


def answer_only(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        _, rest = between(completion[0]["content"], "<reasoning>", "</reasoning>")
        inner, rest = between(rest, "<answer>", "</answer>")
        if inner is None or rest.strip():
            scores.append(0.0)
            continue
        for mark in ("$", ",", "*"):
            inner = inner.replace(mark, "")
        scores.append(1.5 if inner.strip().rstrip(".") == gold else 0.0)
    return scores
