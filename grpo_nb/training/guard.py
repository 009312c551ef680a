"""Test whether the completions come from the policy that is being trained.

    trainer = GRPOTrainer(…)
    Guard(trainer, every=50)
    trainer.train()

GRPO's loss treats each completion as a sample of the current policy. If it is not, no error occurs.
The engine may omit the adapter, use the weights of an earlier step, cut off unlikely tokens, or
read the prompt with another template. The reward then changes for the wrong reason, or not at all.

The guard adds noise to the adapter and samples in the same way as training does. Only the policy
with this noise can have written the samples. Each token gets a p-value from the trainer's own
probabilities: the probability that the policy samples a token at least as rare. If the samples are
the policy's own, their p-values are independent and uniform for any model; Fisher's method tests
this. Weights, random states and metrics are then restored, so the guard does not change the results
of training (except through vLLM's own random state).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import TrainerCallback

from grpo_nb import ranks
from grpo_nb.models import sharded, use_torch_head
from grpo_nb.training import stock

if TYPE_CHECKING:
    import torch

COMPLETIONS = 32  # sampled for each test; at least two groups
TOKENS = 20  # sampled for each completion, at most
GO_ON = "leave out the guard (in a run: train.guard_steps = 0) to train anyway"
NOISE = 0.3  # added to LoRA's B at first [standard deviation]
MOST = 1.2  # limit of the noise, which doubles until it has an effect; a random model needs much
SCORE = 4.7  # limit of Fisher's score; chance exceeds it three times in a million
CHANGE = 1.0  # change of the log-probabilities at which noise has a clear effect [nats per token]
# Change above which the noise also amplifies what bf16 kernels round [nats per token], and the
# score that this may give: on an H200, samples of the policy itself scored up to 5.1 there; those
# of an engine that had lost weights scored 6.5.
LOUD, ROUNDED = 3.0, 6.0
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
    "tokenizer, template or padding. Try it without vLLM: use_vllm=False, fast_inference=False (in "
    "a run: model.fast_inference = 'off', or on a CPU policy.rollouts = 'model')"
)
CUT = (
    "the samples are not quite the policy's: unlikely tokens are never tried, though the loss "
    "takes the probabilities of all tokens. Its ratio is off by the share that is cut, and the "
    "entropy falls faster"
)
DROPOUT = (
    "each pass through the model drops other weights, so that the loss is computed for another "
    "policy than the one that sampled. The samples are tested without it; set disable_dropout=True"
)
CUT_FIX = "leave it unset, and set only the temperature"
NO_SCORE = (
    "the score of the samples is NaN, so it is unclear whether they are the policy's: see whether "
    "loss and grad_norm are finite (fp16 may overflow from the noise alone)"
)
UNMOVED = (
    "noise on the adapter does not change the log-probabilities that the loss is computed from, so "
    "nothing would be learnt: the adapter is not in use. Load the policy again"
)


class Evidence(NamedTuple):
    """Hold the result of one test of the samples.

    score: Fisher's score: standard normal for the policy's own tokens, higher if the tokens are
        less likely than the policy's own, lower if they are more likely.
    difference: Mean absolute difference between the engine's log-probabilities and the trainer's
        [nats per token]; NaN if the engine returns none.
    change: Mean absolute change that the noise causes in the trainer's log-probabilities
        [nats per token]; NaN without noise.
    entropy: Mean entropy of the policy with the noise [nats per token].
    tokens: Number of tokens in the test.
    gain: Mean change with its sign [nats per token]: positive for tokens that were sampled with
        the noise, negative for tokens that were sampled without the noise.
    """

    score: float
    difference: float
    change: float
    entropy: float
    tokens: int
    gain: float = math.nan


class Guard(TrainerCallback):
    """Stop a training whose samples do not come from the policy.

    The samples are tested before the first step (of a resumed training, too), every `every` steps,
    and at the end. A test takes about as long as sampling 32 completions of 20 tokens.

    Args:
        trainer: The trainer, before `train()`. A guard that it already has is replaced.
        every: Steps between two tests.

    Raises:
        ValueError: `every` is not a whole number, or is below 1.
        RuntimeError: In `trainer.train()`, a test found that the samples are not from the policy,
            or that the adapter is not in use. The message names causes and remedies.

    Attributes:
        looks: The result of each test so far.
    """

    def __init__(self, trainer: Any, *, every: int = 50) -> None:
        use_torch_head()
        if every < 1 or every != int(every):
            raise ValueError(f"every = {every}: give the number of steps between two tests")
        self.trainer, self.every = trainer, every
        self.noise, self.begun = NOISE, 0
        self.looks: list[Evidence] = []
        stock.add_callback(trainer, self)

    def __repr__(self) -> str:
        return f"Guard: tests every {self.every} steps that samples come from the policy"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember after which step training begins."""
        stock.call_once(self.trainer, self)
        self.begun = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Test the samples before the first step, and every `every` steps."""
        if state.global_step == self.begun or state.global_step % self.every == 0:
            self()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Test the samples once more, because a fault may have arisen since the last test."""
        if state.global_step > self.begun:
            self()

    def __call__(self) -> None:
        """Sample, and test the samples; all processes must call this together."""
        trainer = self.trainer
        cuts = stock.distorted(trainer.args)
        if cuts and trainer.state.global_step == self.begun:
            self._warn(f"{cuts}, and so {CUT}: {CUT_FIX}")
        dropout = stock.dropout_of(trainer.model)
        if dropout and trainer.state.global_step == self.begun:
            self._warn(f"dropout = {dropout:g}: {DROPOUT}")
        trainer.model.train(not dropout)  # as in a training step
        with _stand_in(trainer) as double:
            weights, is_lowered = changeable(trainer), False
            while True:
                evidence = self._look(double, weights)
                self.looks.append(evidence)
                fault = wrong(evidence, is_cut=bool(cuts))
                if ranks.anywhere(bool(fault) and is_doubtful(evidence)):
                    self.noise, is_lowered = self.noise / 2, True
                    continue
                self._stop_if(fault)
                weak = evidence.change < CHANGE or evidence.entropy < ENTROPY
                is_enough = is_lowered or 2 * self.noise > MOST or not ranks.anywhere(weak)
                if not weights or is_enough:
                    break
                self.noise *= 2
        trainer.model.train()
        self._stop_if(UNMOVED if evidence.change < UNFELT else "")
        if ranks.anywhere(math.isnan(evidence.score)):
            self._warn(NO_SCORE)
        elif not cuts and trainer.state.global_step == self.begun and ranks.is_main():
            score = f"score {abs(evidence.score):.1f} of {SCORE:g}"
            place = f"{self._place()}, and then every {self.every} steps"
            print(f"guard: the engine samples from this policy ({score}), tested {place}")

    def _warn(self, text: str) -> None:
        if ranks.is_main():
            print(f"warning: {self._place()}: {text}")

    def _place(self) -> str:
        step = self.trainer.state.global_step
        last = step and step == self.trainer.state.max_steps
        return f"after step {step}" if last else f"before step {step + 1}"

    def _stop_if(self, reason: str) -> None:
        """Raise an error on every process if any process gives a reason."""
        if reasons := [text for text in ranks.gather([reason]) if text]:
            raise RuntimeError(f"stopped {self._place()}: {reasons[0]}; {GO_ON}")

    def _look(self, double: Any, weights: Sequence["torch.Tensor"]) -> Evidence:
        """Sample with noise on the weights; compare the samples with the policy's probabilities."""
        rows = _rows(double)
        with noise_on(weights, self.noise, seed=double.state.global_step):
            batch = double._generate_and_score_completions(rows)
            if hasattr(double, "_last_loaded_step"):  # vLLM need not load these weights again
                self.trainer._last_loaded_step = double._last_loaded_step
            log_p = stock.log_probabilities(double, batch)
            p, entropy = p_values(double, batch, log_p, list(map(stock.chat_of, rows)))
        before = stock.log_probabilities(double, batch) if weights else log_p * math.nan
        return Evidence(
            score=fisher(p),
            difference=_difference(batch, log_p),
            change=float((log_p - before).abs().mean()),
            entropy=float(entropy.mean()),
            tokens=len(log_p),
            gain=float((log_p - before).mean()),
        )


def is_doubtful(evidence: Evidence) -> bool:
    """Return whether samples that seem too rare must be tested again with less noise.

    This is so if the only fault is a score that is a little too high, the noise has a large effect,
    and the samples were made with the noise, which proves that the adapter is in use.
    """
    is_narrow = SCORE < evidence.score < ROUNDED and not is_off(evidence)
    return is_narrow and evidence.change > LOUD and evidence.gain > 0


def is_off(evidence: Evidence) -> bool:
    """Return whether the engine's log-probabilities differ too much from the trainer's."""
    return bool(evidence.difference > np.nanmax([DIFFERENCE, MISSING * evidence.change]))


def wrong(evidence: Evidence, is_cut: bool = False) -> str:
    """Return why these samples cannot be the policy's, and what to do; "" if they may be.

    Args:
        evidence: The result of a test with noise on the adapter; a score of NaN proves nothing.
        is_cut: Whether a sampling argument such as top_p excludes unlikely tokens; then it is no
            fault that the samples are likelier than the policy's.
    """
    off = is_off(evidence)
    likelier = evidence.score < -SCORE and not is_cut
    if not (likelier or evidence.score > SCORE or off):
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
    return f"{reason}. {LIKELIER if likelier else RARER}"


@contextmanager
def _stand_in(trainer: Any) -> Iterator[Any]:
    """Yield a copy of the trainer that samples short completions and leaves no trace."""
    import torch

    limit = min(TOKENS, trainer.max_completion_length)
    with torch.no_grad(), stock.stand_in(trainer) as double:
        double.max_completion_length = limit
        if hasattr(double, "vllm_generation"):
            double.vllm_generation.max_completion_length = limit
        if getattr(double, "generation_config", None) is not None:
            double.generation_config.max_new_tokens = limit
        yield double


def _rows(trainer: Any) -> list[stock.Row]:
    """Return rows with short and long prompts, each repeated for its group."""
    group = trainer.num_generations
    count = max(2, COMPLETIONS // group)
    rows = stock.rows_of(trainer, 8 * count)
    lengths = stock.lengths_of(trainer, rows)
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    places = [number * (len(rows) - 1) // (count - 1) for number in range(count)]
    return [rows[order[place]] for place in places for _ in range(group)]


def changeable(trainer: Any) -> list["torch.Tensor"]:
    """Return the weights that get noise: LoRA's B, or norms and biases in full fine-tuning.

    The list is empty, and samples are tested without noise, if the weights are sharded or vLLM adds
    the adapter to its own weights (with TRL always, with Unsloth on request). In the second case,
    rounding would leave some noise in vLLM's weights, and a copy of them would take gigabytes.
    """
    by_lora = stock.engine_of_unsloth(trainer) and not stock.folds_adapter(trainer)
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


def _difference(batch: Mapping[str, Any], log_p: "torch.Tensor") -> float:
    """Return how far the engine's log-probabilities are from the trainer's [nats per token].

    This is the mean absolute difference over the tokens that the policy wrote in a batch; NaN if
    the engine returns no log-probabilities.

    Args:
        batch: The batch.
        log_p: The trainer's log-probabilities, [tokens].
    """
    if batch.get("sampling_per_token_logps") is None:
        return math.nan
    is_token = batch["completion_mask"].bool()
    by_policy = batch.get("tool_mask", batch["completion_mask"])[is_token].bool()
    difference = batch["sampling_per_token_logps"][is_token] - log_p
    return float(difference[by_policy].abs().nanmean())


def p_values(
    trainer: Any, batch: Mapping[str, Any], log_p: "torch.Tensor", chats: Sequence[Any]
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Return p-values (the probability of a token at least as rare) and entropies, [tokens].

    Args:
        trainer: The trainer; its model runs on one sample at a time, without padding.
        batch: The padded batch.
        log_p: The trainer's log-probabilities, [tokens].
        chats: The prompt of each completion, [completions]; only its images are read.
    """
    import torch

    parts, rest, pad = [], log_p, stock.tokenizer_of(trainer).pad_token_id
    for number, chat in enumerate(chats):
        prompt, completion = (
            batch[f"{part}_ids"][number][batch[f"{part}_mask"][number].bool()]
            for part in ("prompt", "completion")
        )
        images = stock.image_tensors(trainer, [chat], len(completion))
        images.pop("num_images", None)
        row = torch.cat([prompt, completion])[None]
        with trainer.compute_loss_context_manager():
            logits = trainer.model(input_ids=row, **images).logits[0, len(prompt) - 1 : -1]
        part_log_p, rest = rest[: len(completion)], rest[len(completion) :]
        logits = logits.float() / trainer.temperature
        parts.append(_p_values(logits, completion, part_log_p, pad))
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
