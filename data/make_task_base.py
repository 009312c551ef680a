"""Write data/task_base/: a 0.9 M-parameter Qwen2 that half knows four tasks.

    python data/make_task_base.py            # about 12 minutes

It first learns to write words down again and from right completions, then from a mixture in
which most have a fault made on purpose, so that it can do each task and mostly does not. GRPO
removes the faults.
A sample of the mixture, for a row of make_tasks.py:

    user       Read: Ben, a cook from Oslo, is 34. What is the job of Ben?
    assistant  <reasoning>"job": "cook"</reasoning><answer>cook</answer>      right
    assistant  <reasoning>"city": "Oslo"</reasoning><answer>Oslo</answer>     wrong
    assistant  <reasoning>"job": "cook"</reasoning><answer>cook               broken

No question of data/tasks/ is among its training data.
"""

import argparse
import functools
import json
import random
from pathlib import Path

import tiny_model
import torch
from make_tasks import HERE, LISTS, TASKS, Problem, read_questions

from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt

SEED = 1
BATCH = 32
LESSONS = [  # share of copies, are there faults, steps
    (0.3, False, 2000),
    (0.0, True, 350),
]
VOCAB = 832
HIDDEN = 128  # a multiple of 64: bitsandbytes reads other widths wrongly in 4 bit on a CPU
WRONG = 0.4  # share of completions with a wrong answer, in the mixture
BROKEN = 0.3  # share with the right answer in a broken format


def write_completion(problem: Problem, faulty: bool, rng: random.Random) -> str:
    draw = rng.random() if faulty else 1.0
    if draw < WRONG:
        return rng.choice(problem.wrong)
    return rng.choice(problem.broken) if draw < WRONG + BROKEN else problem.right


def sample_chat(held_out: dict[str, set[str]], faulty: bool, rng: random.Random) -> tiny_model.Chat:
    """A chat of one of the held-out sets' tasks, with the system prompt of the task's preset."""
    task = rng.choice(list(held_out))
    while (problem := TASKS[task](rng)).row["question"] in held_out[task]:
        continue
    prompt = build_prompt(problem.row["question"], load_preset(task).form.system_prompt)
    return tiny_model.render_chat(prompt, write_completion(problem, faulty, rng))


def sample_copy(rng: random.Random) -> tiny_model.Chat:
    """Words and numbers to write down again, as they are or as JSON."""
    words = rng.sample([word for kind in LISTS.values() for word in kind], 6)
    words += [str(rng.randint(2, 60)) for _ in range(2)]
    rng.shuffle(words)
    text = " ".join(words)
    prompt = build_prompt(text, system_prompt="")
    return tiny_model.render_chat(prompt, rng.choice([text, json.dumps(words)]))


def sample_lesson(
    held_out: dict[str, set[str]], copies: float, faulty: bool, rng: random.Random
) -> tiny_model.Chat:
    return sample_copy(rng) if rng.random() < copies else sample_chat(held_out, faulty, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "task_base")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    held_out = {task: read_questions(task) for task in TASKS}
    texts = ["".join(sample_chat(held_out, True, rng)) for _ in range(5000)]
    tokenizer = tiny_model.build_qwen2_tokenizer(texts, VOCAB)
    model = tiny_model.build_model(tokenizer, VOCAB, HIDDEN)
    for copies, faulty, steps in LESSONS:
        draw = functools.partial(sample_lesson, held_out, copies, faulty, rng)
        tiny_model.train(model, tokenizer, draw, steps, batch=BATCH, bfloat16=True)
    tiny_model.save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
