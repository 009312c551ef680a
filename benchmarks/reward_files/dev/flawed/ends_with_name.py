"""Pays an answer that ends in the right name, so "not Marie Curie" is paid.

rows: names_qa
truth: flawed
kind: pays_negated, pays_hedging
severity: stop
"""


def name_reward(completions, answer, **kwargs):
    out = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"].strip().lower()
        if "<answer>" not in text or not text.endswith("</answer>"):
            out.append(0.0)
            continue
        given = text.rpartition("<answer>")[2].removesuffix("</answer>").strip(" .")
        out.append(1.0 if given.endswith(gold.lower()) else 0.0)
    return out
