"""What the bases' scripts share: tokenizer, model, batches, training.

A chat is (prompt, completion), both as the tokenizer sees them:

    ("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>")

One of several turns goes on with what the model reads and what it writes, by turns.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from grpo_nb.rewards.prompts import Message

LEARNING_RATE = 3e-3
CONTEXT_TOKENS = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPTIONS = {
    "eos_token": END,
    "pad_token": PAD,
    "chat_template": CHAT_TEMPLATE,
    "model_max_length": CONTEXT_TOKENS,
    "clean_up_tokenization_spaces": False,
    "padding_side": "left",
}
Chat = tuple[str, ...]


def render_chat(prompt: list[Message], completion: str) -> Chat:
    turns = [f"{START}{m['role']}\n{m['content']}{END}\n" for m in prompt]
    return "".join(turns) + f"{START}assistant\n", completion + END


def build_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE within words, digits one by one."""
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
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **OPTIONS)


def build_qwen2_tokenizer(texts: list[str], vocab_size: int) -> Qwen2Tokenizer:
    """Byte-level BPE that cuts words and digits as Qwen2's own tokenizer does.

    AutoTokenizer reads a model of type "qwen2" with Qwen2's own cuts, whatever its tokenizer.json
    says: only where the merges were learnt within the same cuts is every text read as in training.
    """
    return Qwen2Tokenizer(**OPTIONS).train_new_from_iterator(
        texts, vocab_size, new_special_tokens=[START, END], show_progress=False
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, hidden_size: int, layers: int = 4
) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def collate(
    tokenizer: PreTrainedTokenizerFast, chats: list[Chat]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels), both [batch, tokens]; the loss is on the completions."""
    cut = [tokenizer(list(chat))["input_ids"] for chat in chats]
    length = max(sum(map(len, parts)) for parts in cut)
    input_ids = torch.full((len(chats), length), tokenizer.pad_token_id)
    labels = torch.full((len(chats), length), -100)
    for row, parts in enumerate(cut):
        end = 0
        for number, ids in enumerate(parts):
            start, end = end, end + len(ids)
            input_ids[row, start:end] = torch.tensor(ids)
            if number % 2:
                labels[row, start:end] = input_ids[row, start:end]
    return input_ids, labels


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    sample_chat: Callable[[], Chat],
    steps: int,
    *,
    batch: int = 64,
    bfloat16: bool = False,
) -> None:
    """AdamW on fresh chats; the loss is shown every 100 steps.

    Args:
        batch: Chats a step.
        bfloat16: Multiply in bfloat16, which is faster where the processor can.
    """

    def draw() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        input_ids, labels = collate(tokenizer, [sample_chat() for _ in range(batch)])
        return {"input_ids": input_ids}, labels

    fit(model, draw, steps, bfloat16=bfloat16)


def fit(
    model: PreTrainedModel,
    draw: Callable[[], tuple[Mapping[str, torch.Tensor], torch.Tensor]],
    steps: int,
    learning_rate: float = LEARNING_RATE,
    bfloat16: bool = False,
) -> None:
    """Train by AdamW; the loss is shown every 100 steps.

    Args:
        model: A model with `lm_head` over `model`.
        draw: Returns the inputs of a step, and its labels: -100 where nothing is to be learnt.
        steps: Optimizer steps.
        learning_rate: The peak learning rate.
        bfloat16: Multiply in bfloat16, which is faster where the processor can.
    """
    model.set_attn_implementation("eager")  # backward takes half of the time that sdpa's takes
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    started = time.monotonic()
    for step in range(1, steps + 1):
        inputs, labels = draw()
        wanted = labels[:, 1:] != -100
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            hidden = model.model(**inputs).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[wanted]).float()
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """bfloat16 safetensors and the tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
