"""Play a small word game: each guess gets a hint for every letter, which the next one should use.

user       Find the word. It is not abd: a elsewhere, b elsewhere, d elsewhere.
assistant  guess(first="b", second="d", third="a")     b elsewhere, d elsewhere, a elsewhere
assistant  guess(first="d", second="a", third="b")     found
"""

from typing import Any, Literal

from grpo_nb.environments import tool

Letter = Literal["a", "b", "c", "d"]
GUESSES = 4


def hints(word: str, secret: str) -> str:
    """Return the hint of each letter of a guess: in place, elsewhere or absent.

    A letter is "elsewhere" as often as the secret has it at places where the guess is wrong.
    """
    rest = [b for a, b in zip(word, secret, strict=True) if a != b]
    letters = []
    for a, b in zip(word, secret, strict=True):
        hint = "in place" if a == b else "elsewhere" if a in rest else "absent"
        if hint == "elsewhere":
            rest.remove(a)
        letters.append(f"{a} {hint}")
    return ", ".join(letters)


class Wordle:
    """Find the word of three letters from a to d, in at most 4 guesses. All hints are true."""

    max_turns = GUESSES + 2  # two spare turns for malformed calls
    done: bool = True

    def reset(self, secret: str, clue: str) -> None:
        """Begin with a secret word, and an earlier guess whose hints are in the question."""
        self.secret, self.guesses, self.hits = secret, [clue], 0
        self.is_right, self.done = False, False

    @tool
    def guess(self, first: Letter, second: Letter, third: Letter) -> str:
        """Guess the word.

        Args:
            first: Its first letter.
            second: Its second letter.
            third: Its third letter.
        """
        word = first + second + third
        self.hits += all(hints(old, word) == hints(old, self.secret) for old in self.guesses)
        self.guesses.append(word)
        self.is_right = word == self.secret
        self.done = self.is_right or len(self.guesses) > GUESSES
        return "found" if self.is_right else hints(word, self.secret)

    def get_reward(self) -> float:
        """Return 1 for the word; else 0.1 for each guess that fitted all hints before it."""
        return 1.0 if self.is_right else 0.1 * self.hits

    @classmethod
    def solve(cls, secret: str, **row: Any) -> list[dict[str, Any]]:
        """Return the guess that wins."""
        letters = zip(("first", "second", "third"), secret, strict=True)
        return [{"name": "guess", "arguments": dict(letters)}]
