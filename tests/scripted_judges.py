"""Judges that follow a script, for tests: functions of a request's body, which return a reply.

They answer a `GroupJudge` as a chat model would, and each has one habit.
"""

import json
import random
import re
from dataclasses import dataclass

import openai

from grpo_nb.rewards import GroupJudge, load_preset, prompts

MATH = load_preset("math")
ROWS = [
    {"question": f"{n} + 3?", "prompt": prompts.build_prompt(f"{n} + 3?"), "answer": str(n + 3)}
    for n in range(20)
]


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


def flattered(body):
    grades, (texts, _) = json.loads(honest(body)), completions_in(body)
    pleas = [letter for letter, text in texts.items() if "full marks" in text]
    return json.dumps(grades | dict.fromkeys(pleas, 10))


def by_chance(body, noise=random.Random(0)):  # noqa: B008 (its state is meant to last)
    return reply({letter: noise.uniform(0, 10) for letter in completions_in(body)[0]})


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
