"""Format rewards, which pay for completions that are written in the required form."""

import ast
import json
import re
from typing import Any

from grpo_nb.answers.forms import TAGS, Form, fenced_blocks
from grpo_nb.rewards.contract import Scored, reward


@reward(needs="marks", resists="empty or repeated marks, the wrong order, marks of other forms")
def soft_format_reward(response: str, *, form: Form = TAGS) -> float:
    """Pay 1 if every mark of the form occurs once, in order, around some text.

    White space does not matter. A box or a block of code may have prose around it; tags may not.

    >>> soft_format_reward(completions=[
    ...     "<reasoning>7+8=15</reasoning> <answer>15</answer>",
    ...     "<reasoning></reasoning><answer>15</answer>",
    ... ])
    [1.0, 0.0]
    """
    return float(form.is_well_formed(response))


@reward(needs="marks", resists="stuffing: a repeated mark earns nothing")
def incremental_format_reward(response: str, *, form: Form = TAGS) -> float:
    """Pay the share of the form's marks (a quarter for each tag) that occur once, in order.

    So a model that does not write the form yet can learn it mark by mark.

    >>> incremental_format_reward(completions=["<reasoning>a</reasoning>", "</answer>" * 9])
    [0.5, 0.0]
    """
    return form.progress(response)


def extract_code(text: str, form: Form = TAGS) -> str | None:
    """Return the last fenced block of the marked answer, or of the text if no answer is marked.

    If there is no fenced block, or if the form itself is one, return the marked answer.

    >>> extract_code("```python\\nx = 1\\n```"), extract_code("<answer>x = 1</answer>")
    ('x = 1', 'x = 1')
    """
    answer = form.marked(text)
    blocks = fenced_blocks(answer or text)
    return answer if form.kind == "code" or not blocks else blocks[-1][1]


@reward(resists="code in prose: only a fenced block or the marks of the answer are read")
def no_syntax_error_reward(response: str, *, form: Form = TAGS) -> Scored:
    """Pay 1 if the code is valid Python with more than expressions and `pass`. It is not run."""
    code = extract_code(response, form)
    if not code or len(code) > 100_000:
        return Scored(0.0, "no code" if not code else "longer than 100,000 characters")
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Scored(0.0, f"{type(error).__name__}: {error}")
    return Scored(float(any(not isinstance(node, ast.Expr | ast.Pass) for node in body)))


def parse_json(text: str) -> Any:
    """Parse text that is one JSON value, with or without a Markdown fence.

    Raises:
        ValueError: The text is not JSON, or contains NaN or Infinity, which JSON lacks.
    """
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text.strip(), flags=re.DOTALL)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(fenced[1] if fenced else text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@reward(resists="bare scalars (`1`, `NaN`), empty objects")
def json_format_reward(response: str, *, form: Form = TAGS) -> Scored:
    """Pay 1 if the final answer is a JSON object or array that is not empty."""
    try:
        value = parse_json(form.extract(response) or "")
    except ValueError as error:
        return Scored(0.0, f"not JSON: {error}")
    return Scored(float(isinstance(value, dict | list) and bool(value)))
