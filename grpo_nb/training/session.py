"""A training from its first step to its adapter: stages in turn, resumed where it was cut off."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import models
from grpo_nb.models import Policy
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Stage, atomic_path, write_json
from grpo_nb.training import checkpoints, health, priming, ranks
from grpo_nb.training.arguments import alone, effective, write_arguments
from grpo_nb.training.control import Controls, Watcher, stop_on_signals
from grpo_nb.training.measured import is_out_of_memory
from grpo_nb.training.metrics import keep_until, read_lines
from grpo_nb.training.monitor import Monitor, as_callback, restore_random_state
from grpo_nb.training.plan import TrainStage, expected, fingerprint, only_longer, plan
from grpo_nb.training.preflight import preflight, smaller
from grpo_nb.training.progress import Progress
from grpo_nb.training.trainer import build_trainer, trainer_arguments
from grpo_nb.training.validation import Validation, set_aside

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Session:
    """The training of a run: what it will do, and doing it.

    Args:
        stage: Stage 03, started.
        policy: Fresh from `models.load_policy`.
        rewards: The run's set, tested in notebook 2.
        rows: To train on; some of them are set aside to validate on.

    Raises:
        ValueError: A training with other settings was cut off in this run, and
            `train.resume` is "auto"; or `train.stages` is wrong.
    """

    def __init__(
        self, stage: Stage, policy: Policy, rewards: RewardSet, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        self.stage, self.policy, self.rewards = stage, policy, rewards
        self.folder = stage.run / "train"
        config = stage.config
        aside = config.train.eval_prompts if config.train.eval_steps else 0
        train_rows, self.validation_rows = set_aside(rows, aside)
        self.stages = plan(config, rewards, train_rows)
        self.total_steps = self.stages[-1].last_step
        self.controls = Controls()
        self._built: dict[int, tuple[GRPOTrainer, pd.DataFrame]] = {}
        self._later: list[Callable[[], Any]] = []
        self._fresh = False
        self.note, self._fresh = ranks.from_main(self._look)

    def _look(self) -> tuple[str, bool]:
        """What `run` will do, in words, and whether it begins or goes on with what is there."""
        known = fingerprint(self.stage, self.rewards, self.stages)
        path, resume = self.folder / "state.json", self.stage.config.train.resume
        state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        steps = checkpoints.trained_steps(self.folder)
        if state and steps and resume != "never" and not (state["finished"] and resume == "auto"):
            changed = [name for name in known if state["settings"].get(name) != known[name]]
            if changed and resume == "auto":
                raise ValueError(
                    f"{steps} steps of this run were trained with other settings "
                    f"({', '.join(changed)}): set resume = 'always' to go on from them, or "
                    "'never' to begin anew"
                )
            if state["finished"] and all(map(self._done, self.stages)):
                raise ValueError(
                    f"all {steps} steps of this run were trained, so there is none to go on with: "
                    "raise train.max_steps, or set resume = 'never' to begin anew"
                )
            return f"goes on after step {steps} of {self.total_steps}", False
        note = f"begins at step 1 of {self.total_steps}"
        if not (aside := checkpoints.aside(self.folder)):
            return note, True
        note += f"; what was trained here before ({steps} steps) is kept as {aside.name}/"
        if state and steps < self.total_steps and only_longer(state["settings"], known):
            note += f". To train it on to {self.total_steps} steps instead: resume = 'always'"
        return note, True

    def _begin(self) -> None:
        """Make room for a training that does not go on with what is there."""
        if self._fresh:
            checkpoints.clear(self.folder)
        known = fingerprint(self.stage, self.rewards, self.stages)
        write_json(self.folder / "state.json", {"finished": False, "settings": known})
        for write in self._later:
            write()

    def _write(self, write: Callable[[], Any]) -> None:
        """Now, unless it would change what another training left; and once this one begins."""
        self._later.append(write)
        if not (self._fresh and checkpoints.aside(self.folder)):
            write()

    def trainer(self, one: TrainStage | None = None) -> "GRPOTrainer":
        """That of a stage (the first that is not done), from its arguments to its last step."""
        one = one or self._next()
        if one.number not in self._built:
            self._built.clear()  # one optimizer at a time
            folder = self.stage.run / one.folder
            passed = trainer_arguments(one.config, folder, one.rewards, self.policy)
            untouched = alone(passed)
            trainer = build_trainer(self.policy, one.rewards, one.rows, one.config, folder)
            table = effective(trainer.args, untouched, passed, self.stage)
            self._built[one.number] = trainer, table
        return self._built[one.number][0]

    def overview(self) -> pd.DataFrame:
        """A line a stage: its steps, rows, rewards with weights, and whether it is done."""
        return pd.DataFrame([one.line() | {"done": self._done(one)} for one in self.stages])

    def arguments(self) -> pd.DataFrame:
        """Every argument of TRL's as the next stage will use it; see `arguments.effective`."""
        self.trainer(one := self._next())
        table = self._built[one.number][1]
        ranks.from_main(lambda: self._write(lambda: write_arguments(self.stage.run, table)))
        return table

    def preflight(self) -> pd.DataFrame:
        """The checks of every stage that is not done; see `preflight.preflight`."""
        tables = []
        for one in self.stages:
            if not self._done(one):
                stage = Stage(self.stage.run, self.stage.stage, one.config, self.stage.set_here)
                checks = preflight(self.trainer(one), self.policy, one.rows, stage)
                tables.append(checks.assign(stage=one.name))
        table = pd.concat(tables) if tables else pd.DataFrame({"result": [], "stage": []})
        found = {"checks": table.to_dict("records")}
        path = self.folder / "preflight.json"
        ranks.from_main(lambda: self._write(lambda: write_json(path, found)))
        return table.drop(columns="stage") if len(self.stages) == 1 else table

    def health(self) -> str:
        """Every alert of the training, or that there was none."""
        lines = read_lines(self.folder / "health.jsonl")
        return health.summary(health.Alert(**line) for line in lines)

    def run(self, *watchers: Watcher, controls: Controls | None = None) -> list[dict[str, Any]]:
        """Train what is left; the adapter is in train/adapter/ then.

        Args:
            watchers: Called after each step, such as the dashboard.
            controls: By which to stop, save or validate; the dashboard has some.

        Returns:
            The lines of train/metrics.jsonl that hold a step.

        Raises:
            KeyboardInterrupt: Stopped by the interrupt button or a signal; a checkpoint is kept.
            RuntimeError, MemoryError, …: What ended the training; a checkpoint is kept.
        """
        self.controls = controls or self.controls
        self.controls.stop.clear()
        ranks.from_main(self._begin)
        self._fresh = False  # run again, it goes on
        before = priming.prime(self.policy, self.stage)
        with stop_on_signals(self.controls) as signals:
            for one in self.stages:
                if not self._done(one) and not self._stopped():
                    self._train(one, before, list(watchers))
                before = self.stage.run / one.folder / "adapter"
        if ranks.anywhere(bool(signals)):
            raise KeyboardInterrupt(
                f"stopped after step {checkpoints.trained_steps(self.folder)}; {AGAIN}"
            )
        return ranks.from_main(self._finish)

    def _train(self, one: TrainStage, before: Path | None, watchers: list[Watcher]) -> None:
        started = time.monotonic()
        if before:
            models.load_weights(self.policy, before)
        checkpoint = ranks.from_main(lambda: self._return_to_checkpoint(one))
        trainer = self.trainer(one)
        watch = health.Watch(expected(one, self.stage), self.stage.config.health)
        for line in read_lines(self.folder / "metrics.jsonl"):
            if line["stage"] == one.name:
                watch.feed(line)
        monitor = as_callback(Monitor)(
            trainer,
            one,
            self.folder,
            watch=watch,
            total_steps=self.total_steps,
            controls=self.controls,
            watchers=[Progress(self.stage), *watchers],
            validation=self._validation(),
        )
        trainer.add_callback(monitor)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Exception as error:
            self._keep(trainer, monitor)
            self._explain(error, trainer)
            raise
        finally:
            self._built.clear()  # a run after this one begins with a trainer of its own
        if monitor.failure:
            raise RuntimeError(f"{monitor.failure}. {AGAIN}")
        if not self._stopped() or trainer.state.global_step == one.config.train.max_steps:
            trainer.gather_weights()
            seconds = time.monotonic() - started
            ranks.from_main(lambda: self._complete(one, trainer, seconds))

    def _return_to_checkpoint(self, one: TrainStage) -> Path | None:
        """The newest whole one; what the run holds of later steps goes."""
        folder = self.stage.run / one.folder
        checkpoint = checkpoints.newest(folder)
        keep_until(self.folder, folder, one.first_step, checkpoints.step_of(checkpoint))
        (folder / "completions").mkdir(parents=True, exist_ok=True)  # TRL makes it once, as built
        return checkpoint

    def _complete(self, one: TrainStage, trainer: "GRPOTrainer", seconds: float) -> None:
        """The stage's adapter, and its manifest."""
        folder = self.stage.run / one.folder
        with atomic_path(folder / "adapter") as temporary:
            trainer.save_adapter(temporary)
        about = {
            "steps": trainer.state.global_step,
            "seconds": round(seconds, 1),
            "rows": len(one.rows),
            "rewards": dict(zip(one.rewards.names, one.rewards.reward_weights, strict=True)),
            "settings": {**one.config.train.model_dump(), "trl": one.config.trl},
        }
        write_json(folder / "stage.json", about)

    def _validation(self) -> Validation | None:
        if not self.validation_rows:
            return None
        return Validation(self.policy, self.validation_rows, self.rewards, self.stage.config)

    def _keep(self, trainer: "GRPOTrainer", monitor: Monitor) -> None:
        """A checkpoint of the last whole step, after an error in the one that followed.

        Not with several processes: the others are in another place, or gone.
        """
        if (
            ranks.count() > 1
            or trainer.state.global_step in (0, monitor.saved)
            or monitor.random_state is None
        ):
            return
        restore_random_state(monitor.random_state)
        trainer.model.zero_grad()
        trainer._save_checkpoint(trainer.model, None)

    def _explain(self, error: Exception, trainer: "GRPOTrainer") -> None:
        kept = checkpoints.trained_steps(self.folder)
        error.add_note(f"The training is kept up to step {kept}; {AGAIN}")
        if is_out_of_memory(error):
            passes = smaller(trainer, trainer.args.per_device_train_batch_size // 2)
            error.add_note(f"Memory ran out: {passes}, with resume = 'always'")

    def _next(self) -> TrainStage:
        return next((one for one in self.stages if not self._done(one)), self.stages[-1])

    def _done(self, one: TrainStage) -> bool:
        """Whether it has ended; one whose max_steps were raised since has not."""
        if self._fresh:  # what is there is another training's
            return False
        path = self.stage.run / one.folder / "stage.json"
        about = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return bool(about) and about["settings"]["max_steps"] >= one.config.train.max_steps

    def _stopped(self) -> bool:
        if ranks.anywhere(self.controls.stop.is_set()):
            self.controls.stop.set()
        return self.controls.stop.is_set()

    def _finish(self) -> list[dict[str, Any]]:
        """Hand on the best adapter, or the last, and mark the training as finished."""
        stopped = self.controls.stop.is_set()
        last, best = self._newest_adapter(stopped), self.folder / "best"
        chosen = best if self.stage.config.train.keep == "best" and best.is_dir() else last
        with atomic_path(self.folder / "adapter") as temporary:
            shutil.copytree(chosen, temporary)
        state = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        write_json(self.folder / "state.json", state | {"finished": not stopped})
        return [line for line in read_lines(self.folder / "metrics.jsonl") if "reward" in line]

    def _newest_adapter(self, stopped: bool) -> Path:
        done = [self.stage.run / one.folder for one in self.stages if self._done(one)]
        cut = checkpoints.newest(self.stage.run / self._next().folder) if stopped else None
        return cut or done[-1] / "adapter"


AGAIN = "run this again, and it goes on from there"
