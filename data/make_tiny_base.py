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
import time
from pathlib import Path

import torch
from make_arithmetic import HERE, TEMPLATES, Problem, phrase, read_problems, sample_problem
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_nb.prompts import build_prompt

SEED = 0
STEPS = 2000
BATCH = 64
LEARNING_RATE = 3e-3
VOCAB = 512
FORGETS = 0.66  # share of carries and borrows that are forgotten
UNTAGGED = 0.68  # share of completions without tags, in every second wording
UNCLOSED = 0.3  # share of completions with broken answer tags, in the other wordings
CONTEXT_TOKENS = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
    turns = [f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages]
    completion = write_completion(problem, index, rng)
    return "".join(turns) + f"{START}assistant\n", completion + END


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"\d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def collate(tokenizer, chats: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels), both [batch, tokens]; the loss is on the completion alone."""
    prompts = tokenizer([prompt for prompt, _ in chats])["input_ids"]
    completions = tokenizer([completion for _, completion in chats])["input_ids"]
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(chats), length), tokenizer.pad_token_id)
    labels = torch.full((len(chats), length), -100)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return input_ids, labels


def train(model: Qwen2ForCausalLM, tokenizer, steps: int, rng: random.Random) -> None:
    held_out = read_problems()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    started = time.monotonic()
    for step in range(1, steps + 1):
        chats = [sample_chat(held_out, rng) for _ in range(BATCH)]
        input_ids, labels = collate(tokenizer, chats)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "tiny_base")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    held_out = read_problems()
    tokenizer = build_tokenizer(["".join(sample_chat(held_out, rng)) for _ in range(5000)])
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.steps, rng)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
