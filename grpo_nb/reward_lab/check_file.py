"""Test the rewards of a Python file on the rows of a data file, for `python -m grpo_nb check`."""

from pathlib import Path
from types import SimpleNamespace

from grpo_nb.data import sources
from grpo_nb.reward_lab.check import RewardVerdict, check_rewards
from grpo_nb.rewards.load import load_source, rewards_of

OPTIONS = ("reference", "form", "correct")  # names in the file that mean arguments


def check_file(rewards: Path, data: Path) -> RewardVerdict:
    """Return the verdict on the rewards that a file defines.

    Args:
        rewards: A Python file; see the command's help.
        data: JSON lines, JSON, CSV or Parquet.

    Raises:
        FileNotFoundError: One of the files does not exist.
        ValueError: The file defines no rewards or raises an error, or the data holds no rows.
    """
    if not data.is_file():
        raise FileNotFoundError(f"{data} does not exist: give a file of rows, as JSON lines")
    rows = [row for _, row in sources.read(SimpleNamespace(source=str(data), max_rows=0))]
    module = load_source(rewards)
    pairs = rewards_of(module, {})
    funcs, weights = [func for func, _ in pairs], [weight for _, weight in pairs]
    options = {name: getattr(module, name) for name in OPTIONS if hasattr(module, name)}
    options = {name: value for name, value in options.items() if value not in funcs}
    return check_rewards(funcs, rows, reward_weights=weights, **options)
