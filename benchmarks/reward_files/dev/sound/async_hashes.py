"""Sound: an asynchronous reward that compares whole numbers after the only ####.

rows: gsm8k_raw
truth: sound
"""

import asyncio
import re


def whole(text):
    parts = text.split("####")
    if len(parts) != 2:
        return None
    m = re.fullmatch(r"\s*\**\$?(-?[0-9]{1,3}(?:,?[0-9]{3}){0,5}|-?[0-9]{1,18})\.?\**\s*", parts[1])
    return int(m.group(1).replace(",", "")) if m else None


async def whole_number_reward(prompts, completions, answer, **kwargs):
    async def one(text, gold):
        await asyncio.sleep(0)
        given = whole(text)
        return 1.0 if given is not None and given == whole(gold) else 0.0

    return list(await asyncio.gather(*(one(c, a) for c, a in zip(completions, answer))))
