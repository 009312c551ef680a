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
from grpo_nb.models import Sample, TransformersEngine, engine_of, load_checkpoint, load_tokenizer
from grpo_nb.models.template import encode, fold_system, with_completion
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from torch import Tensor

LIKELIEST = 20  # tokens whose probabilities are asked for; the rest count as one
LOSS = 0.05  # share of the model's reward by which a server or file answers worse
FEW = 2  # answers that differ by chance: at most so many are no sign of a loss
KL = 0.05  # mean per token [nats], of a server of the folder itself
# Texts in which the ways of splitting that programs have differ.
TEXTS = (
    " I've  3 words,   12345 digits; we'LL see 3.14! x = y*2;\n\n\n  return x\t# ok  a  b ",
    "naïve café, Ünïcödé: дело, 東京, ไทย, 한국어 🙂👍🏽 ½ ² ① <b>{'k': [1, 2]}</b>\r\n",
)
FAULTS = read_yaml(Path(__file__).with_name("served.yaml"))


class Questions(NamedTuple):
    """Hold what a model and its server are asked.

    chats: Held-out prompts.
    tokens: Length at which answers are cut [tokens].
    score: Returns the mean reward of one answer to each chat, if there is one.
    """

    chats: Sequence[list[Message]]
    tokens: int = 64
    score: Callable[[list[str]], float] | None = None


class Model(NamedTuple):
    """Hold the engine of a model, and its own greedy answer to each question."""

    engine: TransformersEngine
    questions: Questions
    answers: list[Sample]


def model_of(folder: str | Path, questions: Questions) -> Model:
    """Load the model in a folder, and ask it the questions."""
    model = load_checkpoint(str(folder), adapter=None, quantization="16bit")
    engine, tokens = engine_of(model, load_tokenizer(str(folder))), questions.tokens
    groups = engine.generate(questions.chats, max_completion_length=tokens)
    return Model(engine, questions, [answer for [answer] in groups])


class Reply(NamedTuple):
    """Hold a greedy answer; `ids` and `likeliest` are empty where the server does not give them.

    text: The answer.
    ended: Whether the model ended it, and not the limit of tokens.
    ids: The tokens, with the one that ended the answer.
    likeliest: The log-probabilities of the likeliest tokens, for the answer's first tokens.
    """

    text: str = ""
    ended: bool = False
    ids: Sequence[int] = ()
    likeliest: Sequence[Mapping[int, float]] = ()


class Server:
    """Ask a server by OpenAI's interface, which vLLM and transformers have.

    Args:
        url: Where it listens, such as http://127.0.0.1:8000.

    Raises:
        ValueError: No server answers there.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        # transformers' server lists none, and answers if none is named.
        names = [each["id"] for each in self.ask("/v1/models").get("data", [])]
        self.model = {"model": names[0]} if names else {}

    def ask(self, path: str, **content: Any) -> dict[str, Any]:
        """Return the server's JSON; {} if it refuses the question."""
        body = json.dumps(content).encode() if content else None
        try:
            request = Request(self.url + path, body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except (HTTPError, json.JSONDecodeError):
            return {}
        except (URLError, ValueError) as error:
            raise ValueError(f"no server answers at {self.url} ({error}): start it first") from None

    def reply(self, chat: list[Message], ids: list[int], tokens: int) -> Reply:
        """Return the greedy answer of at most `tokens` tokens to a chat, whose ids are `ids`."""
        greedy = {"temperature": 0, "max_tokens": tokens, "stream": False} | self.model
        answer = self.ask("/v1/chat/completions", messages=chat, **greedy)
        for choice in answer.get("choices", []):
            return Reply(choice["message"]["content"], choice["finish_reason"] == "stop")
        return Reply()


class LlamaCpp(Server):
    """Ask llama.cpp's server, on which Ollama and LM Studio are built."""

    def text_ids(self, text: str, add_special: bool = False) -> list[int]:
        """Return a text's token ids."""
        request = {"content": text, "add_special": add_special, "parse_special": True}
        return self.ask("/tokenize", **request).get("tokens", [])

    def prompt_ids(self, chat: list[Message]) -> list[int]:
        """Return the token ids of a chat, up to where its answer begins."""
        return self.text_ids(self.ask("/apply-template", messages=chat).get("prompt", ""), True)

    def reply(self, chat: list[Message], ids: list[int], tokens: int, begin: int = -1) -> Reply:
        """Return the greedy answer, which begins with the token `begin` if it is given."""
        request = {"temperature": 0, "n_predict": tokens, "n_probs": LIKELIEST}
        request |= {"logit_bias": [[begin, 100]] if begin >= 0 else []}
        request |= {"return_tokens": True, "cache_prompt": False}
        if not (answer := self.ask("/completion", prompt=ids, **request)):
            return Reply()
        likeliest = []
        # It tells nothing of tokens within a character, such as those of an emoji.
        for i, entry in zip(answer["tokens"], answer["completion_probabilities"], strict=False):
            if entry["id"] != i:
                break
            likeliest.append({each["id"]: each["logprob"] for each in entry["top_logprobs"]})
        ended = answer["stop_type"] == "eos"
        return Reply(answer["content"], ended, answer["tokens"], likeliest)


def server_at(url: str) -> Server:
    """Return a server, with the questions that it understands; the errors are `Server`'s."""
    plain = Server(url)
    return LlamaCpp(url) if plain.ask("/props") else plain


def compare(server: Server, model: Model) -> dict[str, Any]:
    """Compare a server with the model that it should serve.

    Returns:
        prompts, specials, texts and chats (how many of them the server tokenizes otherwise), ends
        (how many tokens that end an answer do not), runs_on (answers), equal (greedy answers),
        tokens, kl (mean per token, server to model) [nats], score and score_served.
    """
    engine, (chats, tokens, score), ours = model
    folded = [fold_system(engine.tokenizer, chat) for chat in chats]
    prompts, figures = encode(engine.tokenizer, chats), {"prompts": len(chats)}
    if isinstance(server, LlamaCpp):
        figures |= _tokenized(server, engine, folded, prompts)
    replies = [server.reply(*each, tokens) for each in zip(folded, prompts, strict=True)]
    pairs = list(zip(replies, ours, strict=True))
    more = [pair for pair in pairs if not pair[0].ended and not pair[1].truncated]
    figures["runs_on"] = sum(reply.text.startswith(our.text) for reply, our in more if our.text)
    figures["equal"] = sum(reply.text.strip() == our.text.strip() for reply, our in pairs)
    kl = []
    for chat, reply in zip(chats, replies, strict=True):
        if reply.likeliest:
            inputs = with_completion(engine.tokenizer, chat, reply.ids)
            kl += _kl(reply.likeliest, log_probs(engine.model, inputs, len(reply.ids)))
    figures |= {"tokens": len(kl), "kl": sum(kl) / len(kl) if kl else None}
    if score:
        figures["score"] = score([our.text for our in ours])
        figures["score_served"] = score([reply.text for reply in replies])
    return figures


def _tokenized(
    server: LlamaCpp,
    engine: TransformersEngine,
    chats: Sequence[list[Message]],
    prompts: list[list[int]],
) -> dict[str, int]:
    """Count what the server tokenizes otherwise, and the ends of answers that it passes over."""
    tokenizer = engine.tokenizer
    specials = {token.content: [i] for i, token in tokenizer.added_tokens_decoder.items()}
    texts = [*TEXTS, *(str(turn["content"]) for chat in chats for turn in chat)]
    texts = dict(zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
    each = zip(chats, prompts, strict=True)
    return {
        "specials": sum(server.text_ids(text) != ids for text, ids in specials.items()),
        "texts": sum(server.text_ids(text) != ids for text, ids in texts.items()),
        "chats": sum(server.prompt_ids(chat) != ids for chat, ids in each),
        "ends": sum(not server.reply(chats[0], prompts[0], 3, i).ended for i in engine.stops),
    }


def _kl(likeliest: Sequence[Mapping[int, float]], ours: "Tensor") -> list[float]:
    """Return the KL divergence at each token that the server told of [nats]."""
    distances = []
    for entry, row in zip(likeliest, ours, strict=False):
        theirs, own = [math.exp(value) for value in entry.values()], row[list(entry)].exp().tolist()
        pairs = [*zip(theirs, own, strict=True), (1 - sum(theirs), 1 - sum(own))]
        pairs = [(max(p, 1e-9), max(q, 1e-9)) for p, q in pairs]
        distances.append(sum(p * math.log(p / q) for p, q in pairs))
    return distances


def verdict(
    name: str,
    figures: Mapping[str, Any],
    limit: float = KL,
    faults: Mapping[str, str] | None = None,
) -> Check:
    """Return the check of a server or file; the state of one that only answers worse is "warning".

    Args:
        name: Of the check.
        figures: From `compare`; {} if the file cannot be loaded.
        limit: Of `kl` [nats].
        faults: What is wrong beside the figures, the most fundamental first: {kind of FAULTS:
            evidence}.
    """
    faults, parts, is_worse = dict(faults or {}), [], False
    for kind, fault in FAULTS.items():
        if number := figures.get(kind):
            faults[kind] = fault["evidence"].format(number)
    if figures:
        equal, prompts, kl = figures["equal"], figures["prompts"], figures["kl"]
        is_far = equal < prompts / 2 if kl is None else not kl <= limit
        if is_far and not faults:
            faults["weights"] = "the weights differ"
        text = f"greedy answers equal {equal} of {prompts}"
        if kl is not None:
            text += f", KL {kl:.2g} per token (at most {limit}) on {figures['tokens']} tokens"
        if "score" in figures:
            served, own = figures["score_served"], figures["score"]
            text += f", reward {served:.3g} (the model {own:.3g})"
            is_worse = own - served > LOSS * abs(own) and prompts - equal > FEW
        parts = [text]
    state = "stop" if faults else "warning" if is_worse else "ok"
    fixes = [FAULTS[kind]["fix"] for kind in (*faults, *["reward"] * is_worse)]
    return Check(name, state, "; ".join([*faults.values(), *parts]), fixes[0] if fixes else "")
