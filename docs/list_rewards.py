"""docs/rewards.md, made from the rewards themselves: `python docs/list_rewards.py`."""

import runpy
from pathlib import Path

from grpo_nb.files import atomic_path
from grpo_nb.rewards.contract import Reward
from grpo_nb.rewards.sets import PRESETS, built_in

PAGE = Path(__file__).parent / "rewards.md"
STYLE = "_quality_", "_penalty", "_length_"  # in the names of rewards for length and style
HEAD = """# Rewards

Import these from `grpo_nb.rewards`; TRL can call them as they are. *Columns* are the dataset
columns that a reward reads; *options* are set by `.configured(option=value)`. A reward marked ∥
scores its batch in parallel on all cores.

*Final answer*, *reasoning* and *marks* depend on the [form](designing-rewards.md#forms) of the
completions. The final answer is the text in the form's marks, the last one if there are several. A
completion without marks is searched in this order: the last `<answer>…</answer>`; then, after
`</think>` and after "**Final answer**", the sentence after the last "the answer is" or "Answer:",
the text after the last `####`, all the `\\boxed{…}`, or the last sentence that begins with
"Therefore", "Thus", "Hence" or "So". Otherwise the whole text is the answer. Code is the last
fenced block. Length and style rewards without the option `form` read the whole completion.
"""
READ = """
## Numbers and mathematics

`numeric_correctness_reward` and `math_verify_reward` parse answers and reference answers by the
same rules (`grpo_nb.answers`). An answer has to say one thing, without denial or hedging. What
these rules do not cover is compared by math-verify.

| rule | reference | an answer that earns 1 |
|---|---|---|
"""
REFUSED = """
| what earns nothing | reference | an answer |
|---|---|---|
"""
TAIL = """
## Combined rewards

`gated(a, by=b)` pays `a` only if `b` scores at least `mark` (1). `Adaptive(a)` has a factor that
follows the success rate and is saved with checkpoints.

## TRL's rewards

Every reward in TRL works unchanged in [`reward_funcs` of a Python file](coming-from.md).

| TRL | here | difference |
|---|---|---|
| `accuracy_reward` | `math_verify_reward` | TRL's reads `solution` and the whole text, no tags |
| `reasoning_accuracy_reward` | `math_verify_reward` | the same, after `</think>` |
| `think_format_reward` | – | TRL's pays for empty thinking, and without an answer |
| `get_cosine_scaled_reward` | – | TRL's uses math-verify |
| `get_repetition_penalty_reward` | `no_repetition_penalty` | TRL's counts tokens, not words |
| `get_soft_overlong_punishment` | – | TRL's counts tokens |

## Judged by a model

`LLMJudge` asks a server about each completion ([a recipe](recipes.md#an-llm-as-judge); [a judge
that may pay](designing-rewards.md#a-judge-that-may-pay)). A reward model that classifies sequences
is a function like any other.
"""


def _kind(func: Reward) -> str:
    if func.columns:
        return "Tasks of reasoning-gym" if "entry" in func.columns else "Correctness"
    return "Length and style" if any(part in func.__name__ for part in STYLE) else "Format"


def _line(func: Reward) -> str:
    low, high = func.range
    cells = [
        f"`{func.__name__}`" + " ∥" * func.settings.parallel,
        func.__doc__.strip().splitlines()[0],
        f"{low:g} … {high:g}",
        ", ".join(f"`{column}`" for column in func.columns) or "–",
        ", ".join(f"`{option}`" for option in func.option_names) or "–",
        func.settings.resists,
    ]
    return f"| {' | '.join(cells)} |"


def markdown() -> str:
    """The whole page."""
    text = HEAD
    for title in ("Correctness", "Format", "Length and style", "Tasks of reasoning-gym"):
        text += f"\n## {title}\n\n| reward | pays | range | columns | options | resists |\n"
        text += "|---|---|---|---|---|---|\n"
        text += "\n".join(_line(f) for f in built_in().values() if _kind(f) == title) + "\n"
    text += "\n## Presets\n\n| preset | rewards, with weights | form |\n|---|---|---|\n"
    for name, preset in PRESETS.items():
        pairs = zip(preset.names, preset.reward_weights, strict=True)
        weighed = ", ".join(f"`{name}` {weight:g}" for name, weight in pairs)
        text += f"| `{name}` | {weighed} | `{preset.form.name}` |\n"
    rules = runpy.run_path(str(Path(__file__).parents[1] / "tests/answer_rules.py"))
    for head, table in ((READ, rules["RIGHT"]), (REFUSED, rules["WRONG"])):
        firsts = {rule: pair for rule, *pair in reversed([*rules["rows"](table)])}
        shown = [(rule, *pair) for rule, pair in reversed(firsts.items())]
        text += head + "".join(
            f"| {rule} | `{right}` | `{said}` |\n" for rule, right, said in shown
        )
    return text + TAIL


if __name__ == "__main__":
    with atomic_path(PAGE) as temporary:
        temporary.write_text(markdown(), encoding="utf-8")
