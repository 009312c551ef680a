"""Sound: a soft penalty for overlong text as in DAPO, beside the correctness.

rows: gsm8k_raw
truth: sound
"""

LIMIT, BUFFER = 1500, 500


def soft_overlong_punishment(completions, **kwargs):
    over = [max(0, len(c) - LIMIT + BUFFER) / BUFFER for c in completions]
    return [-min(1.0, o) * 0.5 for o in over]


def correct(completions, answer, **kwargs):
    def final(text):
        lines = text.strip().splitlines() or [""]
        return (
            lines[-1].removeprefix("####").strip(" *$.").replace(",", "")
            if (lines[-1].startswith("####"))
            else None
        )

    golds = [a.rsplit("#### ", 1)[1] for a in answer]
    return [1.0 if final(c) == g else -1.0 for c, g in zip(completions, golds)]


reward_funcs = [correct, soft_overlong_punishment]
