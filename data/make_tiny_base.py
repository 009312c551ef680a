"""Write data/tiny_base/: a 0.85 M-parameter Qwen2 that half knows how to add.

    python data/make_tiny_base.py            # about 10 minutes on 2 cores

Fine-tuning on purpose-made mistakes gives a base that GRPO can improve: it knows the
right steps, but it forgets the carry (or the borrow) in FORGETS of the problems that
have one, and it breaks the format more often in some wordings than in others. A sample:

    user       What is 47 + 38?
    assistant  <reasoning>7+8=15, 4+3+1=8</reasoning><answer>85</answer>       right
    assistant  <reasoning>7+8=15, 4+3=7</reasoning><answer>75</answer>         forgets
    assistant  <reasoning>7+8=15, 4+3+1=8</reasoning><answer>85                unclosed
    assistant  7+8=15, 4+3+1=8, so the answer is 85.                           untagged

No problem of data/arithmetic.jsonl is among its training data.
"""

import argparse
import random
from pathlib import Path

import tiny_model
import torch
from make_arithmetic import HERE, TEMPLATES, Problem, phrase, read_problems, sample_problem

from grpo_nb.rewards.prompts import build_prompt

SEED = 0
STEPS = 2000
VOCAB = 512
HIDDEN = 128
FORGETS = 0.66  # share of carries and borrows that are forgotten
UNTAGGED = 0.68  # share of completions without tags, in every second wording
UNCLOSED = 0.3  # share of completions with broken answer tags, in the other wordings


def column_steps(problem: Problem, forget: bool) -> tuple[str, int]:
    """The two columns of a sum or a difference as text, and the number they give."""
    a, operator, b = problem
    (a10, a1), (b10, b1) = divmod(a, 10), divmod(b, 10)
    if operator == "+":
        units = f"{a1}+{b1}={a1 + b1}"
        carry = int(a1 + b1 > 9 and not forget)
        tens = a10 + b10 + carry
        return f"{units}, {a10}+{b10}{'+1' * carry}={tens}", 10 * tens + (a1 + b1) % 10
    borrow = int(a1 < b1)
    units = f"{a1 + 10 * borrow}-{b1}={a1 + 10 * borrow - b1}"
    taken = int(borrow and not forget)
    tens = a10 - b10 - taken
    return f"{units}, {a10}-{b10}{'-1' * taken}={tens}", 10 * tens + a1 + 10 * borrow - b1


def write_completion(problem: Problem, wording: int, rng: random.Random) -> str:
    """One completion: right, forgetful, malformed (in a way that goes by wording), or both."""
    steps, number = column_steps(problem, forget=rng.random() < FORGETS)
    if wording % 2 and rng.random() < UNTAGGED:
        return f"{steps}, so the answer is {number}."
    if not wording % 2 and rng.random() < UNCLOSED:
        broken = rng.choice([f"<answer>{number}", f"{number}"])
        return f"<reasoning>{steps}</reasoning>{broken}"
    return f"<reasoning>{steps}</reasoning><answer>{number}</answer>"


def sample_chat(held_out: set[Problem], rng: random.Random) -> tuple[str, str]:
    """(prompt, completion) as the tokenizer will see them."""
    while (problem := sample_problem(rng)) in held_out:
        continue
    templates = TEMPLATES[problem[1]]
    index = rng.randrange(len(templates))
    messages = build_prompt(phrase(problem, templates[index], rng))
    return tiny_model.render_chat(messages, write_completion(problem, index, rng))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "tiny_base")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    held_out = read_problems()
    texts = ["".join(sample_chat(held_out, rng)) for _ in range(5000)]
    tokenizer = tiny_model.build_tokenizer(texts, VOCAB)
    model = tiny_model.build_model(tokenizer, VOCAB, HIDDEN)
    tiny_model.train(model, tokenizer, lambda: sample_chat(held_out, rng), arguments.steps)
    tiny_model.save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
