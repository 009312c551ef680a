"""How many functions of ours does a value pass? Figures in docs/figures.md.

    python benchmarks/hops.py

A marked value is followed by a profiler: every function of grpo_nb that gets it as an argument, by
itself or inside a container, is one hop. Followed are a setting from `--set` to `trl.GRPOConfig`, a
completion from TRL's trainer to the dashboard, and a score from a reward to the verdict.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

os.environ["GRPO_NB_RUNS"] = tempfile.mkdtemp()

RATE = 1.234567e-4
SCORE = 0.7654321
TEXT = "a marked completion"
DEPTH = 4


def holds(value: Any, mark: Any, depth: int = DEPTH) -> bool:
    """Return whether a value is the mark, or contains it."""
    if type(value) is type(mark) or isinstance(value, (float, str)):
        return mark == value or (isinstance(value, str) and str(mark) in value)
    if not depth:
        return False
    if isinstance(value, Mapping):
        return any(holds(each, mark, depth - 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds(each, mark, depth - 1) for each in value[:64])
    if hasattr(value, "model_fields_set"):  # settings
        return any(holds(each, mark, depth - 1) for _, each in value)
    if hasattr(value, "tolist") and getattr(value, "size", 0):
        return bool((value == mark).any()) if isinstance(mark, float) else False
    return False


@contextmanager
def followed(mark: Any, names: list[str]) -> Any:
    """Append to `names` each function of ours that gets the mark, once."""

    def look(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        name = f"{module}.{frame.f_code.co_qualname}"
        if event != "call" or not module.startswith("grpo_nb") or name in names:
            return
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        values = [frame.f_locals.get(argument) for argument in arguments]
        if any(holds(value, mark) for value in values):
            names.append(name)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def of_a_setting(names: list[str]) -> None:
    from grpo_nb import models, rewards, stages
    from grpo_nb.pipeline.notebooks import assigned
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import resolve

    policy, preset = models.Policy(None, None, False), rewards.load_preset("math")
    resolve("tiny-cpu")
    with followed(RATE, names):
        config = resolve("tiny-cpu", assigned([f"grpo.learning_rate={RATE}"]))
        arguments = stages.grpo_arguments(Stage(Run("a"), "03", config), policy, preset)
    assert arguments["learning_rate"] == RATE


def of_a_completion(names: list[str]) -> None:
    """Pass one logged step of a stand-in trainer to a monitor and its dashboard."""
    from types import SimpleNamespace

    import numpy as np

    from grpo_nb import Monitor
    from grpo_nb.training.logs import SETTINGS
    from grpo_nb.views import TrainingDashboard

    sizes = dict.fromkeys(SETTINGS, 1) | {"num_generations": 2, "world_size": 1}
    args = SimpleNamespace(output_dir=tempfile.mkdtemp(), **sizes)
    state = SimpleNamespace(global_step=1, max_steps=2)
    logs = {"prompt": ["a", "a"], "completion": [TEXT, "b"], "advantages": [1.0, -1.0]}
    trainer = SimpleNamespace(
        args=args,
        state=state,
        reward_func_names=["r"],
        reward_funcs=[len],
        reward_weights=np.ones(1),
        callback_handler=SimpleNamespace(callbacks=[]),
        _logs={**logs, "rewards": {"r": [1.0, 0.0]}},
    )
    monitor = Monitor(trainer, show=False)
    monitor.watchers.append(TrainingDashboard())
    monitor.begin(0, 2)
    control = SimpleNamespace()
    step = {"loss": 0.0, "reward": 0.5, "completions/mean_length": 3.0}
    args.steps_per_generation = args.num_iterations = 1
    with followed(TEXT, names):
        monitor.on_log(args, state, control, logs=step)
    assert not monitor.failure, monitor.failure


def of_a_score(names: list[str]) -> None:
    from grpo_nb import check_rewards

    def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [SCORE if f"<answer>{a}</answer>" in c else 0.0 for c, a in pairs]

    rows = [{"prompt": f"What is {n} + 7?", "answer": str(n + 7)} for n in range(20)]
    with followed(SCORE, names):
        check_rewards(correct, rows)


def main() -> None:
    values: dict[str, Callable[[list[str]], None]] = {
        "a setting, from --set to GRPOConfig": of_a_setting,
        "a completion, from the log to the dashboard": of_a_completion,
        "a score, from the reward to the verdict": of_a_score,
    }
    for what, action in values.items():
        names: list[str] = []
        with redirect_stdout(StringIO()):
            action(names)
        print(f"{what}: {len(names)} functions")
        for name in names:
            print(f"    {name}")


if __name__ == "__main__":
    main()
