"""Keep a completion as an attack: for a run in a file of its own, which every verdict reads."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_nb.files import atomic_path
from grpo_nb.reward_lab.attacks import Attack, read_attacks

FILE = "rewards/attacks.jsonl"  # of a run
NAME = "kept"


def attack_of(text: str, answer: str, others: Sequence[Attack] = ()) -> Attack:
    """Return a completion as an attack.

    If it holds its row's right answer, it is written out for other rows with theirs; otherwise it
    is an attack on rows with this right answer alone.

    Args:
        text: The completion, which does not deserve what a right answer earns.
        answer: The right answer of its row, which becomes {answer}; "" if it is not known.
        others: Attacks that exist. One with the same completion is returned; names are distinct.

    >>> attack_of("15 or 85, not 853", "85").completion
    ['15 or ', '{answer}', ', not 853']
    """
    pieces = re.split(rf"(?<!\w){re.escape(answer)}(?!\w)", text) if answer else [text]
    parts: list[str] = []
    for number, piece in enumerate(pieces):
        parts += ["{answer}"] if number else []
        # A brace of the text itself ends a part, so that nothing in it reads as a placeholder.
        parts += [part for part in re.split(r"(?<=\{)", piece) if part]
    only = answer if len(pieces) == 1 else ""
    if same := [each for each in others if each.completion == parts and each.answer in ("", only)]:
        return same[0]
    plain = re.sub(r"</?\w{1,20}>", " ", text).split() or text.split()
    title = f"{NAME}: {' '.join(plain)[:40].strip()}"
    number = sum(each.name.startswith(title) for each in others)
    name = f"{title} ({number + 1})" if number else title
    return Attack(name, name, "wrong", parts, only)


def of_run(folder: Path) -> list[Attack]:
    """Return the attacks that were kept in a run."""
    return read_attacks(folder / FILE) if (folder / FILE).is_file() else []


def store(folder: Path, attacks: Sequence[Attack]) -> None:
    """Write the kept attacks of a run, in place of those that it has."""
    (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / FILE) as temporary:
        lines = [f"{json.dumps(_entry(attack), ensure_ascii=False)}\n" for attack in attacks]
        temporary.write_text("".join(lines), encoding="utf-8")


def _entry(attack: Attack) -> dict[str, Any]:
    entry = {"attack": attack.name, "kind": attack.kind, "completion": attack.completion}
    return entry | ({"answer": attack.answer} if attack.answer else {})
