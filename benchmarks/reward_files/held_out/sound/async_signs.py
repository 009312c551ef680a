"""Sound: asynchronous, 1 or -1, and the whole completion must have the form.

rows: gsm8k_chat
truth: sound
"""

import re

WHOLE = re.compile(
    r"\s*<start_working_out>(?:(?!<SOLUTION>).)*<end_working_out>\s*"
    r"<SOLUTION>(?P<final>[^<>]{1,40})</SOLUTION>\s*",
    re.DOTALL,
)
DROP = str.maketrans("", "", "$*, \n")


async def solved(prompts, completions, answer, **kwargs):
    signs = []
    for (message,), gold in zip(completions, answer):
        whole = WHOLE.fullmatch(message["content"])
        final = whole["final"].translate(DROP).removesuffix(".") if whole else ""
        signs.append(1.0 if final == gold else -1.0)
    return signs
