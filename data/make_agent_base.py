"""Write data/agent_base/: a 0.65 M-parameter Qwen2 that half knows how to call tools.

    python data/make_agent_base.py           # about 10 minutes

It first learns the two environments of make_environments.py from right calls, then from a mixture
with faults made on purpose, so that it can do each and mostly does not. GRPO removes the faults.
Episodes of the mixture, the model's turns alone:

    multiply(a=47, b=38)   answer(value=1786)   Done.                right
    It is 1906.                                                      no call
    multiply(a=47, b=38)   It is 1786.                               said, not answered
    <tool_call>multiply(47, 38)</tool_call>                          malformed
    guess(n=41)   guess(n=42)   guess(n=43)   guess(n=44)   Done.    a poor strategy

No row of calculator.jsonl or guess.jsonl in data/tasks/ is among its training data.
"""

import argparse
import inspect
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tiny_model
import torch
from make_environments import HERE, Row, Start, read_rows, sample_calculator, sample_guess
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.utils import get_json_schema

from grpo_nb.environments.examples import NUMBERS, Calculator, Guess
from grpo_nb.rewards.prompts import Message

SEED = 0
BATCH = 32
LESSONS = [(False, 1200), (True, 400)]  # are there faults, steps
VOCAB = 512
HIDDEN, LAYERS = 128, 3  # a multiple of 64: bitsandbytes reads other widths wrongly in 4 bit
CALLS = (0.8, 0.2)  # share of episodes that begin with a call, in eager wordings and in others
MALFORMED = 0.2  # share of malformed calls among what is no call
STRAY = 0.12  # share of later turns that are no call where one is due
NEXT, ANY = 0.4, 0.25  # share of guesses that are one more than the last, and any at all
SKILLED = 0.4  # of these two shares, in the first lesson
BARE = 0.3  # share of chats without a system prompt

# One token for each tag, and for what stands between name, arguments and values of a call.
TAGS = ["<tool_call>", "</tool_call>", '\n{"name": "', '", "arguments": {"', '": ', ', "', "}}\n"]
TEMPLATE = """\
{%- set system = messages and messages[0].role == 'system' -%}
{%- if system or tools -%}
{{ '<|im_start|>system\\n' }}{{ messages[0].content if system else '' }}
{%- if tools -%}
{{ '\\n' if system else '' }}Tools:
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{ ' ' + function.name + '(' + function.parameters.properties | join(', ') + ')' }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in (messages[1:] if system else messages) -%}
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{ '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
RESPONSE = {  # how a completion is parsed, as Qwen3's is
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, **arguments: int) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def malform(turn: Message, rng: random.Random) -> Message:
    """A call as no parser takes it."""
    function = turn["tool_calls"][0]["function"]
    values = ", ".join(map(str, function["arguments"].values()))
    whole = f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
    python = f"<tool_call>{function['name']}({values})</tool_call>"
    return say(rng.choice([whole.removesuffix("</tool_call>"), whole.replace("}}", "}"), python]))


class Move(NamedTuple):
    """A call, and the words that the mixture has in its place."""

    call: Message
    words: str


def use_calculator(row: Row, made: list[Message], faulty: bool, rng: random.Random) -> Move:
    """The calculator first, then the answer."""
    if made:
        product = row["a"] * row["b"]
        return Move(call("answer", value=product), f"It is {product}.")
    guessed = rng.randint(100, 9999)
    return Move(call("multiply", a=row["a"], b=row["b"]), f"It is {guessed}.")


def use_guesses(row: Row, made: list[Message], faulty: bool, rng: random.Random) -> Move:
    """The middle of what is left; or the next number, or any, whatever was answered."""
    tried = [turn["tool_calls"][0]["function"]["arguments"]["n"] for turn in made]
    low, high = row["low"], row["low"] + NUMBERS - 1
    left = range(
        max([n + 1 for n in tried if n < row["secret"]], default=low),
        min([n for n in tried if n > row["secret"]], default=high + 1),
    )
    following = tried[-1] + 1 if tried and tried[-1] < high else low
    draw = rng.random() if faulty else rng.random() / SKILLED
    n = left[(len(left) - 1) // 2]
    if draw < NEXT + ANY:
        n = following if draw < NEXT else rng.randint(low, high)
    return Move(call("guess", n=n), f"Is it {n}?")


class Game(NamedTuple):
    """An environment as the base learns it.

    kind: Its class.
    tools: Its schemas, as a chat template takes them.
    sample: Draws a row.
    move: The next turn of a player.
    eager: So many of its wordings are mostly answered with a call.
    """

    kind: type
    tools: list[dict[str, Any]]
    sample: Callable[[random.Random], Start]
    move: Callable[[Row, list[Message], bool, random.Random], Move]
    eager: int


def schemas(kind: type) -> list[dict[str, Any]]:
    tools = [name for name, f in sorted(vars(kind).items()) if hasattr(f, "is_tool")]
    return [get_json_schema(getattr(kind(), name)) for name in tools]


GAMES = {
    "calculator": Game(Calculator, schemas(Calculator), sample_calculator, use_calculator, eager=3),
    "guess": Game(Guess, schemas(Guess), sample_guess, use_guesses, eager=2),
}


def write_turns(game: Game, start: Start, faulty: bool, rng: random.Random) -> list[Message]:
    """The turns of an episode after the question: the model's, and the tools' results."""
    environment, turns, made = game.kind(), [], []
    environment.reset(**start.row)
    calls = CALLS[start.wording >= game.eager]
    while not environment.done:
        move = game.move(start.row, made, faulty, rng)
        if faulty and rng.random() >= (1 - STRAY if made else calls):
            broken = rng.random() < MALFORMED
            return [*turns, malform(move.call, rng) if broken else say(move.words)]
        made.append(move.call)
        function = move.call["tool_calls"][0]["function"]
        result = getattr(environment, function["name"])(**function["arguments"])
        turns += [move.call, {"role": "tool", "name": function["name"], "content": result}]
    return [*turns, say("Done.")]


def sample_chat(
    tokenizer: PreTrainedTokenizerBase, held_out: set[str], faulty: bool, rng: random.Random
) -> tiny_model.Chat:
    """An episode of either environment, cut into what the model reads and what it writes."""
    game = GAMES[rng.choice(list(GAMES))]
    while json.dumps((start := game.sample(rng)).row) in held_out:
        continue
    system = [] if rng.random() < BARE else [{"role": "system", "content": about(game.kind)}]
    messages = [*system, {"role": "user", "content": start.row["question"]}]
    messages += write_turns(game, start, faulty, rng)
    tools = rng.sample(game.tools, len(game.tools))
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    *parts, _ = re.split(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", text, flags=re.DOTALL)
    return tuple(parts)


def about(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__)


def build_tokenizer(sample: Callable[[PreTrainedTokenizerBase], tiny_model.Chat]) -> Qwen2Tokenizer:
    """One that AutoTokenizer loads as it is, and that renders and parses calls."""
    options = tiny_model.OPTIONS | {"chat_template": TEMPLATE}
    bare = Qwen2Tokenizer(**options)
    texts = ["".join(sample(bare)) for _ in range(5000)]
    tags = re.compile("|".join(map(re.escape, TAGS)))
    words = [tags.sub(" ", text) for text in texts]
    tokenizer = tiny_model.build_qwen2_tokenizer(words, VOCAB - len(TAGS))
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    # Special tokens would be left out where a completion that cannot be parsed is shown as text.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "agent_base")
    parser.add_argument("--steps", type=int, help="of each lesson, to try the script out")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    held_out = {json.dumps(row) for name in GAMES for row in read_rows(name)}
    tokenizer = build_tokenizer(lambda bare: sample_chat(bare, held_out, True, rng))
    model = tiny_model.build_model(tokenizer, VOCAB, HIDDEN, LAYERS)
    for faulty, steps in LESSONS:
        tiny_model.train(
            model,
            tokenizer,
            lambda faulty=faulty: sample_chat(tokenizer, held_out, faulty, rng),
            arguments.steps or steps,
            batch=BATCH,
            bfloat16=True,
        )
    tiny_model.save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
