"""Fine-tune on right answers before GRPO, so that the model solves some prompts at all.

The answers are the reference answers of data/sft.parquet, or a teacher's answers to its questions.
The warm-up takes `train.sft_steps` steps; with `train.sft_until` it ends as soon as GRPO can start.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from grpo_nb import data, models
from grpo_nb.models import Policy
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.reward_lab.baseline import WARMED
from grpo_nb.reward_lab.table import Row, passed
from grpo_nb.rewards import load_rewards
from grpo_nb.rewards.prompts import json_key, question_key
from grpo_nb.runs import Run, Stage, atomic_path, write_json
from grpo_nb.runs.config import RunConfig
from grpo_nb.runs.files import read_json
from grpo_nb.training import checkpoints, ranks
from grpo_nb.training.pass_rate import PASS, PROMPTS, measure
from grpo_nb.training.teacher import right_answers

TRIED = "rewards/tried_warm_up"  # a rescue's warm-up; moved to WARMED once the run adopts it


class Lesson(NamedTuple):
    """Hold the examples of a warm-up, and the rewards that measure its effect.

    rows: Rows with questions and reference answers.
    examples: Rows with a completion, which the policy learns to write.
    bench: The rewards that measure the policy during the warm-up.
    """

    rows: list[Row]
    examples: list[Row]
    bench: Bench


def lesson_of(stage: Stage, rows: list[Row], bench: Bench) -> Lesson:
    """Build SFT examples for these rows from reference answers or a teacher's right answers."""
    if stage.config.train.sft_answers == "teacher":
        return Lesson(rows, right_answers(stage, rows, bench), bench)
    return Lesson(rows, data.worked_rows(rows, bench.preset), bench)


def warm_up_base(stage: Stage) -> str:
    """Do the SFT warm-up first, so that the baseline measures the policy that GRPO starts from.

    Returns:
        A sentence that describes the warm-up.
    """
    config, about = stage.config, _saved(stage)
    if config.train.sft_steps and not about:
        lesson = _lesson(stage)  # a local teacher is unloaded before the policy is loaded
        with closing(load_untrained(config)) as policy:
            about = train_and_save(policy, stage, lesson)
    return _sentence(about)


def load_untrained(config: RunConfig) -> Policy:
    """Load the policy as GRPO would, but without vLLM, which stage 02 does not need."""
    model = config.model.model_copy(update={"fast_inference": "off"})
    return models.load_policy(model, config.seed, config.policy)


def warm_up(policy: Policy, stage: Stage) -> str:
    """Do the SFT warm-up with a loaded policy; do nothing if `train.sft_steps` is 0.

    The warm-up runs once. Its weights are saved in rewards/warm_up/, and loaded from there later.

    Returns:
        A sentence that describes the warm-up.
    """
    about = ranks.from_main(lambda: _saved(stage))
    if about:
        models.load_weights(policy, stage.run / WARMED)
    elif stage.config.train.sft_steps:
        if ranks.count() > 1:  # one process asks the teacher; the others read the stored answers
            ranks.from_main(lambda: len(_lesson(stage).examples))
        about = train_and_save(policy, stage, _lesson(stage))
    return _sentence(about)


def warm_up_curve(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of the run's warm-up, one line per step; [] without a warm-up.

    Each line has the loss. With `train.sft_until`, some lines also have the figures of
    `pass_rate.measure`.
    """
    path = run / WARMED / "about.json"
    return read_json(path)["lines"] if path.exists() else []


def train_and_save(
    policy: Policy, stage: Stage, lesson: Lesson, folder: str = WARMED
) -> dict[str, Any]:
    """Train the policy on the lesson, save its weights, and return the content of about.json."""
    from grpo_nb.training.sft import train_on  # Unsloth has to be imported before TRL

    look = None
    if stage.config.train.sft_until:
        prompts = data.load(stage.run, "train", max_rows=PROMPTS)  # not in the warm-up
        look = partial(measure, policy, prompts, lesson.bench, stage.config)
    about = {"of": _identity(stage.config, lesson.rows), "taught": _taught(policy, stage, lesson)}
    about["lines"], about["end"] = train_on(policy, stage, lesson.examples, look)

    def save() -> None:
        with atomic_path(stage.run / folder) as temporary:
            checkpoints.save_trained(policy.model, temporary)
            policy.tokenizer.save_pretrained(temporary)
            write_json(temporary / "about.json", about)
            checkpoints.seal(temporary)

    ranks.from_main(save)
    return about


def _taught(policy: Policy, stage: Stage, lesson: Lesson) -> str:
    """Say how many rows the teacher solves, and how many of these the base does not."""
    if stage.config.train.sft_answers != "teacher":
        return ""
    rows = list({question_key(example): example for example in lesson.examples}.values())
    cap = stage.config.train.max_completion_length
    groups = policy.generate([row["prompt"] for row in rows], max_completion_length=cap)
    table = lesson.bench.table(rows, [[group[0].text] for group in groups])
    unsolved = len(rows) - int(passed(table, lesson.bench.preset).sum())
    return (
        f"the teacher solves {len(rows)} of {len(lesson.rows)} rows; the base does not solve "
        f"{unsolved} of them"
    )


def _lesson(stage: Stage) -> Lesson:
    """Build the lesson from the run's own rows."""
    config = stage.config
    tokenizer = models.load_tokenizer(config.model.model_path, config.model.chat_template_kwargs)
    bench = bench_of(config, load_rewards(config.rewards), tokenizer)
    return lesson_of(stage, data.load(stage.run, "sft"), bench)


def _saved(stage: Stage) -> dict[str, Any]:
    """Return about.json of the saved warm-up; {} if there is none for these settings."""
    for name in (WARMED, TRIED):
        folder = stage.run / name
        if not (stage.config.train.sft_steps and checkpoints.whole_or_aside(folder)):
            continue
        about = read_json(folder / "about.json")
        if about["of"] == _identity(stage.config, data.load(stage.run, "sft")):
            if name == TRIED:
                shutil.rmtree(stage.run / WARMED, ignore_errors=True)
                folder.rename(stage.run / WARMED)
            return about
    return {}


def _identity(config: RunConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Return everything on which the weights after the warm-up depend."""
    settings = {name: value for name, value in config.train if name.startswith("sft_")}
    if config.train.sft_answers == "teacher":
        settings |= config.rescue.model_dump(include={"teacher", "teacher_model", "answers"})
    text = json.dumps([rows, load_rewards(config.rewards).form.name], default=json_key)
    settings |= {"seed": config.seed, "rows": hashlib.sha256(text.encode()).hexdigest()}
    model = config.model.model_dump(exclude={"fast_inference"})
    return settings | {"model": model, "finetuning": config.policy.finetuning}


def _sentence(about: dict[str, Any]) -> str:
    if not about:
        return "no SFT warm-up (train.sft_steps = 0)"
    first, last = about["lines"][0], about["lines"][-1]
    text = f"{last['step']} SFT warm-up steps: loss {first['loss']:.3f} → {last['loss']:.3f}"
    looks = [line for line in about["lines"] if PASS in line]
    if looks:
        text += f", {PASS} {looks[0][PASS]:.2f} → {looks[-1][PASS]:.2f}"
    return "; ".join(filter(None, [text, about["end"], about["taught"]]))
