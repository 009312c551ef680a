"""Sound: the references are parsed once by a cache; a missing answer costs 0.2.

rows: gsm8k_raw
truth: sound
"""

import functools
import re

FINAL = re.compile(r"####[ \t]*\**\$?(-?\d{1,3}(?:,\d{3}){1,4}|-?\d{1,15})\.?\**\s*\Z", re.ASCII)


@functools.lru_cache(maxsize=10_000)
def gold_number(reference: str) -> int:
    return int(FINAL.search(reference)[1].replace(",", ""))


def gsm8k(prompts: list[str], completions: list[str], answer: list[str], **_) -> list[float]:
    out: list[float] = []
    for text, reference in zip(completions, answer):
        match = FINAL.search(text)
        if match is None:
            out.append(-0.2)
            continue
        out.append(1.0 * (int(match[1].replace(",", "")) == gold_number(reference)))
    return out
