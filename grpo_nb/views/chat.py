"""Ask a run's base model and tuned model a question, and compare their answers and scores.

    chat = Chat(Run("demo"))
    chat.ask("What is 47 + 38?")

Prompts are built as notebook 1 builds them for training.
"""

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import data, environments
from grpo_nb.export import trained_paths
from grpo_nb.models import Engine, open_engine
from grpo_nb.names import refuse_unknown
from grpo_nb.reward_lab import bench_of
from grpo_nb.rewards import load_rewards
from grpo_nb.rewards.prompts import Message, build_prompt, completion_text
from grpo_nb.views import tables

if TYPE_CHECKING:
    from grpo_nb.runs import Run

Row = dict[str, Any]
MODELS = ("base", "tuned")


class Chat:
    """Ask a run's base and tuned models, which are loaded at the first question.

    If an adapter was trained, both share one model in memory; the base uses it without the adapter.
    """

    def __init__(self, run: "Run") -> None:
        self.run, self.config = run, run.config()
        self.preset = load_rewards(self.config.rewards)

    @cached_property
    def _engines(self) -> dict[str, Engine]:
        base, policy, adapter = trained_paths(self.run, self.config)
        load = partial(
            open_engine,
            quantization=self.config.model.quantization,
            chat_template_kwargs=self.config.grpo.chat_template_kwargs,
        )
        if adapter:
            engine = load(policy, adapter=adapter)
            return {"base": engine, "tuned": engine}
        # After full fine-tuning there are two models, which share the GPU.
        load = partial(load, adapter=None, gpu_memory_utilization=0.4)
        return {"base": load(base), "tuned": load(policy)}

    @cached_property
    def _worked_turns(self) -> list[Message]:
        """Return the turns before every question of a run with worked ones, else []."""
        return data.load(self.run, "eval")[0]["prompt"][:-1] if self.config.data.shots else []

    def close(self) -> None:
        """Free the memory; the next question loads the models again."""
        for engine in set(self.__dict__.pop("_engines", {}).values()):
            engine.close()

    def row(self, question: str | Row, reference: str = "") -> Row:
        """Return the row that notebook 1 would make of a question.

        Args:
            question: The question's text; a row is returned unchanged.
            reference: The reference answer, if it is known.

        Raises:
            ValueError: The question is empty.
        """
        if not isinstance(question, str):
            return question
        if not question.strip():
            raise ValueError("the question is empty: write one, such as 'What is 47 + 38?'")
        text = self.config.data.system_prompt
        text = self.preset.form.system_prompt if text == "preset" else text
        prompt = build_prompt(question, text)
        prompt[:-1] = self._worked_turns or prompt[:-1]
        row = {"prompt": prompt, "question": question}
        return row | {"answer": reference} if reference else row

    def answer(self, question: str | Row, model: str = "tuned", **how: Any) -> dict[str, Any]:
        """Answer one question, and score the answer if the reference answer is known.

        Args:
            question: Text, or a row from `data.load` or `row`, which may have a reference answer.
            model: "base" or "tuned".
            how: temperature (default 0: greedy) and seed.

        Returns:
            question, completion and answer (as extracted, or None). If the reference answer is
            known, there are also reference, each reward, its `<reward>/reason`, and total.

        Raises:
            FileNotFoundError: The run has not been trained.
            ValueError: A reward reads a column that the row lacks.
        """
        refuse_unknown("model", model, list(MODELS))
        row, cap = self.row(question), self.config.grpo.max_completion_length
        sampling = {"max_completion_length": cap, "adapter": model == "tuned", **how}
        engine = self._engines[model]
        bench = bench_of(self.config, self.preset, engine.tokenizer)
        [[sample]] = environments.answer(engine, [row], bench.environment, **sampling)
        if "answer" not in row:
            line = {"question": row["question"], "completion": sample.text}
            return line | {"answer": self.preset.form.extract(completion_text(sample.completion))}
        table = bench.table([row], [[sample.completion]])
        [line] = table.drop(columns=["mean", "std", "advantage", "signal"]).to_dict("records")
        return line

    def ask(self, question: str | Row, *models: str, **how: Any) -> tables.Page:
        """Show the models' answers to the same prompt side by side.

        Args:
            question: Text or a row, as for `answer`.
            models: "base" or "tuned"; both by default.
            how: temperature and seed, as for `answer`.
        """
        names, row = list(models or MODELS), self.row(question)
        lines = [self.answer(row, model, **how) for model in names]
        return tables.completions(pd.DataFrame(lines, index=names))
