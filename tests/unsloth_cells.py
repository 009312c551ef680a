"""Cells of rewards as three kinds of public GRPO notebooks have them, for notebook 2's own cell.

They read `completion[0]["content"]`, bake weights into scores, print, count calls in a global, and
need imports, constants and helpers of their cell.
"""

TAGS = """import re

LAST_TAG = "</answer>"

def extract_xml_answer(text: str) -> str:
    answer = text.split("<answer>")[-1]
    return answer.split(LAST_TAG)[0].strip()

def int_reward_func(completions, **kwargs) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [0.5 if extract_xml_answer(text).isdigit() else 0.0 for text in contents]

def strict_format_reward_func(completions, **kwargs) -> list[float]:
    pattern = r"^<reasoning>\\n.*?\\n</reasoning>\\n<answer>\\n.*?\\n</answer>\\n$"
    contents = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(pattern, text) else 0.0 for text in contents]

def count_xml(text) -> float:
    count = 0.125 * sum(text.count(tag) == 1 for tag in ("<reasoning>", "</reasoning>", "<answer>"))
    if text.count(LAST_TAG) == 1:
        count += 0.125 - len(text.split(LAST_TAG)[-1]) * 0.001
    return count

def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [count_xml(completion[0]["content"]) for completion in completions]

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    extracted = [extract_xml_answer(text) for text in contents]
    print("-" * 20, f"Question:\\n{question}", f"\\nAnswer:\\n{answer[0]}", f"\\n{contents[0]}")
    return [2.0 if said == right else 0.0 for said, right in zip(extracted, answer)]
"""
MARKS = """import re

reasoning_start, reasoning_end = "<start_working_out>", "<end_working_out>"
solution_start, solution_end = "<SOLUTION>", "</SOLUTION>"
match_format = re.compile(
    rf"^[\\s]{{0,}}{reasoning_start}.+?{reasoning_end}.*?{solution_start}(.+?){solution_end}[\\s]{{0,}}$",
    flags=re.MULTILINE | re.DOTALL,
)
match_numbers = re.compile(rf"{solution_start}.*?([\\d\\.\\,]{{1,}})", flags=re.DOTALL)

def match_format_exactly(completions, **kwargs):
    return [3.0 if match_format.search(one[0]["content"]) is not None else 0 for one in completions]

def check_answer(prompts, completions, answer, **kwargs):
    scores = []
    for completion, true_answer in zip(completions, answer):
        found = match_format.search(completion[0]["content"])
        if found is None:
            scores.append(-2.0)
        elif found.group(1).strip() == true_answer.strip():
            scores.append(5.0 if found.group(1) == true_answer else 3.5)
        else:
            try:
                ratio = float(found.group(1)) / float(true_answer)
                scores.append(2.0 if 0.9 <= ratio <= 1.1 else -2.5)
            except (ValueError, ZeroDivisionError):
                scores.append(-4.5)
    return scores

PRINTED_TIMES = 0
PRINT_EVERY_STEPS = 5

def check_numbers(prompts, completions, answer, **kwargs):
    question = prompts[0][-1]["content"]
    responses = [completion[0]["content"] for completion in completions]
    found = [m.group(1) if (m := match_numbers.search(r)) is not None else None for r in responses]
    global PRINTED_TIMES
    if PRINTED_TIMES % PRINT_EVERY_STEPS == 0:
        print("*" * 20, f"\\n{question}", f"\\nAnswer:\\n{answer[0]}", f"\\n{responses[0]}")
    PRINTED_TIMES += 1
    scores = []
    for guess, true_answer in zip(found, answer):
        try:
            right = float(guess.replace(",", "")) == float(true_answer)
            scores.append(3.5 if right else -1.5)
        except (AttributeError, ValueError):
            scores.append(-2.5)
    return scores

def reference(row):
    worked = f"{reasoning_start}1+1=2{reasoning_end}"
    return f"{worked}{solution_start}{row['answer']}{solution_end}"
"""
LANGUAGE = '''import re
from dataclasses import dataclass
from functools import partial

THOUGHT = re.compile(r"</think>(.*)", re.DOTALL)

@dataclass
class Limits:
    least: "int" = 1
    most: "int" = 40

class LengthJudge:
    """An instance as a reward; it keeps its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def __call__(self, completions, **kwargs):
        words = [len(completion[0]["content"].split()) for completion in completions]
        return [float(self.limits.least <= count <= self.limits.most) for count in words]

def after_thought(text):
    return (found := THOUGHT.search(text)) and found.group(1).strip() or text

def format_and_language_reward_func(completions, letters="abcdefghijklmnopqrstuvwxyz", **kwargs):
    contents = [completion[0]["content"].lower() for completion in completions]
    known = [sum(c in letters or not c.isalpha() for c in t) / (len(t) or 1) for t in contents]
    return [share if "</think>" in text else share - 1 for share, text in zip(known, contents)]

async def says_right(prompts, completions, answer, **kwargs):
    return [float(a in after_thought(c[0]["content"])) for a, c in zip(answer, completions)]

latin = partial(format_and_language_reward_func, letters="abcdefghijklmnopqrstuvwxyz")
short = LengthJudge(Limits(most=60))
reward_funcs = [latin, short, says_right]
reward_weights = [0.5, 0.25, 1.0]
'''
CELLS = {"tags": TAGS, "marks": MARKS, "language": LANGUAGE}
