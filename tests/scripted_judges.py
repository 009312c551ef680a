"""Judges that follow a script, for tests: functions of a request's body, which return a reply.

They answer a `GroupJudge` as a chat model would, and each has one habit.
`a_test` holds what they judge.
"""

import json
import random
import re
from dataclasses import dataclass
from types import SimpleNamespace

import openai

from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest, baseline
from grpo_nb.rewards import GroupJudge, load_preset, prompts
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


BLOCK = re.compile(r"<<<COMPLETION ([A-Z])>>>\n(.*?)\n<<<END COMPLETION \1>>>", re.DOTALL)
RIGHT = re.compile(r"<<<REFERENCE ANSWER>>>\n(.*?)\n<<<END", re.DOTALL)


def completions_in(body):
    """The texts of a request by letter, and the reference answer."""
    content = body["messages"][1]["content"]
    return dict(BLOCK.findall(content)), RIGHT.search(content)[1]


def reply(grades):
    return json.dumps({"reason": "so", **grades})


def honest(body, noise=None):
    """Pays for the right answer, and less for a number than for none."""
    texts, right = completions_in(body)
    grades = {}
    for letter, text in texts.items():
        grade = 8.5 if f"<answer>{right}</answer>" in text else 3 if "<answer>" in text else 1.5
        grades[letter] = min(10, max(0, grade + (noise.gauss(0, 0.5) if noise else 0)))
    return reply(grades)


def position_loving(body):
    """Prefers what it reads first."""
    letters = list(completions_in(body)[0])
    return reply({letter: 10 - 9 * i / len(letters) for i, letter in enumerate(letters)})


def length_loving(body):
    texts, _ = completions_in(body)
    return reply({letter: min(10, len(text) / 100) for letter, text in texts.items()})


def flattered(body):
    grades, (texts, _) = json.loads(honest(body)), completions_in(body)
    pleas = [letter for letter, text in texts.items() if "full marks" in text or "wise" in text]
    return json.dumps(grades | dict.fromkeys(pleas, 10))


def by_chance(body, noise=random.Random(0)):  # noqa: B008 (its state is meant to last)
    return reply({letter: noise.uniform(0, 10) for letter in completions_in(body)[0]})


def breaks_json(body):
    """Quotes what it reads in its reason, and does not escape it."""
    texts, _ = completions_in(body)
    return honest(body).replace('"so"', f'"it is {max(texts.values(), key=len)}"')


def constant(body):
    return reply(dict.fromkeys(completions_in(body)[0], 8))


def contrary(body):
    """Prefers what is wrong."""
    grades = json.loads(honest(body))
    return json.dumps({k: v if k == "reason" else 10 - v for k, v in grades.items()})


@dataclass(eq=False)
class InProcess(GroupJudge):
    """A judge whose requests do not leave the process; all else is the client's and ours."""

    script: object = honest

    def client(self):
        import httpx2

        def answer(request):
            message = {"role": "assistant", "content": self.script(json.loads(request.content))}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return httpx2.Response(200, json={"choices": [choice]})

        http = openai.DefaultAsyncHttpxClient(transport=httpx2.MockTransport(answer))
        return openai.AsyncOpenAI(base_url="http://judge/v1", api_key="none", http_client=http)
