"""Test the rewards of a Python file on the rows of a data file, for `python -m grpo_nb check`."""

import json
from pathlib import Path
from typing import Any

from grpo_nb.reward_lab.check import RewardVerdict, check_rewards
from grpo_nb.rewards.load import load_source, rewards_of

OPTIONS = ("reference", "form", "correct")  # names in the file that mean arguments


def check_file(rewards: Path, data: Path) -> RewardVerdict:
    """Return the verdict on the rewards that a file defines.

    Args:
        rewards: A Python file; see the command's help.
        data: JSON lines or Parquet.

    Raises:
        FileNotFoundError: One of the files does not exist.
        ValueError: The file defines no rewards or raises an error, or the data holds no rows.
    """
    rows = read_rows_file(data)
    module = load_source(rewards)
    pairs = rewards_of(module, {})
    funcs, weights = [func for func, _ in pairs], [weight for _, weight in pairs]
    options = {name: getattr(module, name) for name in OPTIONS if hasattr(module, name)}
    options = {name: value for name, value in options.items() if value not in funcs}
    return check_rewards(funcs, rows, reward_weights=weights, **options)


def read_rows_file(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines or of a Parquet file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is neither.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a file of rows, as JSON lines")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
    return rows
