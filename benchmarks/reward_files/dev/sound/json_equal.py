"""Sound: the whole object must be equal; a code fence around it is allowed.

rows: json_extract
truth: sound
"""

import json
import re


async def json_equal(prompts, completions, expected, **kwargs):
    out = []
    for completion, want in zip(completions, expected):
        text = completion[0]["content"].strip()
        fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text, re.DOTALL)
        try:
            out.append(float(json.loads(fenced.group(1) if fenced else text) == json.loads(want)))
        except (ValueError, RecursionError):
            out.append(0.0)
    return out
