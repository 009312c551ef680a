"""Is the answer right?"""

from grpo_nb.numbers import parse_number
from grpo_nb.prompts import extract_answer
from grpo_nb.rewards.contract import reward


@reward()
def numeric_correctness_reward(response: str, answer: str) -> float | None:
    """1 if the answer tag holds the gold's number, exactly; None if the gold is no number.

    The whole answer has to be one number ("17 or 18" earns nothing), and there has to be
    exactly one answer tag.

    >>> completions = ["<answer>18</answer>", "<answer>17 or 18</answer>", "18"]
    >>> numeric_correctness_reward(completions=completions, answer=["18"] * 3)
    [1.0, 0.0, 0.0]
    """
    gold = parse_number(answer)
    if gold is None:
        return None
    return float(parse_number(extract_answer(response) or "") == gold)
