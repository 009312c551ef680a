"""Test whether a merged folder, a GGUF file or a server is the model that was trained.

`merged` compares a merged folder with the base and its adapter. Comparing every weight detects an
error of any magnitude and shows its kind; comparing the probabilities on held-out prompts reveals
faults outside the weights, such as a different config.json.

`served` compares a server that has OpenAI's interface (llama.cpp with a GGUF file, vLLM,
transformers serve, Ollama) with the model in a folder. It uses what the server tells: the token ids
of texts, the lengths of prompts, greedy answers, where they end, and the probabilities of their
tokens. docs/figures.md has the measurements behind the limits.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.models import Sample, TransformersEngine, engine_of, load_checkpoint, load_tokenizer
from grpo_nb.models.template import encode, fold_system, with_completion
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from torch import Tensor, nn

# A merge rounds by less than one step of bf16, and a policy in fp16 or fp32 adds half a step of its
# own. The absolute tolerance is for fp16 numbers close to 0.
RELATIVE, ABSOLUTE = 2 * 2**-7, 2**-23
BEYOND = 1e-4  # the share of a tensor that may exceed the tolerance; 0 in sound merges
# A tensor lacks too much of the adapter's change if it lacks more than this share, and more than
# this many standard errors: sound merges had at most 4.3 of them, omitted layers 45 or more.
LOST, SURE = 0.01, 8
KL = 0.05  # mean per token [nats]; sound merges computed in bf16 had up to 0.007
# A server answers worse if its reward is lower by this share, and more answers than these differ.
LOSS, FEW = 0.05, 2
CHAT = "/v1/chat/completions"
# llama.cpp's server and vLLM tell these details; transformers' refuses a request for them.
DETAILS = {"logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}
TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))
FAULTS = TABLES["faults"]


class Questions(NamedTuple):
    """Hold what a model is asked.

    chats: Held-out prompts.
    tokens: Length at which answers are cut [tokens].
    score: A function that returns the mean reward of answers, one per chat; None for no reward.
    """

    chats: Sequence[list[Message]]
    tokens: int = 64
    score: Callable[[list[str]], float] | None = None


# The engine of a model, what it is asked, and its own greedy answers.
Model = tuple[TransformersEngine, Questions, list[Sample]]


def model_of(folder: str | Path, questions: Questions) -> Model:
    """Load the model in a folder, ask it the questions, and return them with its answers."""
    model = load_checkpoint(str(folder), adapter=None, quantization="16bit")
    engine = engine_of(model, load_tokenizer(str(folder)))
    groups = engine.generate(questions.chats, max_completion_length=questions.tokens)
    return engine, questions, [answer for [answer] in groups]


def log_probs(model: "nn.Module", inputs: "dict[str, Tensor]", tokens: int) -> "Tensor":
    """Return the log-probabilities at the last `tokens` tokens, [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        logits = model(**inputs, logits_to_keep=tokens + 1).logits
        return logits[0, -tokens - 1 : -1].float().log_softmax(-1).cpu()


def merged(tuned: TransformersEngine, files: "nn.Module", questions: Questions) -> dict[str, Any]:
    """Compare the adapter on its base with the merged model, in weights and on held-out prompts.

    Both models score each token of the adapter's greedy completion, so that one differing token
    counts once and does not affect the tokens after it.

    Args:
        tuned: The engine of the base with the adapter, as trained.
        files: The merged model, read back from disk.
        questions: Held-out prompts, and the length of the completions.

    Returns:
        The result of `weights`; kl: the mean KL divergence per token, adapter to merged [nats];
        config: whether that exceeds its limit; text: the figures.
    """
    answers, distances = tuned.generate(questions.chats, max_completion_length=questions.tokens), []
    for chat, [answer] in zip(questions.chats, answers, strict=True):
        inputs = with_completion(tuned.tokenizer, chat, answer.ids)
        policy, other = (log_probs(each, inputs, len(answer.ids)) for each in (tuned.model, files))
        distances += (policy.exp() * (policy - other)).sum(-1).tolist()
    kl = sum(distances) / len(distances)
    text = f"KL adapter to merged {kl:.2g} per token (at most {KL}), on {len(answers)} prompts"
    # NaN is a fault.
    return weights(tuned.model, files) | {"config": not kl <= KL, "kl": kl, "text": text}


def weights(tuned: "nn.Module", files: "nn.Module") -> dict[str, str]:
    """Compare each weight of the merged model with the base's plus the adapter's change.

    Returns:
        {kind of FAULTS: how many weights are wrong, and how far off one of them is}; "" if none is.
        For the kind "adapter", the second figure is the share of the change that is in the merged
        model, which should be 100 %. For the other kinds, it is a relative distance.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.utils.integrations import dequantize_bnb_weight

    loras = [(path, m) for path, m in tuned.named_modules() if isinstance(m, LoraLayer)]
    layers = {
        plain_name(f"{path}.{getattr(m, 'parameter_name', 'weight')}"): m for path, m in loras
    }
    faults: dict[str, list[str]] = {"unadapted": [], "base": [], "adapter": []}
    bases = {plain_name(path): w for path, w in tuned.named_parameters() if ".lora_" not in path}
    with torch.no_grad():
        for name, weight in bases.items():
            base = dequantize_bnb_weight(weight) if hasattr(weight, "quant_state") else weight
            # Without a change, weights keep their dtype: an embedding in fp32 would take gigabytes.
            change = layers[name].get_delta_weight("default").float() if name in layers else 0
            right = base.float() + change if name in layers else base
            error = files.get_parameter(name) - right
            tolerance = RELATIVE * right.abs().maximum(base.abs()) + ABSOLUTE
            near = int((error.abs() <= tolerance).count_nonzero())  # NaN is not counted
            is_far, share = near < (1 - BEYOND) * error.numel(), float(error.norm() / base.norm())
            kind = "base" if name in layers else "unadapted"
            if name in layers:
                products, square = (error * change).double(), float(change.double().square().sum())
                total, noise = float(products.sum()), float(products.norm())
                is_lost = abs(total) > LOST * square and abs(total) > SURE * noise
                if is_lost or (is_far and share < RELATIVE):
                    kind, share, is_far = "adapter", 1 + total / (square or 1), True
            if is_far:
                faults[kind].append(f"{share:z.0%} in {name}")
    return {kind: f"{len(far)} weights ({far[0]})" if far else "" for kind, far in faults.items()}


def plain_name(path: str) -> str:
    """Return the name that a weight has in a model without an adapter."""
    return path.removeprefix("base_model.model.").replace(".base_layer", "")


class Server:
    """Send requests to a server that has OpenAI's interface.

    Args:
        url: Where the server listens, such as http://127.0.0.1:8000.

    Raises:
        ValueError: No server answers there.
    """

    def __init__(self, url: str) -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = httpx.Client(timeout=600)
        try:
            names = self.ask("/v1/models").get("data")
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:  # such as a web page
            raise ValueError(f"no server answers at {url} ({error}): start it first") from None
        # transformers' server lists none, and answers if none is named.
        self.model = {"model": names[0]["id"]} if names else {}

    def ask(self, path: str, **content: Any) -> dict[str, Any]:
        """Return the server's answer to a request, as read from JSON; {} if it refuses."""
        method = "POST" if content else "GET"
        answer = self.client.request(method, self.url + path, json=content or None)
        return answer.json() if answer.is_success else {}

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids; [] if the server does not tell them."""
        options = {"parse_special": True, "add_special": False, "add_special_tokens": False}
        answer = self.ask("/tokenize", content=text, prompt=text, **self.model, **options)
        return answer.get("tokens", [])

    def reply(self, chat: list[Message], tokens: int) -> tuple[Sample, int, list[dict]]:
        """Return the greedy answer of at most `tokens` tokens to a chat.

        Returns:
            The answer; the length of the prompt [tokens], 0 if the server does not tell it; and,
            for each token with probabilities in the reply, {token id: log-probability}: the token
            itself, then the likeliest ones.

        Raises:
            ValueError: The server refuses the chat.
        """
        request = {"messages": chat, "temperature": 0, "max_tokens": tokens, "stream": False}
        request |= self.model
        answer = self.ask(CHAT, **request, **DETAILS) or self.ask(CHAT, **request)
        if "choices" not in answer:
            raise ValueError(f"{self.url} refuses a held-out prompt: its log says why")
        [choice], usage = answer["choices"], answer.get("usage") or {}
        entries = (choice.get("logprobs") or {}).get("content") or []
        rows = [entry for entry in entries if _id(entry) >= 0]
        rows = [{_id(i): i["logprob"] for i in (entry, *entry["top_logprobs"])} for entry in rows]
        text, is_cut = choice["message"].get("content") or "", choice["finish_reason"] == "length"
        ids = [next(iter(each)) for each in rows]
        sample = Sample(text, usage.get("completion_tokens", 0), is_cut, ids)
        return sample, usage.get("prompt_tokens", 0), rows


def _id(entry: Mapping[str, Any]) -> int:
    """Return the id of a token, which vLLM writes as text; -1 if the server does not tell it."""
    return entry.get("id", int(entry["token"].partition("token_id:")[2] or -1))


def served(url: str, model: Model, limit: float = KL) -> dict[str, Any]:
    """Compare a server with the model that it should serve.

    Returns:
        {kind of FAULTS: how often it was found}; equal: the number of equal greedy answers; kl: the
        mean KL divergence per token, server to model [nats], None if the server tells no
        probabilities; text: the figures.

    Raises:
        ValueError: No server answers, or it refuses a prompt.
    """
    server, (engine, (chats, tokens, score), ours) = Server(url), model
    tokenizer, counts, replies, kl = engine.tokenizer, Counter(), [], []
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    for text in (*TABLES["texts"], *specials):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        counts["texts"] += server.ids(text) not in ([], ids)
    for chat, prompt, our in zip(chats, encode(tokenizer, chats), ours, strict=True):
        reply, length, rows = server.reply(fold_system(tokenizer, chat), tokens)
        replies.append(reply.text)
        counts["chats"] += length not in (0, len(prompt))
        counts["equal"] += reply.text.strip() == our.text.strip()
        counts["ends"] += reply.truncated > our.truncated and reply.text.startswith(our.text)
        # After the first other token the contexts differ. A server may leave out the tokens within
        # a character, such as an emoji; then the first other one is at another place.
        both = zip(reply.ids, our.ids, strict=False)
        same = len([*takewhile(lambda pair: pair[0] == pair[1], both)])
        if rows := rows[: same + (len(reply.ids) == reply.tokens)]:
            inputs = with_completion(tokenizer, chat, our.ids)
            kl += map(_kl, rows, log_probs(engine.model, inputs, len(our.ids)))
    mean, half = sum(kl) / len(kl) if kl else None, len(chats) / 2
    counts["weights"] = not mean <= limit if kl else counts["equal"] < half  # NaN is a fault
    text = f"greedy answers equal {counts['equal']} of {len(chats)}"
    if kl:
        text += f", KL {mean:.2g} per token (at most {limit}) on {len(kl)} tokens"
    if score:
        own, other = score([our.text for our in ours]), score(replies)
        counts["reward"] = own - other > LOSS * abs(own) and len(chats) - counts["equal"] > FEW
        text += f", reward {other:.3g} (the model {own:.3g})"
    return {**counts, "kl": mean, "text": text}


def _kl(likeliest: Mapping[int, float], ours: "Tensor") -> float:
    """Return the KL divergence at a token [nats]; all unlikely tokens are pooled into one."""
    rows = ours.new_tensor([*likeliest.values()]), ours[[*likeliest]]
    p, q = (row.exp().double().clamp(1e-9) for row in rows)
    rest, other = ((1 - row.sum()).clamp(1e-9) for row in (p, q))
    return float((p * (p / q).log()).sum() + rest * (rest / other).log())


def verdict(name: str, figures: Mapping[str, Any]) -> Check:
    """Return the check of a merge, a file or a server.

    Args:
        name: The check's name.
        figures: The result of `merged`, `served` or `gguf.compare`. The check names only the most
            fundamental fault, the first in the order of FAULTS; "reward" alone is a warning.
    """
    kind = next((kind for kind in FAULTS if figures.get(kind)), "")
    fault = FAULTS.get(kind, {"evidence": "", "fix": ""})
    state = {"": "ok", "reward": "warning"}.get(kind, "stop")
    parts = [fault["evidence"].format(figures.get(kind)), figures.get("text")]
    return Check(name, state, "; ".join(filter(None, parts)), fault["fix"])
