"""Do completions come from the policy that is trained? Asked before the first step, and at times.

GRPO's loss takes each completion for a sample of the policy as it is. Nothing fails where it is
not: where the engine leaves the adapter out, keeps the weights of an earlier step, cuts unlikely
tokens, or reads the prompt by another template. The reward then moves for the wrong reason, or
not at all.

Every `train.guard_steps` steps the adapter is changed by noise for a moment, so that only the
policy as it is now can have written what is sampled then, by the very path that the training
samples by. Each token gets a p-value from the trainer's own probabilities: how likely the policy
is to sample one as rare. Those of a policy's own samples are independent and even between 0 and 1,
whatever the model, and Fisher's method says whether they are. Weights, random states and metrics
are then as before: a training with the guard gives the same numbers as one without (vLLM's own
random state apart).
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.models import sharded
from grpo_nb.training import preflight, ranks

if TYPE_CHECKING:
    import torch
    import trl

    from grpo_nb.training.trainer import Trainer

COMPLETIONS = 32  # sampled at a time, or two groups
TOKENS = 20  # of each, at most
LOGITS = 2**27  # held at once: 0.25 GB in 16 bit
NOISE = 0.3  # on LoRA's B at first [standard deviation]
MOST = 5.0  # that the noise is doubled up to, until it is felt; a random model hardly does
SCORE = 4.7  # of Fisher's method; chance goes beyond it, either way, three times in a million
CHANGE = 1.0  # of log-probabilities, when the noise is well felt [nats a token]
UNFELT = 0.01  # the same, where nothing but rounding is [nats a token]
ENTROPY = 0.5  # of the policy that is sampled from: truncation spares a certain one [nats a token]
DIFFERENCE = 0.25  # of the engine's log-probabilities, beyond rounding to 16 bit [nats a token]
CUTS = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}  # what does not cut; or None
GO_ON = "train.guard_steps = 0 trains all the same"
LIKELIER = (
    "They are likelier than the policy's own: what samples has a temperature of its own, or leaves "
    "unlikely tokens out. Look in generation_config.json of the model and in the engine's settings"
)
RARER = (
    "They are rarer than the policy's own: what samples leaves the adapter out, has the weights of "
    "another step, is hotter than train.temperature, or reads the prompt by another tokenizer, "
    "template or padding. Try model.fast_inference = 'off', or policy.rollouts = 'model' on a CPU"
)
UNMOVED = (
    "noise on the adapter does not change what the trainer computes its loss from, so that nothing "
    "would be learnt: the adapter is not in use. Load the policy again"
)


class Evidence(NamedTuple):
    """What one look at the samples gave.

    score: Of Fisher's method, as a standard normal; above 0 the tokens are rarer than the policy's
        own, below 0 likelier.
    difference: Of the engine's log-probabilities from the trainer's, mean of its size [nats]; NaN
        where the engine gives none.
    change: Of the trainer's log-probabilities by the noise, mean of its size [nats]; NaN once it
        was enough.
    entropy: Of the policy with the noise [nats a token].
    tokens: How many were looked at.
    """

    score: float
    difference: float
    change: float
    entropy: float
    tokens: int


class Guard:
    """Looks whether the trainer's samples come from its policy, and stops the training if not.

    Args:
        trainer: In the middle of its training, between two steps.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, self.noise = trainer, NOISE
        self.seen: list[Evidence] = []

    def __call__(self) -> None:
        """Look now; all processes do so together.

        Raises:
            RuntimeError: The samples are not the policy's; what it means, and what to do.
        """
        trainer = self.trainer
        trainer.model.train()  # as the step will
        with _stand_in(trainer) as double:
            weights = changeable(trainer)
            while True:
                self.seen.append(self._look(double, weights))
                self._stop_if(wrong(self.seen[-1], trainer.args))
                weak = self.seen[-1].change < CHANGE or self.seen[-1].entropy < ENTROPY
                if not weights or self.noise >= MOST or not ranks.anywhere(weak):
                    break
                self.noise *= 2
        self._stop_if(UNMOVED if self.seen[-1].change < UNFELT else "")

    def _stop_if(self, reason: str) -> None:
        """Raise on every process what one of them found."""
        step = self.trainer.state.global_step + 1
        if found := [reason for reason in ranks.gather([reason]) if reason]:
            raise RuntimeError(f"stopped before step {step}: {found[0]}; {GO_ON}")

    def _look(self, double: "Trainer", weights: Sequence["torch.Tensor"]) -> Evidence:
        prompts = _prompts(double)
        with changed(weights, self.noise, seed=double.state.global_step):
            if weights:
                double._last_loaded_step = (
                    -1
                )  # TRL sends them to vLLM, and once more before the step
            group = double.num_generations
            sampled, engine = double._generate_single_turn(prompts, None, {}, group)
            if double.use_vllm:
                self.trainer._last_loaded_step = -1 if weights else double._last_loaded_step
            log_p = log_probabilities(double, prompts, sampled)
            p, entropy = p_values(double, prompts, sampled, log_p)
        felt = not weights or any(one.change >= CHANGE for one in self.seen)
        before = log_p * math.nan if felt else log_probabilities(double, prompts, sampled)
        told = [math.nan if one is None else one for row in engine or [] for one in row]
        difference = log_p.new_tensor(told) - log_p if told else log_p.new_tensor(math.nan)
        return Evidence(
            score=fisher(p),
            difference=float(difference.abs().nanmean()),
            change=float((log_p - before).abs().mean()),
            entropy=float(entropy.mean()),
            tokens=len(log_p),
        )


def wrong(seen: Evidence, args: "trl.GRPOConfig") -> str:
    """Why these samples are not the policy's, and what to do; "" where they may be.

    Args:
        seen: With the noise.
        args: Of the training, for what it says of sampling.
    """
    asked = vars(args) | (args.generation_kwargs or {})
    cuts = [
        f"trl.{name} = {asked[name]}" for name in CUTS if asked[name] not in (CUTS[name], None, -1)
    ]
    if cuts:
        return f"with {' and '.join(cuts)} completions are no samples of the policy. Leave it unset"
    if abs(seen.score) <= SCORE and not seen.difference > DIFFERENCE:
        return ""
    told = "the completions do not come from the policy that is trained. By its probabilities "
    told += f"{seen.tokens} sampled tokens score {seen.score:.1f}, its own within {SCORE:g} of 0"
    if seen.difference > DIFFERENCE:
        told += f", and vLLM's log-probabilities differ from the trainer's by {seen.difference:.2f}"
    return f"{told}. {LIKELIER if seen.score < 0 else RARER}"


@contextmanager
def _stand_in(trainer: "Trainer") -> Iterator["Trainer"]:
    """A copy of the trainer that samples few and short completions; it leaves nothing behind."""
    import torch

    limit = min(TOKENS, trainer.max_completion_length)
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, torch.nn.Dropout)]
    with torch.no_grad(), preflight.stand_in(trainer) as double:
        double.share_prompts, double.max_completion_length = trainer.share_prompts, limit
        if double.use_vllm:
            double.vllm_generation = copy.copy(double.vllm_generation)
            double.vllm_generation.max_completion_length = limit
        else:
            double.generation_config = copy.deepcopy(double.generation_config)
            double.generation_config.max_new_tokens = limit
        try:
            for layer in layers:  # else no two passes would agree
                layer.eval()
            yield double
        finally:
            for layer in layers:
                layer.train()
            trainer._copy = double._copy  # it takes time to make


def _prompts(trainer: "Trainer") -> list[list[int]]:
    """Token ids of short and long prompts, each as often as its group is large."""
    group = trainer.num_generations
    count = max(2, COMPLETIONS // group)
    chats = list(trainer.train_dataset["prompt"][: 8 * count])
    if trainer.environment:  # which is not begun: its first message is not there yet
        trainer._batch_environments = [None] * len(chats)
    ordered = sorted(trainer._tokenize_prompts(chats)[0], key=len)
    chosen = [ordered[place * (len(ordered) - 1) // (count - 1)] for place in range(count)]
    return [ids for ids in chosen for _ in range(group)]


def changeable(trainer: "Trainer") -> list["torch.Tensor"]:
    """The weights that the noise goes to: LoRA's B, or else norms and biases, if they are trained.

    None where they are spread over processes, or where TRL merges the adapter into the base to send
    it to vLLM, and takes it out again: of so much noise some would stay, by rounding. The samples
    are looked at without noise then.
    """
    merged = trainer.use_vllm and not trainer.policy.vllm and hasattr(trainer.model, "peft_config")
    if sharded() or merged:
        return []
    named = trainer.model.named_parameters()
    trained = {name: weight for name, weight in named if weight.requires_grad}
    of_lora = [weight for name, weight in trained.items() if "lora_B" in name]
    return of_lora or [weight for weight in trained.values() if weight.ndim == 1]


@contextmanager
def changed(weights: Sequence["torch.Tensor"], size: float, seed: int) -> Iterator[None]:
    """Noise is added to the weights, the same on every process; then they are exactly as before.

    Args:
        weights: Of any shapes.
        size: Standard deviation.
        seed: Of the noise.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    before = [one.detach().clone() for one in weights]
    try:
        for one in weights:
            one.data += (size * torch.randn(one.shape, generator=generator)).to(one)
        yield
    finally:
        for one, kept in zip(weights, before, strict=True):
            one.data.copy_(kept)


def log_probabilities(
    trainer: "Trainer", prompts: Sequence[list[int]], completions: Sequence[list[int]]
) -> "torch.Tensor":
    """What the loss is computed from, of all completions one after the other, [tokens].

    Args:
        trainer: Its own method is called, as TRL calls it: prompts padded left, completions right.
        prompts: Token ids, [completions][tokens].
        completions: Token ids, [completions][tokens].
    """
    import torch

    width, pad = max(map(len, completions)), trainer._tokenizer.pad_token_id
    left = max(map(len, prompts))
    rows, masks = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        before, after = left - len(prompt), width - len(completion)
        rows.append([pad] * before + prompt + completion + [pad] * after)
        masks.append([0] * before + [1] * (len(prompt) + len(completion)) + [0] * after)
    ids, mask = (torch.tensor(table, device=trainer.accelerator.device) for table in (rows, masks))
    size = trainer.args.per_device_train_batch_size
    log_p = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, size)[0]
    more = log_p.shape[1] - width  # Unsloth's moves each row to the left by the padding before it
    starts = [max(0, more - (left - len(prompt))) for prompt in prompts]
    pairs = zip(log_p.float(), starts, completions, strict=True)
    return torch.cat([row[start : start + len(completion)] for row, start, completion in pairs])


def p_values(
    trainer: "Trainer",
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    log_p: "torch.Tensor",
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """The probability of a token as rare as each, and the entropy there, both [tokens].

    Args:
        trainer: Whose model is run, with no padding before a prompt.
        prompts: Token ids, [completions][tokens].
        completions: Token ids, [completions][tokens].
        log_p: The trainer's, from `log_probabilities`.
    """
    import torch

    pad, found, rest = trainer._tokenizer.pad_token_id, [], log_p
    rows = [(len(p), p + c) for p, c in zip(prompts, completions, strict=True)]
    most = max(map(len, prompts)) + trainer.max_completion_length
    size = max(1, LOGITS // (most * trainer.model.config.get_text_config().vocab_size))
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        width = max(len(ids) for _, ids in part)
        ids = torch.tensor([row + [pad] * (width - len(row)) for _, row in part]).to(log_p.device)
        column = torch.arange(1, width, device=log_p.device)
        mine = torch.stack([(column >= start) & (column < len(row)) for start, row in part])
        with trainer.compute_loss_context_manager():
            logits = trainer.model(input_ids=ids).logits[:, :-1][mine]
        told, rest = rest[: len(logits)], rest[len(logits) :]
        found.append(_p_values(logits.float() / trainer.temperature, ids[:, 1:][mine], told, pad))
    p, entropy = map(torch.cat, zip(*found, strict=True))
    return p, entropy


def _p_values(logits: Any, token: Any, log_p: Any, pad: int) -> tuple[Any, Any]:
    """Of tokens by logits, [tokens, vocabulary], and the trainer's `log_p`; and the entropies."""
    import torch

    log_q, token = logits.log_softmax(-1), token[:, None]
    # Unsloth takes a completion's last token for padding where a tokenizer has one for both.
    log_p = torch.where(token == pad, log_q.gather(-1, token), log_p[:, None])
    q, rarer = log_q.exp(), (log_q < log_p).scatter(-1, token, False)
    share = torch.rand(len(q)).to(q)  # of the token's own probability
    return (q * rarer).sum(-1) + share * log_p[:, 0].exp(), -(q * log_q.clamp(min=-1e4)).sum(-1)


def fisher(p: "torch.Tensor") -> float:
    """Whether p-values are even between 0 and 1, as a standard normal; above 0: they are too small.

    The sum of their negative logarithms follows a gamma distribution, here by the signed root of
    its deviance, which is as good as exact from ten values on.

    Args:
        p: [tokens]; independent where the tokens are the policy's own.

    Source: Fisher, "Statistical Methods for Research Workers", 1932, section 21.1.

    >>> import torch
    >>> even = (torch.arange(1000) + 0.5) / 1000
    >>> [round(fisher(p), 1) for p in (even, even**1.3, 0.1 + 0.9 * even)]
    [-0.0, 8.7, -8.9]
    """
    mean = float(-p.double().clamp(1e-9, 1).log().mean())
    return math.copysign(math.sqrt(2 * len(p) * (mean - 1 - math.log(mean))), mean - 1)
