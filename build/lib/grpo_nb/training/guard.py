"""Test whether the completions come from the policy that is being trained.

GRPO's loss treats each completion as a sample of the current policy. If it is not, no error occurs.
The engine may omit the adapter, use the weights of an earlier step, cut off unlikely tokens, or
read the prompt with another template. The reward then changes for the wrong reason, or not at all.

The guard tests before the first step, every `train.guard_steps` steps, and at the end. It adds
noise to the adapter and samples in the same way as training does. Only the policy with this noise
can write such samples. Each token gets a p-value from the trainer's own probabilities: the
probability that the policy samples a token at least as rare. If the samples are the policy's own,
their p-values are independent and uniform for any model; Fisher's method tests this. Weights,
random states and metrics are then restored, so the guard does not change the results of training
(except through vLLM's own random state).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_nb.models import sharded
from grpo_nb.models.template import count_tokens
from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import Check
from grpo_nb.training import preflight, ranks
from grpo_nb.training.arguments import distorted

if TYPE_CHECKING:
    import torch

    from grpo_nb.training.trainer import Trainer

COMPLETIONS = 32  # sampled for each test; at least two groups
TOKENS = 20  # sampled for each completion, at most
NOISE = 0.3  # added to LoRA's B at first [standard deviation]
MOST = 1.2  # limit of the noise, which doubles until it has an effect; a random model needs much
SCORE = 4.7  # limit of Fisher's score; chance exceeds it three times in a million
CHANGE = 1.0  # change of the log-probabilities at which noise has a clear effect [nats per token]
UNFELT = 0.01  # change below which there is nothing but rounding [nats per token]
ENTROPY = 0.5  # below it the policy may be too certain for truncation to show [nats per token]
# Limit of the difference between the engine's and the trainer's log-probabilities without noise
# [nats per token].
# Correct engines were at 0.0005 to 0.06, wrong ones at 0.2 (huggingface/trl, issues 5312, 5313).
DIFFERENCE = 0.1
MISSING = 0.5  # the same limit with noise, which a 16-bit engine rounds [share of `change`]
LIKELIER = (
    "They are likelier than the policy's own samples: the engine has another temperature, or cuts "
    "off unlikely tokens. Look into the model's generation_config.json and the engine's settings"
)
RARER = (
    "They are rarer than the policy's own samples: the engine leaves the adapter out, has the "
    "weights of another step, samples at a higher temperature, or reads the prompt with another "
    "tokenizer, template or padding. Try model.fast_inference = 'off', or on a CPU "
    "policy.rollouts = 'model'"
)
UNMOVED = (
    "noise on the adapter does not change the log-probabilities that the loss is computed from, so "
    "nothing would be learnt: the adapter is not in use. Load the policy again"
)


class Evidence(NamedTuple):
    """Hold the result of one test of the samples.

    score: Fisher's score: standard normal for the policy's own tokens, higher if the tokens are
        less likely than those, lower if they are more likely.
    difference: Mean absolute difference between the engine's log-probabilities and the trainer's
        [nats per token]; NaN if the engine returns none.
    change: Mean absolute change that the noise causes in the trainer's log-probabilities
        [nats per token]; NaN without noise.
    entropy: Mean entropy of the policy with the noise [nats per token].
    tokens: Number of tokens in the test.
    """

    score: float
    difference: float
    change: float
    entropy: float
    tokens: int


class Guard:
    """Stop training if its samples do not come from the policy.

    Args:
        trainer: The trainer, between two steps.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, self.noise = trainer, NOISE
        self.looks: list[Evidence] = []

    def __call__(self) -> None:
        """Sample, and test the samples; all processes must call this together.

        Raises:
            RuntimeError: The samples are not from the policy; the message has causes and remedies.
        """
        trainer = self.trainer
        if cuts := distorted(trainer.args):
            self._stop_if(f"{cuts}: samples are then not the policy's; leave this unset")
        trainer.model.train()  # as in a training step
        with _stand_in(trainer) as double:
            weights = changeable(trainer)
            while True:
                evidence = self._look(double, weights)
                self.looks.append(evidence)
                self._stop_if(wrong(evidence))
                weak = evidence.change < CHANGE or evidence.entropy < ENTROPY
                if not weights or 2 * self.noise > MOST or not ranks.anywhere(weak):
                    break
                self.noise *= 2
        self._stop_if(UNMOVED if evidence.change < UNFELT else "")
        if ranks.anywhere(math.isnan(evidence.score)):
            ranks.from_main(self._warn)

    def _warn(self) -> None:
        """Warn that the samples could not be judged."""
        evidence = f"{self._place()} the score of the samples is NaN, so it is unclear whether "
        evidence += "they are the policy's"
        fix = "see whether loss and grad_norm are finite (fp16 may overflow from the noise alone)"
        self.trainer.stage.record_checks([Check("policy identity", "warning", evidence, fix)])
        print(f"warning: {evidence}: {fix}")

    def _place(self) -> str:
        step = self.trainer.state.global_step
        last = step and step == self.trainer.args.max_steps
        return f"after step {step}" if last else f"before step {step + 1}"

    def _stop_if(self, reason: str) -> None:
        """Raise an error on every process if any process gives a reason."""
        if reasons := [text for text in ranks.gather([reason]) if text]:
            raise RuntimeError(f"stopped {self._place()}: {reasons[0]}; {preflight.GO_ON}")

    def _look(self, double: "Trainer", weights: Sequence["torch.Tensor"]) -> Evidence:
        """Sample with noise on the weights; compare the samples with the policy's probabilities."""
        chats = _chats(double)
        if double.environment:  # no environment is reset, so there are no first messages
            double._batch_environments = [None] * len(chats)
        prompts, images, fields = double._tokenize_prompts(chats)
        with noise_on(weights, self.noise, seed=double.state.global_step):
            group = double.num_generations
            completions, rows = double._generate_single_turn(prompts, images, fields, group)
            if double.use_vllm:  # vLLM has these weights now, and need not load them again
                self.trainer._last_loaded_step = double._last_loaded_step
            samples = Samples(prompts, completions, chats)
            log_p = log_probabilities(double, samples)
            p, entropy = p_values(double, samples, log_p)
        before = log_probabilities(double, samples) if weights else log_p * math.nan
        engine = [math.nan if value is None else value for row in rows or [] for value in row]
        difference = log_p.new_tensor(engine) - log_p if engine else log_p.new_tensor(math.nan)
        return Evidence(
            score=fisher(p),
            difference=float(difference.abs().nanmean()),
            change=float((log_p - before).abs().mean()),
            entropy=float(entropy.mean()),
            tokens=len(log_p),
        )


class Samples(NamedTuple):
    """Hold completions, and the prompts that they were sampled from.

    prompts: Token ids, [completions][tokens].
    completions: Token ids, [completions][tokens].
    chats: The prompts as chats, [completions]; needed only if they contain images.
    """

    prompts: Sequence[list[int]]
    completions: Sequence[list[int]]
    chats: Sequence[list[Message]] = ()


def wrong(evidence: Evidence) -> str:
    """Return why these samples cannot be the policy's, and what to do; "" if they may be.

    Args:
        evidence: The result of a test with noise on the adapter; a score of NaN proves nothing.
    """
    off = evidence.difference > np.nanmax([DIFFERENCE, MISSING * evidence.change])
    if not abs(evidence.score) > SCORE and not off:
        return ""
    reason = (
        "the completions do not come from the policy that is trained. Under its probabilities "
        f"the {evidence.tokens} sampled tokens score {evidence.score:.1f}, while its own samples "
        f"score between -{SCORE:g} and {SCORE:g}"
    )
    if off:
        reason += (
            f", and the engine's log-probabilities are off by {evidence.difference:.2f} a token"
        )
    return f"{reason}. {LIKELIER if evidence.score < -SCORE else RARER}"


@contextmanager
def _stand_in(trainer: "Trainer") -> Iterator["Trainer"]:
    """Yield a copy of the trainer that samples few, short completions and changes nothing."""
    import torch

    limit = min(TOKENS, trainer.max_completion_length)
    with torch.no_grad(), preflight.stand_in(trainer) as double:
        double.share_prompts, double.max_completion_length = trainer.share_prompts, limit
        if double.use_vllm:
            double.vllm_generation.max_completion_length = limit
        else:
            double.generation_config.max_new_tokens = limit
        yield double


def _chats(trainer: "Trainer") -> list[list[Message]]:
    """Return short and long prompts, each repeated for its group."""
    group = trainer.num_generations
    count = max(2, COMPLETIONS // group)
    chats = trainer.prompts[: 8 * count]
    lengths = count_tokens(trainer.policy.tokenizer, chats, preflight.tools_of(trainer))
    order = sorted(range(len(chats)), key=lengths.__getitem__)
    places = [number * (len(chats) - 1) // (count - 1) for number in range(count)]
    return [chats[order[place]] for place in places for _ in range(group)]


def changeable(trainer: "Trainer") -> list["torch.Tensor"]:
    """Return the weights that get noise: LoRA's B, or norms and biases in full fine-tuning.

    The list is empty, and samples are tested without noise, if the weights are sharded or vLLM adds
    the adapter to its own weights (with TRL always, with Unsloth on request). In the second case,
    rounding would leave some noise in vLLM's weights, and a copy of them would take gigabytes.
    """
    by_lora = trainer.policy.vllm and not trainer.policy.folds_adapter
    if sharded() or (trainer.use_vllm and not by_lora):
        return []
    parameters = trainer.model.named_parameters()
    weights = {name: weight for name, weight in parameters if weight.requires_grad}
    lora_b = [weight for name, weight in weights.items() if "lora_B" in name]
    return lora_b or [weight for weight in weights.values() if weight.ndim == 1]


@contextmanager
def noise_on(weights: Sequence["torch.Tensor"], size: float, seed: int) -> Iterator[None]:
    """Add the same noise to the weights on every process; restore the weights exactly at the end.

    Args:
        weights: Tensors of any shape.
        size: Standard deviation of the noise.
        seed: Seed of the noise.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    copies = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.data += (size * torch.randn(weight.shape, generator=generator)).to(weight)
        yield
    finally:
        for weight, original in zip(weights, copies, strict=True):
            weight.data.copy_(original)


def engine_difference(trainer: "Trainer", batch: Mapping[str, Any]) -> float:
    """Return how far the engine's log-probabilities are from the trainer's [nats per token].

    Args:
        trainer: The trainer, during a step, with the weights that sampled the batch.
        batch: The padded batch that TRL generated and scored; only one micro-batch of it is read.

    Returns:
        The mean absolute difference over the tokens that the policy wrote; NaN if it wrote none.
    """
    import torch

    rows = trainer.args.per_device_train_batch_size
    # TRL may mask all tokens of a truncated completion.
    places = batch["completion_mask"].any(1).nonzero()[:rows, 0]
    if not len(places):
        return math.nan
    prompts, completions = (
        [ids[mask].tolist() for ids, mask in zip(batch[f"{part}_ids"][places], masks, strict=True)]
        for part in ("prompt", "completion")
        for masks in [batch[f"{part}_mask"][places].bool()]
    )
    with torch.no_grad():
        log_p = log_probabilities(trainer, Samples(prompts, completions))
    is_token = batch["completion_mask"][places].bool()
    by_policy = batch.get("tool_mask", batch["completion_mask"])[places][is_token].bool()
    difference = batch["sampling_per_token_logps"][places][is_token] - log_p
    return float(difference[by_policy].abs().nanmean())


def log_probabilities(trainer: "Trainer", samples: Samples) -> "torch.Tensor":
    """Return the log-probabilities that the loss uses, completion after completion, [tokens].

    As in TRL, prompts are padded on the left and completions on the right.

    Args:
        trainer: The trainer.
        samples: The completions.
    """
    import torch

    prompts, completions, chats = samples
    batches = [
        trainer._tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")
        for ids, side in ((prompts, "left"), (completions, "right"))
    ]
    ids, mask = (
        torch.cat([batch[name] for batch in batches], dim=1).to(trainer.accelerator.device)
        for name in ("input_ids", "attention_mask")
    )
    prompt_width, width = (batch["input_ids"].shape[1] for batch in batches)
    size = trainer.args.per_device_train_batch_size
    images = preflight.images_for(trainer, chats, width)
    compute = trainer._get_per_token_logps_and_entropies
    log_p = compute(trainer.model, ids, mask, width, size, **images)[0]
    more = log_p.shape[1] - width  # Unsloth shifts each row left by the padding before it
    starts = [max(0, more - (prompt_width - len(prompt))) for prompt in prompts]
    pairs = zip(log_p.float(), starts, completions, strict=True)
    return torch.cat([row[start : start + len(completion)] for row, start, completion in pairs])


def p_values(
    trainer: "Trainer", samples: Samples, log_p: "torch.Tensor"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Return p-values (the probability of a token at least as rare) and entropies, [tokens].

    Args:
        trainer: The trainer; its model runs on one sample at a time, without padding.
        samples: The completions.
        log_p: The result of `log_probabilities`.
    """
    import torch

    parts, rest, pad = [], log_p, trainer._tokenizer.pad_token_id
    for prompt, completion, chat in zip(*samples, strict=True):
        row = torch.tensor([[*prompt, *completion]], device=log_p.device)
        images = preflight.images_for(trainer, [chat], len(completion))
        images.pop("num_images", None)
        with trainer.compute_loss_context_manager():
            logits = trainer.model(input_ids=row, **images).logits[0, len(prompt) - 1 : -1]
        part_log_p, rest = rest[: len(completion)], rest[len(completion) :]
        tokens, logits = row[0, len(prompt) :], logits.float() / trainer.temperature
        parts.append(_p_values(logits, tokens, part_log_p, pad))
    p, entropy = map(torch.cat, zip(*parts, strict=True))
    return p, entropy


def _p_values(logits: Any, token: Any, log_p: Any, pad: int) -> tuple[Any, Any]:
    """Return p-values and entropies, from logits [tokens, vocabulary] and the trainer's `log_p`."""
    import torch

    log_q, token = logits.log_softmax(-1), token[:, None]
    # If one token both pads and ends a completion, Unsloth takes a completion's last token for
    # padding.
    log_p = torch.where(token == pad, log_q.gather(-1, token), log_p[:, None])
    q, rarer = log_q.exp(), (log_q < log_p).scatter(-1, token, False)
    share = torch.rand(len(q)).to(q)  # a random part of the token's own probability counts
    return (q * rarer).sum(-1) + share * log_p[:, 0].exp(), -(q * log_q.clamp(min=-1e4)).sum(-1)


def fisher(p: "torch.Tensor") -> float:
    """Return a score that is standard normal for uniform p-values, and larger for smaller ones.

    The sum of the negative logarithms of uniform p-values follows a gamma distribution. The signed
    root of its deviance is almost exactly normal for ten or more values.

    Args:
        p: p-values, [tokens]; they are independent if the tokens are the policy's own samples.

    Source: Fisher, "Statistical Methods for Research Workers", 1932, section 21.1.

    >>> import torch
    >>> even = (torch.arange(1000) + 0.5) / 1000
    >>> [round(fisher(p), 1) for p in (even, even**1.3, 0.1 + 0.9 * even)]
    [-0.0, 8.7, -8.9]
    """
    mean = float(-p.double().clamp(1e-9, 1).log().mean())
    return math.copysign(math.sqrt(2 * len(p) * (mean - 1 - math.log(mean))), mean - 1)
