"""Use a tool: the model has a calculator, and cannot multiply without it.

user       What is 47 times 38?
assistant  multiply(a=47, b=38)        1786
assistant  answer(value=1786)          over
"""

from typing import Any

from grpo_nb.environments import tool


class Calculator:
    """Work the product out with the calculator, then answer."""

    done: bool = True

    def reset(self, a: int, b: int, **row: Any) -> None:
        """Begin with the product of a and b."""
        self.product = a * b
        self.has_product, self.is_right, self.done = False, False, False

    @tool
    def multiply(self, a: int, b: int) -> str:
        """Multiply two whole numbers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        self.has_product = self.has_product or a * b == self.product
        return str(a * b)

    @tool
    def answer(self, value: int) -> str:
        """Give the final answer, which ends the episode.

        Args:
            value: The product.
        """
        if self.done:
            return "over"
        self.is_right, self.done = value == self.product, True
        return "over"

    def get_reward(self) -> float:
        """Return 1 for the right answer if the calculator showed it first; a guess earns 0."""
        return float(self.has_product and self.is_right)

    @classmethod
    def solve(cls, a: int, b: int, **row: Any) -> list[dict[str, Any]]:
        """Return the calls that win."""
        return [
            {"name": "multiply", "arguments": {"a": a, "b": b}},
            {"name": "answer", "arguments": {"value": a * b}},
        ]
