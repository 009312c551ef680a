"""Clean environments, flawed ones, and what has to name each flaw."""

import itertools
import math
import os
import random
import tempfile
import threading
from pathlib import Path

from grpo_nb.environments import tool

COUNT = itertools.count()


def hunt_rows(count=16):
    starts = [(10 * i, 10 * i + 3 * i % 8) for i in range(1, count + 1)]
    return [row(f"From {low} to {low + 7}?", low=low, secret=secret) for low, secret in starts]


def row(question, **columns):
    return {"prompt": [{"role": "user", "content": question}], "question": question, **columns}


def calls(name, *arguments):
    return [{"name": name, "arguments": given} for given in arguments]


class Hunt:
    """Find the secret number."""

    def reset(self, low: int, secret: int) -> None:
        self.secret, self.found, self.turns, self.done = secret, False, 0, False

    @tool
    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        return self._judge(number)

    def _judge(self, number):
        self.turns += 1
        self.found = number == self.secret
        self.done = self.found or self.turns == 4
        return "right" if self.found else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.found)

    @classmethod
    def solve(cls, low: int, secret: int, **row) -> list:
        high, tried = low + 7, []
        while tried[-1:] != [secret]:
            tried.append((low + high) // 2)
            low, high = (tried[-1] + 1, high) if tried[-1] < secret else (low, tried[-1] - 1)
        return calls("guess", *({"number": number} for number in tried))


class Lamps:  # as for TRL alone: no @tool, no done, no max_turns, unseeded draws
    """Switch all lamps on."""

    def reset(self, off: list, **row) -> str:
        self.off, self.hum = set(off), random.random()
        return f" Off are {len(off)}."

    def switch(self, lamp: str) -> str:
        """Switch a lamp.

        Args:
            lamp: Its colour.
        """
        if lamp not in {"red", "green", "blue", "white", "black"}:
            raise ValueError(f"no lamp is {lamp}")
        self.off ^= {lamp}
        return f"{len(self.off)} are off, and they hum at {self.hum}"

    def get_reward(self) -> float:
        return 1 / (1 + len(self.off))

    @classmethod
    def solve(cls, off: list, **row) -> list:
        return [*calls("switch", *({"lamp": lamp} for lamp in off)), "Done."]


class Notes:
    """Write the name down, as the question spells it."""

    def reset(self, name: str) -> None:
        self.name, self.written, self.done = name, "", False

    @tool
    def write(self, text: str) -> str:
        """Write.

        Args:
            text: The name.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "note"
            path.write_text(text)
            self.written, self.done = path.read_text(), True
        try:
            return text.split()[0]
        except Exception as error:
            raise ValueError("nothing to write") from error

    def get_reward(self) -> float:
        return float(self.written == self.name[::-1])

    @classmethod
    def solve(cls, name: str, **row) -> list:
        return calls("write", {"text": name[::-1]})


LAMPS = ["red", "green", "blue", "white", "black"]
NAMES = ["Ann", "Berta", "Carl", "Dora", "Emil", "Fritz", "Greta", "Hans"]
CLEAN = {
    Hunt: hunt_rows(),
    Lamps: [row("Well?", off=LAMPS[i % 3 : 2 + i % 4]) for i in range(16)],
    Notes: [row(f"{name}, from its end?", name=name) for name in NAMES],
}


def pays(name, score):
    """A hunt with other rewards."""
    return type(name, (Hunt,), {"get_reward": score})


PaysFailure = pays("PaysFailure", lambda self: not self.found)


class ComparesSloppily(Hunt):
    def _judge(self, number):
        self.found = str(number)[-1] in "0123456789"[self.secret % 3 :]
        return "right" if self.found else "wrong"


class KeepsState(Hunt):
    tried: tuple = ()

    def _judge(self, number):
        again, self.tried = number in self.tried, (*self.tried, number)
        return "said before" if again else Hunt._judge(self, number)


class DrawsItsSecret(Hunt):
    def reset(self, low: int, secret: int) -> None:
        Hunt.reset(self, low, low + next(COUNT) % 8)


class Chatters(Hunt):
    def reset(self, low: int, secret: int) -> None:
        Hunt.reset(self, low, secret)
        self.lock = threading.Lock()  # of its own in each instance

    def _judge(self, number):
        return f"{Hunt._judge(self, number)}, at {next(COUNT)}"


class Hangs(Hunt):
    tool_seconds = 0.05

    def _judge(self, number):
        threading.Event().wait()
        return ""


class Knows(Hunt):
    """Find the secret number."""

    @classmethod
    def solve(cls, secret: int, **row) -> list:
        return calls("guess", {"number": secret})


class TakesAnyAnswer(Knows):
    def _judge(self, number):
        Hunt._judge(self, number)
        self.found = 10 <= number < 1000
        return "handed in"


class PaysEarly(Hunt):
    def reset(self, low: int, secret: int) -> None:
        Hunt.reset(self, low, secret)
        self.low, self.near = low, False

    def _judge(self, number):
        self.near |= self.low <= number <= self.low + 7
        return Hunt._judge(self, number)

    def get_reward(self) -> float:
        return float(self.near)


class SolvesSeldom(Knows):
    @classmethod
    def solve(cls, secret: int, **row) -> list:
        return calls("guess", {"number": secret + bool(secret % 4)})


class SharesByClass(Hunt):
    def reset(self, low: int, secret: int) -> None:
        Hunt.reset(self, low, secret)
        SharesByClass.hidden = secret

    def _judge(self, number):
        self.secret = SharesByClass.hidden
        return Hunt._judge(self, number)


class CountsInAVariable(Hunt):
    def reset(self, low: int, secret: int) -> None:
        Hunt.reset(self, low, secret)
        os.environ["HUNT_TURNS"] = "0"

    def _judge(self, number):
        os.environ["HUNT_TURNS"] = str(int(os.environ["HUNT_TURNS"]) + 1)
        return f"{Hunt._judge(self, number)}, turn {os.environ['HUNT_TURNS']}"


FLAWED = {  # what names it
    TakesAnyAnswer: "wrong answer wins",
    PaysEarly: "won early",
    SolvesSeldom: "oracle",
    SharesByClass: "not repeatable",
    CountsInAVariable: "not repeatable",
    PaysFailure: "oracle",
    pays("PaysIdling", lambda self: self.found or 0.2 * (not self.turns)): "without skill",
    pays("PaysForm", lambda self: self.found or 0.3): "without skill",
    pays("GivesNoNumber", lambda self: self.found or math.nan): "episode",
    ComparesSloppily: "without skill",
    KeepsState: "not repeatable",
    DrawsItsSecret: "not repeatable",
    Chatters: "not repeatable",
    type("EndsEarly", (Hunt,), {"max_turns": 2}): "oracle",
    Hangs: "hangs",
}
