"""A small word game: hints for each letter, which the next guess should use.

user       Find the word: three letters, each one of a, b, c, d.
assistant  guess(word="aab")           a elsewhere, a absent, b in place
assistant  guess(word="cab")           c absent, a in place, b in place
assistant  guess(word="dab")           found
"""

from typing import Any

from grpo_nb.environments import tool

LENGTH, GUESSES = 3, 5


def hints(word: str, secret: str) -> list[str]:
    """What each letter of a guess is: "in place", "elsewhere" or "absent".

    A letter is "elsewhere" as often as the secret has it where the guess does not.
    """
    left = [b for a, b in zip(word, secret, strict=True) if a != b]
    said = []
    for a, b in zip(word, secret, strict=True):
        if a == b:
            said.append("in place")
        elif a in left:
            left.remove(a)
            said.append("elsewhere")
        else:
            said.append("absent")
    return said


class Wordle:
    """Find the secret word in at most 5 guesses. Every hint is true: use it."""

    done: bool = True

    def reset(self, secret: str, letters: str, **row: Any) -> None:
        """Begin with a secret word of three of the letters."""
        self.secret, self.letters = secret, letters
        self.guesses: list[str] = []
        self.found, self.done = False, False

    @tool
    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: Three letters.
        """
        if len(word) != LENGTH or not set(word) <= set(self.letters):
            raise ValueError(f"a word is {LENGTH} letters, each one of {', '.join(self.letters)}")
        self.guesses.append(word)
        self.found = word == self.secret
        self.done = self.found or len(self.guesses) == GUESSES
        if self.found:
            return "found"
        said = zip(word, hints(word, self.secret), strict=True)
        return ", ".join(f"{letter} {hint}" for letter, hint in said)

    def get_reward(self) -> float:
        """1 for the word; else 0.1 for each later guess that could have been it."""
        if self.found:
            return 1.0
        later = range(1, len(self.guesses))
        return 0.1 * sum(self._could_be(self.guesses[i], self.guesses[:i]) for i in later)

    def _could_be(self, word: str, before: list[str]) -> bool:
        """Whether the hints on the guesses before leave the word open."""
        return all(hints(one, word) == hints(one, self.secret) for one in before)

    @classmethod
    def solve(cls, secret: str, **row: Any) -> list[dict[str, Any]]:
        """The guess that wins."""
        return [{"name": "guess", "arguments": {"word": secret}}]
