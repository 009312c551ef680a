"""A run's base and tuned model at work: a question, their answers, the scores.

    chat = Chat(Run("demo"))
    chat.ask("What is 47 + 38?")

A prompt is made as notebook 1 made those of the training. `answers` asks a file of them.
"""

from functools import cached_property, partial
from typing import Any

import pandas as pd

from grpo_nb import environments
from grpo_nb.evaluation.answers import system_prompt
from grpo_nb.export import trained_paths
from grpo_nb.models import Engine, open_engine
from grpo_nb.reward_lab import bench_of
from grpo_nb.rewards import load_rewards
from grpo_nb.rewards.prompts import build_prompt, completion_text
from grpo_nb.runs import Run, refuse_unknown
from grpo_nb.views import tables

Row = dict[str, Any]
MODELS = ("base", "tuned")


class Chat:
    """Base and tuned model of a run; loaded when the first question comes.

    Where an adapter was trained both are one model in memory: the base is what lies below it.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.config = run, run.config()
        self.preset = load_rewards(self.config.rewards)

    @cached_property
    def _engines(self) -> dict[str, Engine]:
        base, policy, adapter = trained_paths(self.run, self.config)
        # Two where every weight was trained: each on its share of the GPU.
        share = {"gpu_memory_utilization": 0.5 if adapter else 0.4}
        load = partial(open_engine, quantization=self.config.model.quantization, **share)
        tuned = load(policy, adapter=adapter)
        below = load(base, adapter=None) if adapter is None else tuned
        return {"base": below, "tuned": tuned}

    def close(self) -> None:
        """Give the memory back; the next question loads the models again."""
        for engine in set(self.__dict__.pop("_engines", {}).values()):
            engine.close()

    def row(self, question: str | Row, reference: str = "") -> Row:
        """The row that notebook 1 makes of a question, without an answer where none is given.

        Raises:
            ValueError: The question is empty.
        """
        if not isinstance(question, str):
            return question
        if not question.strip():
            raise ValueError("the question is empty: write one, such as 'What is 47 + 38?'")
        prompt = build_prompt(question, system_prompt(self.config, self.preset))
        row = {"prompt": prompt, "question": question}
        return row | {"answer": reference} if reference else row

    def answer(self, question: str | Row, model: str = "tuned", **how: Any) -> dict[str, Any]:
        """What a model says to one question, and what it earns where the reference answer is known.

        Args:
            question: A text, or a row: of `data.load`, or of `row` with its reference answer.
            model: "base" or "tuned".
            how: temperature (0, which is greedy, unless given) and seed.

        Returns:
            question, completion and answer, as it was read or None; with a reference answer also
            reference, each reward, its `<reward>/reason`, and total.

        Raises:
            FileNotFoundError: The run has not been trained.
            ValueError: A reward reads a column that the row lacks.
        """
        refuse_unknown("model", model, list(MODELS))
        row, cap = self.row(question), self.config.train.max_completion_length
        asked = {"max_completion_length": cap, "adapter": model == "tuned", **how}
        engine = self._engines[model]
        bench = bench_of(self.config, self.preset, engine.tokenizer)
        [[sample]] = environments.answer(engine, [row], bench.environment, **asked)
        if "answer" not in row:
            said = {"question": row["question"], "completion": sample.text}
            return said | {"answer": self.preset.extract(completion_text(sample.completion))}
        table = bench.table([row], [[sample.completion]])
        [line] = table.drop(columns=["mean", "std", "advantage", "signal"]).to_dict("records")
        return line

    def ask(self, question: str | Row, *models: str, **how: Any) -> tables.Page:
        """What models say to the same prompt, side by side; a cell shows it as its value.

        Args:
            models: "base" or "tuned"; none named: both.
            how: temperature and seed, as `answer` takes them.
        """
        asked, row = list(models or MODELS), self.row(question)
        lines = [self.answer(row, model, **how) for model in asked]
        return tables.completions(pd.DataFrame(lines, index=asked))
