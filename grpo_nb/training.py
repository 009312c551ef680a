"""Stage 03: TRL's GRPOTrainer over the policy, its metrics kept, its progress shown."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import health
from grpo_nb.config import RunConfig
from grpo_nb.models import Policy, cuda_available
from grpo_nb.pilot import passed
from grpo_nb.prompts import completion_text
from grpo_nb.rewards import RewardSet, declared_range, keep_adaptive_weights
from grpo_nb.runs import Run, Stage, atomic_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOTrainer

Watcher = Callable[[int, int, str], None]


def grpo_arguments(config: RunConfig, output_dir: Path, vllm: bool) -> dict[str, Any]:
    """The arguments of trl.GRPOConfig that this run sets; all others are TRL's defaults."""
    return {
        **config.train.model_dump(),
        "output_dir": str(output_dir),
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not cuda_available(),
        "optim": "adamw_8bit" if cuda_available() else "adamw_torch",
        "gradient_checkpointing": cuda_available(),
        "use_vllm": vllm,
        "shuffle_dataset": config.data.order == "shuffled",
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def build_trainer(
    policy: Policy, preset: RewardSet, rows: Sequence[dict], config: RunConfig, run: Run
) -> "GRPOTrainer":
    """A GRPOTrainer that writes metrics.jsonl and completions/ below the run's train/."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    # An earlier training in this run may have been longer.
    (run / "train/metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(run / "train/completions", ignore_errors=True)
    arguments = grpo_arguments(config, run / "train", policy.vllm)
    arguments["reward_weights"] = list(preset.reward_weights)
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=list(preset.reward_funcs),
        args=GRPOConfig(**arguments),
        # Rows may hold dicts and lists of any type, which Arrow would merge or refuse.
        train_dataset=Dataset.from_list([dict(row) for row in rows], on_mixed_types="use_json"),
        callbacks=[keep_adaptive_weights(preset.reward_funcs)],
    )
    for parameter in policy.model.parameters():
        if parameter.requires_grad:  # TRL casts a 4-bit model's adapter to bf16
            parameter.data = parameter.data.to(torch.float32)
    return trainer


def train(trainer: "GRPOTrainer", stage: Stage, preset: RewardSet) -> list[dict[str, float]]:
    """Train to the last step; metrics and alerts are on disk after each one.

    Alerts on the training's health are printed as they come, and kept in train/health.jsonl.

    Returns:
        One dict of TRL's metrics a step, with its "step".
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "reward" in logs:
                line = {"step": state.global_step, **logs}
                append_line(path, line)
                for alert in watch.feed(line):
                    append_line(alerts, alert._asdict())
                    print(health.summary([alert]))
                show(state.global_step, state.max_steps, f"reward {logs['reward']:.2f}")

    path, alerts = stage.run / "train/metrics.jsonl", stage.run / "train/health.jsonl"
    alerts.write_text("")
    watch = health.Watch(expected(preset, stage))
    show = _watchers(stage)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Keep())
    show(0, trainer.args.max_steps, "")
    trainer.train()
    return read_lines(path)


def expected(preset: RewardSet, stage: Stage) -> health.Expected:
    """What the run knows before step 1, by which its health is judged."""
    report = stage.run / "rewards/report.json"
    pilot = json.loads(report.read_text(encoding="utf-8"))["pilot"] if report.exists() else {}
    ranges = {
        func.__name__: (weight, *declared_range(getattr(func, "reward", func)))
        for func, weight in zip(preset.reward_funcs, preset.reward_weights, strict=True)
    }
    seconds = pilot.get("predicted seconds per step", math.inf)
    return health.Expected(ranges, stage.config.step_completions, step_seconds=seconds)


def append_line(path: Path, content: dict[str, Any]) -> None:
    """One JSON line; a NaN is null."""
    values = content.items()
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_completions(
    run: Run, preset: RewardSet, tokenizer: "PreTrainedTokenizerBase", cap_tokens: int
) -> pd.DataFrame:
    """Every completion of the training, for the browser.

    Args:
        run: A trained run.
        preset: Its rewards; the first says "correct".
        tokenizer: Counts a completion's tokens.
        cap_tokens: A completion that long was truncated.

    Returns:
        step, question, completion, each reward, advantage, tokens, correct, truncated.
    """
    files = sorted((run / "train/completions").glob("*.parquet"))
    raw = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    frame = raw[["step", *preset.names, "advantage"]].copy()
    frame.insert(1, "question", [prompt[-1]["content"] for prompt in raw["prompt"]])
    texts = [completion_text(list(completion)) for completion in raw["completion"]]
    frame.insert(2, "completion", texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    frame["tokens"] = [len(ids) for ids in encoded]
    frame["correct"] = passed(frame, preset)
    frame["truncated"] = frame["tokens"] >= cap_tokens
    return frame


def save_adapter(trainer: "GRPOTrainer", policy: Policy, run: Run) -> None:
    """Write train/adapter/: the trained adapter and the tokenizer, nothing else."""
    with atomic_path(run / "train/adapter") as temporary:
        trainer.model.save_pretrained(temporary, selected_adapters=["default"])
        policy.tokenizer.save_pretrained(temporary)


def adapter_norm(policy: Policy) -> float:
    """Norm of LoRA's B matrices: 0 before the first step, for LoRA begins as the base."""
    weights = (p for name, p in policy.model.named_parameters() if "lora_B" in name)
    return math.sqrt(sum(float(weight.detach().float().square().sum()) for weight in weights))


def _watchers(stage: Stage) -> Watcher:
    """Shows progress below the cell (as text that updates) and to the pipeline."""
    from IPython import get_ipython
    from IPython.display import display

    handle = None

    def show(done: int, total: int, note: str) -> None:
        nonlocal handle
        stage.progress(done, total, note)
        if get_ipython() is None:
            return
        filled = round(30 * done / total)
        line = {"text/plain": f"{'█' * filled}{'░' * (30 - filled)} step {done}/{total}  {note}"}
        if handle is None:
            handle = display(line, raw=True, display_id=True)
        else:
            handle.update(line, raw=True)

    return show
