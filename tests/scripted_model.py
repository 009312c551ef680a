"""A model that says what it was told to, turn by turn; and episodes that it played."""

import json
from functools import cache

from grpo_nb import environments
from grpo_nb.models import hub
from grpo_nb.models.engine import Engine, Sample
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import PROJECT_ROOT

BASE = PROJECT_ROOT / "data/agent_base"
CALL = "<tool_call>\n{}\n</tool_call>"


@cache
def tokenizer():
    return hub.load_tokenizer(str(BASE))


class ScriptedModel(Engine):
    """Says its turns: a text, or a call, or a list of calls."""

    name = "scripted"

    def __init__(self, *turns):
        super().__init__(tokenizer())
        self.turns = iter(turns)

    def complete(self, ids, asked):
        turn = next(self.turns)
        if not isinstance(turn, str):
            calls = turn if isinstance(turn, list) else [turn]
            turn = "\n".join(CALL.format(json.dumps(call)) for call in calls)
        said = self.tokenizer(turn + self.tokenizer.eos_token, add_special_tokens=False)
        return [Sample(turn, len(said["input_ids"]), False, said["input_ids"])]

    def close(self):
        self.turns = iter(())


def rows_of(name, count):
    """The first rows of a shipped environment, with their prompts."""
    system = environments.load(name).system_prompt
    lines = (PROJECT_ROOT / f"data/tasks/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines[:count])
    return [row | {"prompt": build_prompt(row["question"], system)} for row in rows]


def played(environment, rows, scripts, cap=128):
    """Baseline rollouts: for each row an episode of each script, `scripts(row)`."""
    groups = []
    for row in rows:
        samples = [
            environments.play(ScriptedModel(*turns), environment, [row], max_completion_length=cap)
            for turns in scripts(row)
        ]
        groups.append([sample for [[sample]] in samples])
    return Baseline(rows, groups)
