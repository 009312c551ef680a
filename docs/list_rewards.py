"""docs/rewards.md, made from the rewards themselves: `python docs/list_rewards.py`."""

import runpy
from pathlib import Path

from grpo_nb.rewards import code, correctness, format, length, style
from grpo_nb.rewards.contract import Reward
from grpo_nb.rewards.presets import PRESETS, built_in
from grpo_nb.runs import atomic_path

PAGE = Path(__file__).parent / "rewards.md"
KINDS = {
    correctness: "Correctness",
    format: "Format",
    length: "Length",
    style: "Style",
    code: "Code",
}
HEAD = """# Rewards

Made by `python docs/list_rewards.py` from the rewards' own declarations; a test keeps it
true. All are importable from `grpo_nb.rewards` and callable as TRL calls them. *Columns* are what
a reward reads of the dataset; *options* are set by `.configured(option=value)`. A reward that
costs a process scores its batch side by side on all cores; the others take microseconds.

*Final answer*, *reasoning* and *marks* are those of the [form](designing-rewards.md#forms) in which
completions are written. The final answer is what stands in its marks, the last of several. In a
completion without them it stands in the last `<answer>…</answer>`; else, behind `</think>` and
behind "**Final answer**", in the sentence after the last "the answer is" or "Answer:", behind the
last `####`, in all the `\\boxed{…}`, or in the last sentence that begins with "Therefore", "Thus",
"Hence" or "So"; else the whole text is the answer. Code is the last fenced block in it, or in a
completion without those marks. The rewards of length and the rest of style read the whole
completion. The option `form` is set for all rewards of a run at once, by `rewards.form`.
"""
READ = """
## Numbers and mathematics

`numeric_correctness_reward` and `math_verify_reward` read an answer by the same rules
(`grpo_nb.rewards.answers`), and a reference answer too. It has to say one thing, without denying or
hedging. Numbers are compared as fractions, sets, tuples and intervals part by part, words up to
case, and what is left by math-verify in a process of its own; an answer that is written as the
reference is, is right. The Reward Lab shows what was read and how it was compared.

| rule | reference | an answer that earns 1 |
|---|---|---|
"""
REFUSED = """
| what earns nothing | reference | an answer |
|---|---|---|
"""
TAIL = """
## Made of others

`gated(a, by=b)`, and `Adaptive(a)`, whose factor follows the success rate and is saved with
checkpoints. `math_problem_reward` is `numeric_correctness_reward` gated by
`soft_format_reward`.

## TRL's own

Every reward that TRL ships works as it is, in [`reward_funcs` of a Python file](coming-from.md):
`from trl.rewards import think_format_reward`. Those named `get_…` make one from their arguments.

| TRL's | here | how they differ |
|---|---|---|
| `accuracy_reward` | `math_verify_reward` | TRL's reads `solution` and the whole text, no tags |
| `reasoning_accuracy_reward` | `math_verify_reward` | the same, behind `</think>` |
| `think_format_reward` | – | it pays for empty thoughts, and without an answer |
| `get_cosine_scaled_reward` | – | it asks math-verify |
| `get_repetition_penalty_reward` | `no_repetition_penalty` | TRL's counts tokens, not words |
| `get_soft_overlong_punishment` | – | it counts tokens |

## Judged by a model

`LLMJudge` asks any server with OpenAI's API, for a request a completion ([a recipe](recipes.md)).
A reward model that classifies sequences takes one forward pass a completion:

```python
# helpful.py
from functools import cache

from transformers import pipeline

extends, reward_weights = "math", [0.25]


@cache
def classifier():
    safe = {"use_safetensors": True}
    return pipeline("text-classification", "me/reward-model", model_kwargs=safe)


def helpful(prompts, completions, **_):
    template = classifier().tokenizer.apply_chat_template
    chats = [template(p + c, tokenize=False) for p, c in zip(prompts, completions)]
    marks = classifier()(chats, function_to_apply="sigmoid", add_special_tokens=False)
    return [mark["score"] for mark in marks]
```

Both can be persuaded: attack them before you trust them.
"""


def _line(func: Reward) -> str:
    low, high = func.range
    cells = [
        f"`{func.__name__}`",
        func.__doc__.strip().splitlines()[0],
        f"{low:g} … {high:g}",
        ", ".join(f"`{column}`" for column in func.columns) or "–",
        ", ".join(f"`{option}`" for option in func.option_names) or "–",
        "a process" if func.settings.parallel else "in process",
        func.settings.resists,
    ]
    return f"| {' | '.join(cells)} |"


def markdown() -> str:
    """The whole page."""
    text = HEAD
    for module, title in KINDS.items():
        text += f"\n## {title}\n\n| reward | pays | range | columns | options | cost | resists |\n"
        text += "|---|---|---|---|---|---|---|\n"
        own = [func for func in built_in().values() if func.__module__ == module.__name__]
        text += "\n".join(_line(func) for func in own if isinstance(func, Reward)) + "\n"
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
