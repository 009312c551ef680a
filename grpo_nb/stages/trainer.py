"""Extend TRL's or Unsloth's trainer, so that a run is safe and easy to follow.

    with adapter_in_fp32(model):
        trainer = GRPOTrainer(model=model, …, args=GRPOConfig(**grpo_arguments), …)
    stages.attach(trainer, stage, rewards, validation_rows)
    preflight(trainer).refuse()
    trainer.train()

`attach` gives this trainer a class whose first base is `RunTrainer`, and whose second base is TRL's
class, or the class by which Unsloth replaces it on a GPU. The parts of one step, in order, with the
methods of `RunTrainer`, of `StepCallback` and, for 4, of `monitor.Monitor`:

 0. Every few steps, and at the end, `guard.Guard` tests whether the samples come from the policy.
 1. TRL samples a group for each prompt: `_generate`, `_generate_single_turn`. If the task has an
    environment, TRL runs the tool calls and masks their results from the loss (its `tool_mask`).
 2. The rewards score the completions: `_calculate_rewards`. TRL computes the advantages.
 3. The forward and backward pass of each micro-batch: `_get_per_token_logps_and_entropies`.
 4. An update that is not finite, or has no scores to learn from, is skipped:
    `on_pre_optimizer_step`.
 5. The optimizer updates the weights. A checkpoint or a stop may be due.
 6. The step's metrics are logged: `log`. They go to train/metrics.jsonl, to the alerts and to the
    watchers: `monitor.Monitor.on_log`; every `train.eval_steps` steps the policy is validated, and
    the best adapter is kept: `on_log`.
 7. If a checkpoint is due, transformers writes it, and removes old ones.

A token's loss is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), plus beta times the KL to the
policy at the start. A is the advantage of the completion; r is the token's probability now, divided
by its probability when it was sampled. The suffixes of names give shapes: P counts the prompts, G
the completions of a group, N the completions of a step, and F the rewards.

For each method that overrides TRL's, the docstring gives the reason, and what Unsloth's GPU trainer
does with the method.
"""

import math
import shutil
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from grpo_nb import environments, models, ranks
from grpo_nb.data.preparation import as_dataset
from grpo_nb.data.rows import pack
from grpo_nb.files import atomic_path, read_json, write_json
from grpo_nb.models import Policy, adapter_in_fp32, dense, sharded, use_torch_head
from grpo_nb.models.engine import without
from grpo_nb.models.hub import image_tokens
from grpo_nb.models.template import fold_system, with_tools
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.calls import kept
from grpo_nb.rewards.prompts import Message, digest, loggable, with_images
from grpo_nb.rewards.sets import Adaptive
from grpo_nb.stages import checkpoints
from grpo_nb.stages.arguments import grpo_arguments
from grpo_nb.stages.checkpoints import save_trained
from grpo_nb.stages.validation import Validation, hold_out, prompts_to_hold_out
from grpo_nb.training import fast_cpu, health, stock
from grpo_nb.training.difficulty import difficulty
from grpo_nb.training.interruptions import step_of
from grpo_nb.training.monitor import Monitor
from grpo_nb.training.placebo import placebo, true_reward

if TYPE_CHECKING:
    import trl
    from datasets import Dataset

    from grpo_nb.runs import Stage
    from grpo_nb.runs.config import RunConfig

Row = Mapping[str, Any]
ADAPTIVE = "adaptive rewards"  # the entry of trainer_state.json


class RunTrainer:
    """Add to a GRPOTrainer what a run needs.

    `attach` puts this class before the trainer's own class in the order of inheritance.

    Attributes:
        policy: The model with its tokenizer, as `models.policy_of` returns it.
        rewards: The run's rewards.
        stage: Stage 03, which has been started.
        validation_rows: The rows on which the policy is validated.
        folder: The run's folder train/.
        plan: A sentence that says whether `train` begins anew, or after which step it resumes.
    """

    def join(
        self, stage: "Stage", rewards: RewardSet, validation_rows: list[Row], policy: Policy
    ) -> None:
        """Take over the run's settings, rewards and checkpoints; see `attach`."""
        config = stage.config
        self.policy, self.rewards, self.stage = policy, rewards, stage
        self.validation_rows, self.folder = validation_rows, stage.run / "train"
        self.settings = checkpoints.fingerprint(stage, rewards, self.args)
        self.plan, self.goes_on = checkpoints.plan(self.folder, self.settings, self.args.max_steps)
        policy.model.max_seq_length = config.model.max_seq_length  # as Unsloth's models have it
        use_torch_head()  # for your own model too
        self.remove_callback(PrinterCallback)
        if policy.vllm and self.use_vllm:  # else Unsloth leaves a folder in the working directory
            self.vllm_generation._unsloth_load_lora = policy.live_adapter
        if self.use_vllm and (bias := without(image_tokens(policy.model.config))):
            self.vllm_generation.generation_kwargs["logit_bias"] = bias
        self.share_prompts = not fast_cpu.sharing_lacks(policy, config.policy.share_prompts)
        self.samples_densely = not fast_cpu.sampling_lacks(self)
        self._dense: dense.DenseModel | None = None
        self._gathered: dict[str, Any] = {}
        self.row_sampler: Any = None
        if ranks.count() > 1:
            # When one process ends, the launcher sends SIGTERM to the others, which must still
            # report what is kept. During the steps `train` handles the signal.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.steps = StepCallback(self)
        self.add_callback(self.steps)
        self.validation = Validation(policy, validation_rows, rewards, config)
        self.monitor_options = {
            "folder": self.folder,
            "correct": rewards.correct_func.__name__,
            "ignore": health.learning_alerts() if config.train.placebo != "none" else set(),
        }
        Monitor(self, show=False)  # a notebook's own replaces it

    @property
    def paths(self) -> str:
        """Return how the processes share a step, and how the step is computed."""
        completions, group = self.args.generation_batch_size, self.num_generations
        return (
            f"a step: {completions // group} prompts x {group} = {completions} completions, on "
            f"{ranks.count()} process(es); {fast_cpu.paths(self)}"
        )

    def train(self) -> TrainOutput:
        """Train the remaining steps up to `max_steps`, and save the adapter in train/adapter/.

        transformers' `train` takes a checkpoint to resume from. This method finds the newest whole
        checkpoint; the monitor writes one if training is stopped or fails. Unsloth's `train` sets
        the model's modes before and after training.

        Raises:
            KeyboardInterrupt: An interrupt or a signal ended training; a checkpoint and the adapter
                are kept.
            RuntimeError, MemoryError, …: An error ended training; a checkpoint is kept.
        """
        checkpoint = ranks.from_main(self._begin)
        # Set before anything is restored, so that a failure while restoring saves nothing.
        self.state.global_step = begun = step_of(checkpoint)
        self.monitor.say(f"getting ready for step {begun + 1}", is_short=True)
        try:
            with self.monitor:
                if begun >= self.args.max_steps:
                    output = self._return_to(checkpoint)
                else:
                    train = self.unsloths_train or super().train
                    output = train(resume_from_checkpoint=checkpoint)
                if self.monitor.ended:
                    raise RuntimeError(self.monitor.ended)
                self.gather_weights()
                ranks.from_main(self._finish)
        finally:  # in a notebook, this trainer remains, and may be used again
            self._dense = self.optimizer = self.lr_scheduler = self._buffered_inputs = None
            self._step = 0
            self._metrics["train"].clear()  # else an unfinished step would count in the means
        return output

    def _return_to(self, checkpoint: str) -> TrainOutput:
        """Load the last step's weights, because every step is already trained."""
        models.load_weights(self.policy, Path(checkpoint))
        self.state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        self.monitor.begin(self.state.global_step, self.args.max_steps)
        return TrainOutput(self.state.global_step, math.nan, {})

    def _begin(self) -> str | None:
        """Make train/ ready, and return the checkpoint to go on from; None to begin at step 1."""
        has_trained = getattr(self.policy.model, "updated_in", None) == self.folder
        has_trained &= not (self.goes_on and checkpoints.trained_steps(self.folder))
        if getattr(self.policy.model, "is_closed", False) or has_trained:
            raise ValueError(
                "this policy was closed, or has been trained and the training starts over: load "
                'the policy and build the trainer again (run notebook 3 from "The policy" on)'
            )
        goes_on, self.goes_on = self.goes_on, True  # from now on
        return checkpoints.begin(self.folder, self.settings, goes_on)

    def _finish(self) -> None:
        """Save the best adapter, or the last one, and record the checks of training."""
        best = self.folder / "best"
        with atomic_path(self.folder / "adapter") as temporary:
            if best.is_dir():
                shutil.copytree(best, temporary)
            else:
                self.save_adapter(temporary)
        self.stage.record_checks(health.checks(self.monitor.watch, self.monitor.alerts))

    @property
    def monitor(self) -> Monitor:
        """Return the monitor; a notebook may have replaced the one that this trainer began with."""
        return next(c for c in self.callback_handler.callbacks if isinstance(c, Monitor))

    def validate(self) -> dict[str, float]:
        """Validate on the first process, or on all together if the weights are sharded."""
        if not sharded():
            return ranks.from_main(self.validation)
        with self.whole_weights():
            figures = self.validation()
        return ranks.from_main(lambda: figures)

    # The methods below override methods of TRL and transformers.

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure how long sampling takes.

        Unsloth's trainer calls this method as TRL's does.
        """
        with self._timing("seconds/generation"):
            return super()._generate(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample with `models.dense` if possible, else with the method of TRL or Unsloth.

        Under FSDP2, first gather the root's weights: peft's `generate` bypasses the hook that
        would gather them.
        """
        if self.samples_densely:
            return self._sample_densely(prompt_ids), None
        with unsharded_root(self.model_wrapped):
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _sample_densely(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Return the token ids of the completions, as TRL's method for text does."""
        self._dense = self._dense or dense.DenseModel(self.accelerator.unwrap_model(self.model))
        return dense.sample(
            self._dense.renew(),
            prompt_ids,
            max_completion_length=self.max_completion_length,
            stops=self.eos_token_ids,
            pad=self._tokenizer.pad_token_id,
            temperature=self.temperature,
        )

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any, *args: Any
    ) -> Any:
        """Score the completions; measure the time, and how many completions of a group differ.

        Random states, torch's grad mode and the working directory are restored after the rewards.
        TRL returns the scores of all processes. Unsloth's trainer has the same method, and calls it
        as TRL's does.
        """
        with self._timing("seconds/reward"), kept():
            rewards_N_F = super()._calculate_rewards(
                inputs, prompts, completions, completion_ids, *args
            )
        if "answer" in inputs[0]:
            self._log_completion_extra("reference", [str(row["answer"]) for row in inputs])
        self._record("groups/distinct", stock.distinct(completion_ids, self.num_generations))
        return rewards_N_F

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._record(name, time.perf_counter() - started)

    def _record(self, name: str, value: float) -> None:
        """Add a value to TRL's own metrics, so that trackers get it too."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Compute each prompt once for its group where possible (not with Unsloth on a GPU)."""
        plain = super()._get_per_token_logps_and_entropies
        if self.share_prompts:
            return fast_cpu.log_probabilities(self, plain, *args, **kwargs)
        return plain(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a step's time, speed and memory to its log, with Unsloth's trainer too."""
        if "loss" in logs:
            completions = self.args.generation_batch_size
            logs.update(stock.of_a_step(self._metrics["train"], completions))
            stock.new_peak()
            logged = self._logs["completion"]
            for place, completion in enumerate(logged):
                logged[place] = loggable(completion)
            if images := self._logs["images"]:
                self._logs["extra"]["images"] = [
                    " ".join(map(digest, each or ())) for each in images
                ]
        super().log(logs, start_time)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the sampler of the rows, which a resumed run has to advance (`StepCallback`)."""
        self.row_sampler = super()._get_train_sampler(*args, **kwargs)
        return self.row_sampler

    def save_adapter(self, folder: Path) -> None:
        """Save the adapter (or the whole model, if all of it is trained) and the tokenizer."""
        save_trained(self.accelerator.unwrap_model(self.model), folder, **self._gathered)
        self.policy.tokenizer.save_pretrained(folder)

    def gather_weights(self) -> None:
        """Gather sharded weights on all processes before the first one saves them."""
        if sharded():
            self._gathered = {"state_dict": self.accelerator.get_state_dict(self.model_wrapped)}

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Let a model with sharded weights generate on all processes."""
        from trl.models.utils import unwrap_model_for_generation

        whole = unwrap_model_for_generation(self.model_wrapped, self.accelerator)  # ZeRO-3
        with whole, unsharded_root(self.model_wrapped):
            yield


class StepCallback(TrainerCallback):
    """Validate, keep the best adapter, and keep the weights of adaptive rewards in checkpoints.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        rewards = trainer.rewards.reward_funcs
        self.adaptive = [reward for reward in rewards if isinstance(reward, Adaptive)]
        for reward in self.adaptive:
            reward.gather_scores = ranks.gather  # each process scores a share of the step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate the policy at the start, or restore rewards and row order from a checkpoint."""
        if not state.global_step:
            if self.trainer.validation_rows:
                self._validate(state)
            return
        for reward in self.adaptive:
            reward.value, reward.step = state.stateful_callbacks[ADAPTIVE][reward.__name__]
        # Each epoch draws a new order of the rows. Repeat the draws of all completed epochs.
        for _ in range(math.floor(state.epoch + 1e-6)):
            next(iter(self.trainer.row_sampler))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step's progress; validate if that is due."""
        trainer, logs, step = self.trainer, kwargs["logs"], state.global_step
        if "loss" not in logs:  # of a validation, or of the end
            return
        reward = logs.get("reward")
        note = "" if reward is None else f"reward {reward:.2f}"
        trainer.stage.progress(step, state.max_steps, note)
        every = trainer.stage.config.train.eval_steps
        if trainer.validation_rows and (step % every == 0 or step == state.max_steps):
            self._keep_best(self._validate(state), step)

    def _validate(self, state: TrainerState) -> dict[str, float]:
        """Return the figures of a validation, and pass them to the monitor and the trackers."""
        trainer, step = self.trainer, state.global_step
        trainer.monitor.say(f"validating {f'after step {step}' if step else 'before step 1'}")
        figures = trainer.validate()
        logs = {name.replace("eval/", "eval_", 1): value for name, value in figures.items()}
        trainer.callback_handler.on_log(trainer.args, state, trainer.control, logs)
        return figures

    def _keep_best(self, figures: Mapping[str, float], step: int) -> None:
        """Keep the adapter if its validation is the best so far, or as good as the best."""
        score, best = figures["eval/accuracy"], self.trainer.folder / "best"
        if not math.isfinite(score + figures.get("eval/reward", 0)):
            print(f"step {step}: this validation has no score, and does not count")
            return
        if (best / "eval.json").is_file() and read_json(best / "eval.json")["score"] > score:
            return
        self.trainer.gather_weights()
        if ranks.is_main():
            with atomic_path(best) as temporary:
                self.trainer.save_adapter(temporary)
                write_json(temporary / "eval.json", {"step": step, "score": score, **figures})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the policy is no longer the one that was loaded."""
        self.trainer.policy.model.updated_in = self.trainer.folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the weights of adaptive rewards in the state, which the next checkpoint keeps."""
        rewards = self.adaptive
        state.stateful_callbacks[ADAPTIVE] = {r.__name__: (r.value, r.step) for r in rewards}


def attach(
    trainer: "trl.GRPOTrainer",
    stage: "Stage",
    rewards: RewardSet,
    validation_rows: Sequence[Row] = (),
    policy: Policy | None = None,
) -> None:
    """Turn a trainer into a run's trainer, which resumes, validates, and measures each step.

    Args:
        trainer: A new GRPOTrainer, TRL's or Unsloth's, whose `args` are those of the run.
        stage: Stage 03, which has been started.
        rewards: The run's rewards, tested in notebook 2.
        validation_rows: Rows to validate on, which are not trained on.
        policy: The result of `models.policy_of` or `models.load_policy`; by default, `policy_of` is
            called with the trainer's model.

    Raises:
        ValueError: The trainer has other rewards than the run.
        RuntimeError: Unsloth replaced TRL's trainer after this one's class was imported.
    """
    import trl

    if not isinstance(trainer, trl.GRPOTrainer):
        raise RuntimeError(
            "GRPOTrainer was imported before Unsloth, so it is TRL's class and not Unsloth's: "
            "restart the kernel, and import unsloth before trl"
        )
    policy = policy or models.policy_of(trainer.model, trainer.processing_class)
    if [id(true_reward(f)) for f in trainer.reward_funcs] != [*map(id, rewards.reward_funcs)]:
        raise ValueError(
            f"the trainer has the rewards {', '.join(trainer.reward_func_names)}, and the run "
            f"{', '.join(rewards.names)}: write yours in notebook 2, below %%rewards, which tests "
            "them; or train without stages.attach"
        )
    if isinstance(trainer, RunTrainer):  # the cell is run again
        for callback in (trainer.steps, trainer.monitor):
            trainer.remove_callback(callback)
    else:
        # On a GPU, Unsloth gives the instance a `train` that sets the model's modes around its own.
        trainer.unsloths_train = vars(trainer).pop("train", None)
        trainer.__class__ = type("RunTrainer", (RunTrainer, type(trainer)), {})
    if stage.config.train.placebo != "none":
        group, seed = trainer.num_generations, trainer.args.seed
        trainer.reward_funcs = placebo(rewards.reward_funcs, group, seed=seed)
    trainer.join(stage, rewards, list(validation_rows), policy)
    if stage.config.train.difficulty:
        difficulty(trainer, rewards.correct_func.__name__)


def build_trainer(
    policy: Policy,
    rewards: RewardSet,
    rows: Sequence[Row],
    stage: "Stage",
    args: "trl.GRPOConfig | None" = None,
) -> "RunTrainer":
    """Build a run's trainer in one call, as the cells of notebook 3 do one by one.

    Args:
        policy: The result of `models.load_policy`.
        rewards: The run's rewards.
        rows: The training rows; `train.eval_prompts` of them become the validation split.
        stage: Stage 03, which has been started.
        args: The run's GRPOConfig; by default as its settings say.
    """
    import trl

    dataset, validation_rows = datasets(rows, policy.tokenizer, stage.config)
    with adapter_in_fp32(policy.model):
        trainer = trl.GRPOTrainer(
            model=policy.model,
            processing_class=policy.processing_class,
            reward_funcs=list(rewards.reward_funcs),
            args=args or trl.GRPOConfig(**grpo_arguments(stage, policy, rewards)),
            train_dataset=dataset,
            environment_factory=environment_factory(stage.config, policy.tokenizer, rows),
        )
    attach(trainer, stage, rewards, validation_rows, policy)
    return trainer


def environment_factory(config: "RunConfig", tokenizer: Any, rows: Sequence[Row]) -> type | None:
    """Check the rows, and return the class that TRL instantiates for each rollout.

    Returns:
        The class; None without an environment.
    """
    environment = environments.of(config)
    if environment is None:
        return None
    warnings.filterwarnings("ignore", "You are using 'environment_factory'")  # experimental
    with_tools(tokenizer)
    environments.check_rows(environment, rows)
    return environment.factory


def datasets(rows: Sequence[Row], tokenizer: Any, config: "RunConfig") -> "tuple[Dataset, list]":
    """Return the rows to train on as TRL takes them, and the rows to validate on.

    In TRL's prompts, placeholders stand for the images, and the system prompt is part of the user's
    turn if the chat template has no system role.
    """
    train_rows, validation_rows = hold_out(rows, prompts_to_hold_out(config.train))
    packed = [pack(row) for row in train_rows]
    prompts = [fold_system(tokenizer, row["prompt"]) for row in packed]
    placed = [
        row | {"prompt": _with_places(prompt, row.get("images"))}
        for row, prompt in zip(packed, prompts, strict=True)
    ]
    return as_dataset(placed), validation_rows


def _with_places(prompt: list[Message], images: Sequence[bytes] | None) -> list[Message]:
    """Return a prompt with a place for each image before the text of its last turn."""
    if not images:
        return prompt
    *before, last = with_images(prompt, images)
    parts = [{key: part[key] for key in part if key != "image"} for part in last["content"]]
    return [*before, last | {"content": parts}]


@contextmanager
def unsharded_root(model: Any) -> Iterator[None]:
    """Gather FSDP2's weights outside the layers (embeddings, head) while the block runs.

    peft's `generate` calls the wrapped model directly, and bypasses the hook that would gather
    these weights.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first layer to run would become the root
    model.unshard()
    try:
        yield
    finally:
        model.reshard()
