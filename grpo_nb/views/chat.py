"""Ask a run's base model and tuned model a question, and compare their answers and scores.

    chat = Chat(Run("demo"))
    chat.ask("What is 47 + 38?")

Prompts are those of training: what stands before the question is the same.
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

    def close(self) -> None:
        """Free the memory; the next question loads the models again."""
        for engine in set(self.__dict__.pop("_engines", {}).values()):
            engine.close()

    def ask(self, question: str | Row, *models: str, **how: Any) -> pd.DataFrame:
        """Return the models' answers to the same prompt side by side.

        Args:
            question: Text, or a row from `data.load`; the answers to a row are scored.
            models: "base" or "tuned"; both by default.
            how: temperature (default 0: greedy) and seed.

        Raises:
            FileNotFoundError: The run has not been trained.
        """
        if isinstance(question, str):
            *before, turn = data.load(self.run, "eval", max_rows=1)[0]["prompt"]
            prompt = [*before, turn | {"content": question}]
            question = {"prompt": prompt, "question": question}
        names = models or MODELS
        lines = [self._answer(question, model, **how) for model in names]
        return tables.completions(pd.DataFrame(lines, index=list(names)))

    def _answer(self, row: Row, model: str, **how: Any) -> Row:
        refuse_unknown("model", model, list(MODELS))
        sampling = {"max_completion_length": self.config.grpo.max_completion_length, **how}
        engine = self._engines[model]
        bench = bench_of(self.config, self.preset, engine.tokenizer)
        [[sample]] = environments.answer(
            engine, [row], bench.environment, adapter=model == "tuned", **sampling
        )
        if "answer" not in row:
            return {"question": row["question"], "completion": sample.text}
        table = bench.table([row], [[sample.completion]])
        [line] = table.drop(columns=["mean", "std", "advantage", "signal"]).to_dict("records")
        return line
