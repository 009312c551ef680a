"""Judges that follow a script, for tests: functions of a request's body, which return a reply.

They answer an `LLMJudge` as a chat model would, and each has one habit.
`a_test` holds what they judge.
"""

import json
import random
import re
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

from judge_server import verdict

from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest, baseline
from grpo_nb.rewards import LLMJudge, load_preset, prompts
from grpo_nb.runs.config import RunConfig

MATH = load_preset("math")
ROWS = [
    {"question": f"{n} + 3?", "prompt": prompts.build_prompt(f"{n} + 3?"), "answer": str(n + 3)}
    for n in range(20)
]


def completions_of(row):
    """Some right, some wrong, some without an answer, of different lengths."""
    right, wrong = row["answer"], str(int(row["answer"]) + 1)
    return [
        *(f"<answer>{wrong}</answer>", f"I add. <answer>{right}</answer>", "I do not know.", "?"),
        f"It is {wrong}, as I know from school. <answer>{wrong}</answer>",
        f"<answer>{right}</answer>",
    ]


def a_test(rows=ROWS, completions=completions_of, prompts=16):
    groups = [[Sample(text, 9, False) for text in completions(row)] for row in rows[:prompts]]
    tried = baseline.Baseline(list(rows[:prompts]), groups)
    return RewardTest(SimpleNamespace(config=RunConfig()), list(rows), tried, Bench(MATH))


BLOCK = re.compile(r"<<<COMPLETION>>>\n(.*?)\n<<<END COMPLETION>>>", re.DOTALL)
RIGHT = re.compile(r"<<<REFERENCE ANSWER>>>\n(.*?)\n<<<END", re.DOTALL)


def completion_in(body):
    """The text of a request, and the reference answer."""
    content = body["messages"][1]["content"]
    return BLOCK.search(content)[1], RIGHT.search(content)[1]


def honest(body, noise=None):
    """Pays for the right answer, and less for a number than for none."""
    text, right = completion_in(body)
    grade = 8.5 if f"<answer>{right}</answer>" in text else 3 if "<answer>" in text else 1.5
    return verdict(min(10, max(0, grade + (noise.gauss(0, 0.5) if noise else 0))))


def length_loving(body):
    return verdict(min(10, len(completion_in(body)[0]) / 100))


def flattered(body):
    text, _ = completion_in(body)
    return verdict(10) if "full marks" in text or "wise" in text else honest(body)


def by_chance(body, noise=random.Random(0)):  # noqa: B008 (its state is meant to last)
    return verdict(noise.uniform(0, 10))


def breaks_json(body):
    """Quotes what it reads in its reason, and does not escape it."""
    return honest(body).replace('"so"', f'"it is {completion_in(body)[0]}"')


def constant(body):
    return verdict(8)


def contrary(body):
    """Prefers what is wrong."""
    return verdict(10 - json.loads(honest(body))["grade"])


@dataclass(eq=False)
class InProcess(LLMJudge):
    """A judge whose requests do not leave the process."""

    script: object = honest

    def client(self):
        return nullcontext()

    async def _ask(self, client, request):
        return json.loads(self.script(request))
