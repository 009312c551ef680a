"""docs/rewards.md, made from the rewards themselves: `python -m grpo_nb.rewards.catalogue`."""

from collections.abc import Callable
from typing import Any

from grpo_nb.rewards import code, correctness, format, length, style
from grpo_nb.rewards.combine import Combined
from grpo_nb.rewards.contract import Reward
from grpo_nb.rewards.presets import PRESETS, built_in
from grpo_nb.runs import PROJECT_ROOT, atomic_path

PATH = PROJECT_ROOT / "docs" / "rewards.md"
KINDS = {
    correctness: "Correctness",
    format: "Format",
    length: "Length",
    style: "Style",
    code: "Code",
}
HEAD = """# Rewards

Made by `python -m grpo_nb.rewards.catalogue` from the rewards' own declarations; a test keeps it
true. All are importable from `grpo_nb.rewards` and callable as TRL calls them. *Columns* are what
a reward reads of the dataset; *options* are set by `.configured(option=value)`. A reward that
costs a process runs the whole batch side by side on all cores.
"""
TAIL = """
## Made of others

`gated(a, by=b)`, `weighted([(a, 1.0), …])`, `clipped(a, low, high)`, `ensemble([a, b], "median")`,
`Scheduled(a, {0: 0.2, 100: 1.0})` and `Adaptive(a)`, whose factor follows the success rate and is
saved with checkpoints by `keep_adaptive_weights(rewards)`. `math_problem_reward` is correctness
gated by format; `code_generation_reward` weighs format, syntax and execution.

## Judged by a model

`model_based.RewardModel` (sequence classification) and `model_based.LLMJudge` (any
OpenAI-compatible server; async, cached, with a cost counter). Both cost a forward pass or a
request a completion, and both can be talked round: probe them before you trust them.
"""


def _line(func: Reward | Combined) -> str:
    low, high = func.range
    settings = getattr(func, "settings", None)
    parts = [p.settings for p in getattr(func, "parts", ()) if isinstance(p, Reward)]
    process = any(s.parallel for s in [*parts, *([settings] if settings else [])])
    cells = [
        f"`{func.__name__}`",
        func.__doc__.strip().splitlines()[0],
        f"{low:g} … {high:g}",
        ", ".join(f"`{c}`" for c in func.columns) or "–",
        ", ".join(f"`{o}`" for o in getattr(func, "option_names", ())) or "–",
        "a process" if process else "microseconds",
        settings.resists if settings else "; ".join(dict.fromkeys(p.resists for p in parts)),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def markdown() -> str:
    """The whole page."""
    found = built_in()
    text = HEAD
    for module, title in KINDS.items():
        names = [name for name in found if name in vars(module) and _home(found[name]) == module]
        text += f"\n## {title}\n\n| reward | pays | range | columns | options | cost | resists |\n"
        text += "|---|---|---|---|---|---|---|\n"
        text += "\n".join(_line(found[name]) for name in names) + "\n"
    text += "\n## Presets\n\n| preset | rewards, with weights |\n|---|---|\n"
    for name, preset in PRESETS.items():
        pairs = zip(preset.names, preset.reward_weights, strict=True)
        text += f"| `{name}` | {', '.join(f'`{n}` {w:g}' for n, w in pairs)} |\n"
    return text + TAIL


def _home(func: Callable[..., Any]) -> Any:
    """The module that lists it: where a scorer was written, `code` for combinations."""
    modules = {module.__name__: module for module in KINDS}
    return modules.get(func.__module__, code)


if __name__ == "__main__":
    with atomic_path(PATH) as temporary:
        temporary.write_text(markdown(), encoding="utf-8")
