"""Use a strategy over several turns: bisection finds one of eight numbers in at most four guesses.

user       Guess my number: from 41 to 48.
assistant  guess(n=44)                 higher
assistant  guess(n=46)                 lower
assistant  guess(n=45)                 right
"""

from typing import Any

from grpo_nb.environments import tool

NUMBERS, TURNS = 8, 4


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
