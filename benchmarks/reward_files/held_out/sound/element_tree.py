"""Sound: parses the completion as XML and compares the only answer element.

rows: gsm8k_tags
truth: sound
"""

import xml.etree.ElementTree as ET


def xml_answer(text):
    try:
        root = ET.fromstring(f"<completion>{text}</completion>")
    except ET.ParseError:
        return None
    if [child.tag for child in root] != ["reasoning", "answer"] or len(root[1]):
        return None
    return (root[1].text or "").strip(" \n\t*$").removesuffix(".").replace(",", "")


def xml_reward(completions, answer, **kwargs):
    return [2.0 * (xml_answer(c[0]["content"]) == a) - 0.5 for c, a in zip(completions, answer)]
