"""Does the completion keep to `<reasoning>…</reasoning><answer>…</answer>`?"""

from grpo_nb.prompts import ANSWER, REASONING, extract_tag
from grpo_nb.rewards.contract import reward

TAGS = (f"<{REASONING}>", f"</{REASONING}>", f"<{ANSWER}>", f"</{ANSWER}>")


@reward()
def soft_xml_format_reward(response: str) -> float:
    """1 for both tags, once each, in order, with something inside and nothing around them.

    White space is free; that is what is soft about it.

    >>> soft_xml_format_reward(completions=[
    ...     "<reasoning>7+8=15</reasoning> <answer>15</answer>",
    ...     "<reasoning></reasoning><answer>15</answer>",
    ... ])
    [1.0, 0.0]
    """
    text = response.strip()
    before, _, after = text.partition(TAGS[1])
    reasoning = extract_tag(before + TAGS[1], REASONING)
    answer = extract_tag(after, ANSWER)
    around = text.startswith(TAGS[0]) and after.lstrip().startswith(TAGS[2])
    return float(bool(around and text.endswith(TAGS[3]) and reasoning and answer))


@reward()
def incremental_format_reward(response: str) -> float:
    """A quarter for each of the four tags that stands once, after the ones before it.

    It gives a model that knows no tags a first step; a repeated tag earns nothing, so
    stuffing tags does not pay.

    >>> incremental_format_reward(completions=["<reasoning>a</reasoning>", "</answer>" * 9])
    [0.5, 0.0]
    """
    score, position = 0.0, 0
    for tag in TAGS:
        found = response.find(tag, position)
        if found >= 0 and response.count(tag) == 1:
            score, position = score + 0.25, found + len(tag)
    return score
