"""Does the completion keep to its format?"""

import ast

from grpo_nb.rewards.contract import Scored, reward
from grpo_nb.rewards.correctness import parse_json
from grpo_nb.rewards.prompts import ANSWER, REASONING, extract_answer, extract_boxed, extract_tag

TAGS = (f"<{REASONING}>", f"</{REASONING}>", f"<{ANSWER}>", f"</{ANSWER}>")


def _in_order(text: str, tags: tuple[str, ...]) -> list[str] | None:
    """What stands before, between and after tags that each stand once, in order."""
    parts = []
    for tag in tags:
        before, found, text = text.partition(tag)
        if not found or tag in text:
            return None
        parts.append(before)
    return [*parts, text]


@reward(resists="empty tags, repeated tags, tags in the wrong order, text around them")
def soft_xml_format_reward(response: str) -> float:
    """1 for reasoning and answer tags, once each, in order, filled, and nothing around them.

    White space is free; that is what is soft about it.

    >>> soft_xml_format_reward(completions=[
    ...     "<reasoning>7+8=15</reasoning> <answer>15</answer>",
    ...     "<reasoning></reasoning><answer>15</answer>",
    ... ])
    [1.0, 0.0]
    """
    before, reasoning, between, answer, after = _in_order(response, TAGS) or [""] * 5
    filled = reasoning.strip() and answer.strip()
    return float(bool(filled) and not (before + between + after).strip())


@reward(resists="as soft_xml_format_reward, and tags that share a line with text")
def strict_xml_format_reward(response: str) -> float:
    """1 for the soft format with each tag on a line of its own."""
    lines = [line.strip() for line in response.strip().splitlines()]
    own_line = all(lines.count(tag) == 1 for tag in TAGS)
    return float(own_line and soft_xml_format_reward.score(response) == 1)


@reward(resists="tag stuffing: a repeated tag earns nothing")
def incremental_format_reward(response: str) -> float:
    """A quarter for each of the four tags that stands once, after the ones before it.

    It gives a model that knows no tags a first step.

    >>> incremental_format_reward(completions=["<reasoning>a</reasoning>", "</answer>" * 9])
    [0.5, 0.0]
    """
    score, position = 0.0, 0
    for tag in TAGS:
        found = response.find(tag, position)
        if found >= 0 and response.count(tag) == 1:
            score, position = score + 0.25, found + len(tag)
    return score


@reward(resists="empty or unclosed boxes, several of them")
def boxed_format_reward(response: str) -> float:
    r"""1 for exactly one `\boxed{…}`, closed and not empty."""
    return float(response.count(r"\boxed{") == 1 and bool(extract_boxed(response)))


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each closed Markdown fence, in one pass over the lines.

    >>> fenced_blocks("```python\\nx = 1\\n```")
    [('python', 'x = 1')]
    """
    blocks: list[tuple[str, str]] = []
    language, code = None, []
    for line in text.splitlines():
        fence = line.startswith("```")
        if fence and language is None:
            language, code = line[3:].strip(), []
        elif fence and not line[3:].strip():
            blocks.append((language, "\n".join(code)))
            language = None
        elif language is not None:
            code.append(line)
    return blocks


def extract_code(text: str) -> str | None:
    """The code of the last fenced block, else of the answer tag; None where there is none."""
    blocks = fenced_blocks(extract_tag(text, ANSWER) or text)
    return blocks[-1][1] if blocks else extract_tag(text, ANSWER)


@reward(resists="empty blocks, several blocks, another language")
def code_block_format_reward(response: str, *, language: str = "python") -> float:
    """1 for exactly one fenced block, not empty, marked with the language."""
    blocks = fenced_blocks(response)
    return float(len(blocks) == 1 and blocks[0][0] == language and bool(blocks[0][1].strip()))


@reward(resists="code in prose: only a fenced block or the answer tag is read")
def no_syntax_error_reward(response: str) -> Scored:
    """1 if the code is Python that parses and does something. It is not run."""
    code = extract_code(response)
    if not code or len(code) > 100_000:
        return Scored(0.0, "no code" if not code else "longer than 100,000 characters")
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Scored(0.0, f"{type(error).__name__}: {error}")
    return Scored(float(any(not isinstance(node, ast.Expr | ast.Pass) for node in body)))


@reward(resists="bare scalars (`1`, `NaN`), empty objects")
def json_format_reward(response: str) -> Scored:
    """1 if the final answer is a JSON object or array that is not empty."""
    try:
        value = parse_json(extract_answer(response) or "")
    except ValueError as error:
        return Scored(0.0, f"not JSON: {error}")
    return Scored(float(isinstance(value, dict | list) and bool(value)))
