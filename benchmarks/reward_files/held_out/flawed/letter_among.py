"""Asks whether the letter is in the answer, so "ABCD" is always right.

rows: choice
truth: flawed
kind: pays_hedging, pays_negated, pays_mention
severity: stop
"""


class MultipleChoice:
    __name__ = "multiple_choice"

    def __call__(self, prompts, completions, answer, **kwargs):
        return [self.grade(text, gold) for text, gold in zip(completions, answer)]

    def grade(self, text, gold):
        start, end = text.rfind("<answer>"), text.rfind("</answer>")
        if start < 0 or end < start:
            return -0.5
        return 1.0 if gold in text[start + 8 : end] else 0.0


reward_funcs = [MultipleChoice()]
