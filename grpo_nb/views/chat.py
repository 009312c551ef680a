"""A run's base and tuned model at work: a question, their answers, the scores.

    chat = Chat(Run("demo"))
    chat.ask("What is 47 + 38?")

A prompt is made as notebook 1 made those of the training. `answers` asks a file of them.
"""

import html
from collections.abc import Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from grpo_nb.evaluation.answers import system_prompt
from grpo_nb.export import trained_paths
from grpo_nb.models import Engine, open_engine
from grpo_nb.reward_lab import Bench, explain
from grpo_nb.rewards import Scored, load_rewards
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, refuse_unknown
from grpo_nb.views import tables

Row = dict[str, Any]
MODELS = ("base", "tuned")


class Said(NamedTuple):
    """A model's completion of a row.

    answer: As the rewards read it; None where there is none.
    scored: Each reward's score and reason, and of "total" their weighted sum; empty without a
        reference answer.
    """

    completion: str
    answer: str | None = ""
    scored: Mapping[str, Scored] = MappingProxyType({})


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

    def answer(
        self,
        question: str | Row,
        model: str = "tuned",
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Said:
        """What a model says to one question.

        Args:
            question: A text, or a row: of `data.load`, or of `row` with its reference answer.
            model: "base" or "tuned".
            temperature: 0 is greedy.
            seed: Of the sampling.

        Raises:
            FileNotFoundError: The run has not been trained.
            ValueError: A reward reads a column that the row lacks.
        """
        refuse_unknown("model", model, list(MODELS))
        row = self.row(question)
        engine = self._engines[model]
        [[sample]] = engine.generate(
            [row["prompt"]],
            max_completion_length=self.config.train.max_completion_length,
            temperature=temperature,
            seed=seed,
            adapter=model == "tuned",
        )
        said = Said(sample.text, self.preset.extract(sample.text))
        if "answer" not in row:
            return said
        bench = Bench(self.preset, self.config.train, engine.tokenizer)
        arguments = bench.arguments([row], [sample.text])
        scored = {f.__name__: explain(f, arguments)[0] for f in self.preset.reward_funcs}
        [total] = bench.totals(np.array([[one.score for one in scored.values()]], dtype=float))
        return said._replace(scored=scored | {"total": Scored(float(total))})

    def ask(self, question: str | Row, *models: str, **how: Any) -> tables.Page:
        """What models say to the same prompt, one below the other; a cell shows it as its value.

        Args:
            models: "base" or "tuned"; none named: both.
            how: temperature and seed, as `answer` takes them.
        """
        row = self.row(question)
        asked = {model: self.answer(row, model, **how) for model in models or MODELS}
        return answers_page(row, asked)


def answers_page(row: Row, said: Mapping[str, Said]) -> tables.Page:
    """Answers to one question, a line a model: completion, what was read in it, its scores.

    Args:
        row: Its question, and its reference answer if it has one.
        said: What each model said.
    """
    names = list(dict.fromkeys(name for one in said.values() for name in one.scored))
    head = ["", "completion", "answer", *map(tables.short, names)]
    lines = []
    for model, one in said.items():
        cells = [html.escape(model), *tables.read(one.completion, one.answer)]
        lines.append(cells + [tables.score(*one.scored[name]) for name in names if one.scored])
    reference = f"\nreference answer {html.escape(str(row['answer']))}" if "answer" in row else ""
    caption = f"<b>{html.escape(row['question'])}</b>{reference}"
    plain = [row["question"], *(f"{model}: {one.completion}" for model, one in said.items())]
    return tables.Page(tables.markup(head, lines, caption), "\n".join(plain))
