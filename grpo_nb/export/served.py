"""Test whether a server answers as the model in a folder does: llama.cpp, vLLM, transformers.

What is compared depends on what the server tells: prompts and texts as token ids, the tokens at
which it stops, greedy answers, and the probabilities of their tokens. docs/figures.md has the
measurements behind the limits.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from grpo_nb.checks import Check
from grpo_nb.export.parity import log_probs
from grpo_nb.files import read_yaml
from grpo_nb.models import engine_of
from grpo_nb.models.template import encode, fold_system, with_completion
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LIKELIEST = 20  # tokens whose probabilities are asked for; the rest count as one
# Texts in which the ways of splitting that programs have differ.
TEXTS = (
    *("I've  3 words,   12345 digits; we'LL see 3.14!", "x = y*2;\n\n\n  return x\t# ok", " a  b "),
    *("naïve café, Ünïcödé: дело, 東京, ไทย, 한국어", "🙂👍🏽 e\u0301 ½ ² ①", "<b>{'k': [1, 2]}</b>\r\n"),
)
KL = {"served": 0.05}  # mean per token [nats]
FAULTS = read_yaml(Path(__file__).with_name("served.yaml"))


class Reply(NamedTuple):
    """Hold a greedy answer; `ids` and `likeliest` are empty where the server does not give them.

    ids: The tokens, with the one that ended the answer.
    text: The answer.
    ended: Whether the model ended it, and not the limit of tokens.
    likeliest: The log-probabilities of the likeliest tokens, for each token of the answer.
    """

    ids: list[int]
    text: str
    ended: bool
    likeliest: list[dict[int, float]]


class Server:
    """Ask a server that has OpenAI's interface and no other, such as transformers'.

    Args:
        url: Where it listens, such as http://127.0.0.1:8000.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    def ask(self, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the server's JSON; {} if it refuses the question."""
        body = None if content is None else json.dumps(content).encode()
        request = Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except (HTTPError, json.JSONDecodeError):
            return {}
        except URLError as error:
            raise ValueError(
                f"no server answers at {self.url} ({error.reason}): start it first"
            ) from None

    def text_ids(self, text: str) -> list[int] | None:
        """Return a text's token ids; None where the server does not tell them."""

    def prompt_ids(self, chat: list[Message]) -> list[int] | None:
        """Return the token ids of a chat, up to where its answer begins."""

    def reply(self, chat: list[Message], ids: list[int], tokens: int, bias: int = -1) -> Reply:
        """Return the greedy answer of at most `tokens` tokens to a chat, whose ids are `ids`.

        The answer begins with the token `bias`, if it is given and the server can.
        """
        asked = {"model": self.model(), "messages": chat, "temperature": 0, "max_tokens": tokens}
        choice = self.ask("/v1/chat/completions", asked | {"stream": False})["choices"][0]
        return Reply([], choice["message"]["content"], choice["finish_reason"] == "stop", [])

    def model(self) -> str:
        """Return the name of the model that is served."""
        return self.ask("/v1/models")["data"][0]["id"]


class LlamaCpp(Server):
    """Ask llama.cpp's server, on which Ollama and LM Studio are built."""

    def text_ids(self, text: str) -> list[int] | None:
        return self.ask("/tokenize", {"content": text, "parse_special": True}).get("tokens", [])

    def prompt_ids(self, chat: list[Message]) -> list[int] | None:
        text = self.ask("/apply-template", {"messages": chat}).get("prompt", "")
        asked = {"content": text, "add_special": True, "parse_special": True}
        return self.ask("/tokenize", asked).get("tokens", [])

    def reply(self, chat: list[Message], ids: list[int], tokens: int, bias: int = -1) -> Reply:
        asked = {"prompt": ids, "temperature": 0, "n_predict": tokens, "n_probs": LIKELIEST}
        asked |= {"return_tokens": True, "logit_bias": [[bias, 100]] if bias >= 0 else []}
        answer = self.ask("/completion", asked | {"cache_prompt": False})
        likeliest = [
            {each["id"]: each["logprob"] for each in token["top_logprobs"]}
            for token in answer.get("completion_probabilities", [])
        ]
        ended = answer.get("stop_type") == "eos"
        return Reply(answer.get("tokens", []), answer.get("content", ""), ended, likeliest)


class Vllm(Server):
    """Ask vLLM's server."""

    def text_ids(self, text: str) -> list[int] | None:
        asked = {"model": self.model(), "prompt": text, "add_special_tokens": False}
        return self.ask("/tokenize", asked).get("tokens", [])

    def prompt_ids(self, chat: list[Message]) -> list[int] | None:
        return self.ask("/tokenize", {"model": self.model(), "messages": chat}).get("tokens", [])

    def reply(self, chat: list[Message], ids: list[int], tokens: int, bias: int = -1) -> Reply:
        asked = {"model": self.model(), "prompt": ids, "temperature": 0, "max_tokens": tokens}
        asked |= {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        asked |= {"logit_bias": {str(bias): 100}} if bias >= 0 else {}
        choice = self.ask("/v1/completions", asked | {"return_token_ids": True})["choices"][0]
        likeliest = [
            {int(token.removeprefix("token_id:")): value for token, value in each.items()}
            for each in choice["logprobs"]["top_logprobs"]
        ]
        ended = choice["finish_reason"] == "stop"
        return Reply(choice["token_ids"], choice["text"], ended, likeliest)


def server_at(url: str) -> Server:
    """Return the questions that the server at this address understands.

    Raises:
        ValueError: No server answers there.
    """
    plain = Server(url)
    if "build_info" in plain.ask("/props"):
        return LlamaCpp(url)
    return Vllm(url) if plain.ask("/version") else plain


def compare(
    server: Server,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[list[Message]],
    tokens: int,
    score: Callable[[list[str]], float] | None = None,
) -> dict[str, Any]:
    """Compare a server with the model that it should serve.

    Args:
        server: From `server_at`.
        model: The model, from its folder.
        tokenizer: Its tokenizer.
        chats: Held-out prompts.
        tokens: Length at which answers are cut [tokens].
        score: Returns the mean reward of one answer to each chat.

    Returns:
        prompts, specials, texts and chats (how many of them the server tokenizes otherwise), ends
        (how many tokens that end an answer do not), runs_on, equal (greedy answers), tokens, kl
        (mean per token, server to model) [nats] and, with `score`, score and score_served.
    """
    folded = [fold_system(tokenizer, chat) for chat in chats]
    prompts = encode(tokenizer, chats)
    figures = {"prompts": len(chats), **_tokenized(server, tokenizer, folded, prompts)}
    ours = [group[0] for group in engine_of(model, tokenizer).generate(
        chats, max_completion_length=tokens
    )]
    replies = [server.reply(*each, tokens) for each in zip(folded, prompts, strict=True)]
    pairs = list(zip(replies, ours, strict=True))
    figures["ends"] = _missed_ends(server, model, folded[0], prompts[0])
    figures["runs_on"] = sum(not reply.ended and not our.truncated for reply, our in pairs)
    figures["equal"] = sum(reply.text.strip() == our.text.strip() for reply, our in pairs)
    kl = []
    for chat, reply in zip(chats, replies, strict=True):
        if reply.likeliest:
            inputs = with_completion(tokenizer, chat, reply.ids)
            kl += _kl(reply.likeliest, log_probs(model, inputs, len(reply.ids)))
    figures |= {"tokens": len(kl), "kl": sum(kl) / len(kl) if kl else None}
    if score:
        figures["score"] = score([our.text for our in ours])
        figures["score_served"] = score([reply.text for reply in replies])
    return figures


def _tokenized(
    server: Server,
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[list[Message]],
    prompts: list[list[int]],
) -> dict[str, int]:
    """Count the special tokens, texts and chats that the server tokenizes otherwise."""
    if server.text_ids("a") is None:
        return {}
    specials = {token.content: [i] for i, token in tokenizer.added_tokens_decoder.items()}
    texts = [*TEXTS, *(str(turn["content"]) for chat in chats for turn in chat)]
    ours = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return {
        "specials": sum(server.text_ids(text) != ids for text, ids in specials.items()),
        "texts": sum(server.text_ids(text) != ids for text, ids in zip(texts, ours, strict=True)),
        "chats": sum(
            server.prompt_ids(chat) != ids for chat, ids in zip(chats, prompts, strict=True)
        ),
    }


def ends_of(model: "PreTrainedModel") -> list[int]:
    """Return the ids of the tokens that end the model's answers."""
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def _missed_ends(
    server: Server, model: "PreTrainedModel", chat: list[Message], ids: list[int]
) -> int:
    """Count the tokens that end the model's answers, but not the server's when it is made to."""
    ends = ends_of(model) if server.text_ids("a") else []
    forced = [server.reply(chat, ids, 3, end) for end in ends]
    return sum(not reply.ended for reply in forced)


def _kl(likeliest: Sequence[Mapping[int, float]], ours: "Tensor") -> list[float]:
    """Return the KL divergence at each token, from what a server told [nats]."""
    distances = []
    for told, row in zip(likeliest, ours, strict=True):
        theirs = [math.exp(value) for value in told.values()]
        own = row[list(told)].exp().tolist()
        pairs = [*zip(theirs, own, strict=True), (1 - sum(theirs), 1 - sum(own))]
        pairs = [(max(p, 1e-9), max(q, 1e-9)) for p, q in pairs]
        distances.append(sum(p * math.log(p / q) for p, q in pairs))
    return distances


def verdict(name: str, figures: Mapping[str, Any], limit: float = 0.05, **facts: str) -> Check:
    """Return the check of a server or file.

    Args:
        name: Of the check.
        figures: From `compare`; {} if the file cannot be loaded.
        limit: Of `kl` [nats].
        facts: What is known to be wrong otherwise: {kind of FAULTS: evidence}.
    """
    counts = {key: n for key in ("specials", "texts", "chats", "ends", "runs_on")
              if (n := figures.get(key))}
    kinds = [kind for kind in FAULTS if kind in counts or kind in facts]
    if not kinds and not (figures["kl"] or 0) <= limit:
        kinds = ["weights"]
    parts = [facts.get(kind) or FAULTS[kind]["evidence"].format(counts.get(kind)) for kind in kinds]
    if figures:
        parts.append(_measured(figures, limit))
    evidence = "; ".join(parts)
    return Check(name, "stop", evidence, FAULTS[kinds[0]]["fix"]) if kinds else Check(
        name, "ok", evidence
    )


def _measured(figures: Mapping[str, Any], limit: float) -> str:
    text = f"greedy answers equal {figures['equal']} of {figures['prompts']}"
    if figures["kl"] is not None:
        text += f", KL {figures['kl']:.2g} per token (at most {limit}), {figures['tokens']} tokens"
    if "score" in figures:
        text += f", reward {figures['score_served']:.3g} (the model {figures['score']:.3g})"
    return text
