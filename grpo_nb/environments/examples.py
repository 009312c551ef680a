"""Define two environments to copy and change: `calculator` and `guess`.

calculator: the model has to use a tool. An answer counts only if the calculator showed it first.

user       What is 47 times 38?
assistant  multiply(a=47, b=38)        1786
assistant  answer(value=1786)          over

guess: the model has to follow a strategy. Bisection finds one of eight numbers in at most four
guesses.

user       Guess my number: from 41 to 48.
assistant  guess(n=44)                 higher
assistant  guess(n=46)                 lower
assistant  guess(n=45)                 right
"""

from typing import Any

from grpo_nb.environments import tool

NUMBERS, TURNS = 8, 4  # of guess


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


class Guess:
    """Find the secret number in at most 4 guesses."""

    done: bool = True

    def reset(self, low: int, secret: int, **row: Any) -> None:
        """Begin with a secret from low to low + 7, which the question names."""
        self.secret, self.turns = secret, 0
        self.is_right, self.done = False, False

    @tool
    def guess(self, n: int) -> str:
        """Guess the number.

        Args:
            n: The guess.
        """
        if self.done:
            return "over"
        self.turns += 1
        self.is_right = n == self.secret
        self.done = self.is_right or self.turns == TURNS
        if self.is_right:
            return "right"
        return "higher" if n < self.secret else "lower"

    def get_reward(self) -> float:
        """Return 1 if the secret was found, else 0."""
        return float(self.is_right)

    @classmethod
    def solve(cls, low: int, secret: int, **row: Any) -> list[dict[str, Any]]:
        """Return the guesses that win: the middle of the remaining range, each time."""
        high, calls = low + NUMBERS - 1, []
        for _ in range(TURNS):
            n = (low + high) // 2
            calls.append({"name": "guess", "arguments": {"n": n}})
            if n == secret:
                break
            low, high = (n + 1, high) if n < secret else (low, n - 1)
        return calls
