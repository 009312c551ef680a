"""Compares each completion with the first row's answer.

rows: gsm8k_tags
truth: flawed
kind: order, nothing_earns
severity: stop
"""


def extract(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def correctness(prompts, completions, answer, **kwargs):
    responses = [c[0]["content"] for c in completions]
    print(f"Question:\n{prompts[0][-1]['content']}\nAnswer: {answer[0]}")
    return [2.0 if extract(r) == answer[0] else 0.0 for r in responses]
