"""Ask a teacher, a model that can do the task, and return the answers that the rewards accept.

The teacher answers the rows of the SFT warm-up. Its answers are stored in rewards/teacher.parquet,
so that it is never asked for the same answer twice.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from grpo_nb import models
from grpo_nb.environments.cache import Cache, answer_cached
from grpo_nb.models import Engine
from grpo_nb.models.hub import find_model
from grpo_nb.models.template import count_tokens
from grpo_nb.reward_lab import Bench
from grpo_nb.reward_lab.table import Row, passed
from grpo_nb.runs import Stage
from grpo_nb.runs.config import RunConfig
from grpo_nb.runs.files import digests

KEPT_AT = "rewards/teacher.parquet"


def right_answers(stage: Stage, rows: Sequence[Row], bench: Bench) -> list[Row]:
    """Return the rows that the teacher solves, each with a right answer as the completion.

    A row occurs once for each distinct right answer. A right answer earns the first reward in full,
    and has the form that the rewards read.

    Args:
        stage: The stage, whose setting `rescue.teacher` names the teacher.
        rows: The rows of the SFT warm-up.
        bench: The run's rewards.

    Raises:
        ValueError: No answer is right.
        RuntimeError: The teacher cannot be reached, or refuses the request.
    """
    name, texts_P_G = stage.config.rescue.teacher, _answers(stage, rows, bench)
    form, shape = bench.preset.form, (len(rows), -1)
    right_P_G = passed(bench.table(rows, texts_P_G), bench.preset).reshape(shape)
    formed_P_G = np.array([[form.is_well_formed(text) for text in texts] for texts in texts_P_G])
    pairs = [
        {**row, "completion": [{"role": "assistant", "content": text}]}
        for row, texts, good in zip(rows, texts_P_G, right_P_G & formed_P_G, strict=True)
        for text in dict.fromkeys(np.array(texts, dtype=object)[good])
    ]
    if not pairs:
        raise ValueError(
            f"none of the {right_P_G.size} answers of {name} is both correct and in the form "
            f"{form.name!r} ({right_P_G.mean():.0%} are correct, {formed_P_G.mean():.0%} in the "
            f"form). The first: {texts_P_G[0][0]!r:.200}. Choose another rescue.teacher, or the "
            "rewards.form in which it answers"
        )
    return pairs


def _answers(stage: Stage, rows: Sequence[Row], bench: Bench) -> list[list[str]]:
    """Return all of the teacher's answers, [rows][answers]; ask only for those not yet stored."""
    config = stage.config
    rescue = config.rescue
    settings = rescue.model_dump(include={"teacher", "teacher_model", "answers"})
    settings |= {"max_completion_length": config.train.max_completion_length}
    settings |= {"temperature": config.train.temperature, "seed": config.seed}
    if not is_address(rescue.teacher):
        settings["weights"] = digests(Path(find_model(rescue.teacher)), "*")
    with ExitStack() as stack:

        def opened() -> Engine:
            print(_cost(config, rows, bench))
            return stack.enter_context(closing(open_teacher(config)))

        groups = answer_cached(
            Cache(stage.run / KEPT_AT, settings),
            rows,
            None,
            opened,
            max_completion_length=config.train.max_completion_length,
            temperature=config.train.temperature,
            num_generations=rescue.answers,
            seed=config.seed,
            batch_size=config.step_completions,
            progress=stage.progress,
            show="the teacher's first answer",
        )
    return [[sample.text for sample in group] for group in groups]


def is_address(teacher: str) -> bool:
    """Return whether the teacher is the URL of a server; otherwise it is a model to load."""
    return teacher.startswith(("http://", "https://"))


def open_teacher(config: RunConfig) -> Engine:
    """Open the teacher: load a model, or connect to a server."""
    rescue, template = config.rescue, config.model.chat_template_kwargs
    if is_address(rescue.teacher):
        from grpo_nb.models.served import ServedEngine

        names = (rescue.teacher, rescue.teacher_model, rescue.api_key_env)
        return ServedEngine(*names, chat_template_kwargs=template)
    # Keep the saved precision: a small merged model, rounded to 4 bits, gives no right answers.
    options = {"quantization": "16bit", "chat_template_kwargs": template}
    return models.open_engine(rescue.teacher, adapter=None, **options)


def _cost(config: RunConfig, rows: Sequence[Row], bench: Bench) -> str:
    """Return a sentence with the most that the teacher's answers can cost."""
    rescue = config.rescue
    requests = len(rows) * rescue.answers
    prompts = [row["prompt"] for row in rows]
    prompt_tokens = sum(count_tokens(bench.tokenizer, prompts)) * rescue.answers
    tokens = requests * config.train.max_completion_length
    dollars = (prompt_tokens + tokens) / 1e6 * rescue.dollars_per_million_tokens
    price = f", at most ${dollars:.2f}" if dollars else ""
    return (
        f"{rescue.teacher} answers {len(rows)} prompts {rescue.answers} times: about "
        f"{prompt_tokens:,} tokens to read, at most {tokens:,} to write{price}"
    )
