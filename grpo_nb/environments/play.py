"""Play episodes: the model writes a turn, its calls are run, it reads the results, and so on.

    [[episode]] = play(engine, environment, rows, max_completion_length=128)

This is the loop of TRL's GRPOTrainer, token by token, for everything except training: baseline
rollouts, validation, evaluation and chat. Everything after the prompt is the episode's completion.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.checks import Check
from grpo_nb.environments.contract import Environment, Played, Row, of
from grpo_nb.files import read_json, write_json
from grpo_nb.models import template
from grpo_nb.models.engine import Engine, Sample, Sampling
from grpo_nb.rewards.prompts import Message, json_key, transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs.config import RunConfig


class Episode:
    """Hold an episode in progress, played by a model or by a script.

    Args:
        environment: The environment to play in.
        row: The row that the episode starts with.
        instance: An instance to play in; None creates one.

    Attributes:
        prompt: The prompt, including the text that `reset` returned.
        messages: The player's turns and the results.
        turns: The number of turns whose calls were run.
        ended: Why the episode ended; "" while it is in progress.
        reward: The reward of an episode played without a model, from 0 to 1; else NaN.
    """

    reward = float("nan")

    def __init__(self, environment: Environment, row: Row, instance: Played | None = None) -> None:
        self.environment, self.max_turns = environment, environment.max_turns
        self.played = instance or environment.factory()
        text, [*before, last] = self.played.reset(**row), row["prompt"]
        change = {} if text is None else {"content": last["content"] + str(text)}
        self.prompt: list[Message] = [*before, last | change]
        self.messages: list[Message] = []
        self.turns, self.ended = 0, ""

    @property
    def trace(self) -> list[Any]:
        """Return everything that must be equal if the same turns are played again."""
        return [turn["content"] for turn in [*self.prompt, *self.messages]] + [str(self.reward)]

    def add_turn(self, message: Message) -> list[Message]:
        """Run the calls of the player's next turn and return their results.

        A turn without calls ends the episode.
        """
        self.messages += [message] if message else []
        calls = message.get("tool_calls")
        if not calls or self.turns == self.max_turns:
            self.ended = "turn limit" if calls else "answered"
            return []
        results = [run_call(self.played, call) for call in calls]
        self.messages, self.turns = self.messages + results, self.turns + 1
        return results


class Sampled(Episode):
    """Hold an episode that a model plays, token by token.

    Args:
        environment: The environment to play in.
        row: The row that the episode starts with.
        tokenizer: A tokenizer prepared by `template.with_tools`.
        cap: The limit for all turns together, including results [tokens].
    """

    def __init__(
        self, environment: Environment, row: Row, tokenizer: "PreTrainedTokenizerBase", cap: int
    ) -> None:
        super().__init__(environment, row)
        self.tokenizer, self.cap, self.truncated = tokenizer, cap, False
        [self.prompt_ids] = template.encode(tokenizer, [self.prompt], environment.tools)
        self.ids: list[int] = []

    def add_sample(self, sample: Sample) -> None:
        """Add the model's next turn, and the results of its calls."""
        ids = sample.ids[: self.cap - len(self.ids)]
        self.truncated = sample.truncated or len(ids) < len(sample.ids)
        before = self.prompt_ids + self.ids
        self.ids = self.ids + ids
        results = self.add_turn(template.parse(self.tokenizer, ids, before) if ids else {})
        if self.ended == "answered" and self.truncated:
            self.ended = "cut off"
        result_ids = template.tool_turn(self.tokenizer, results) if results else []
        if len(self.ids) + len(result_ids) > self.cap:  # TRL rolls such results back as well
            self.ended, self.messages = "no room for a result", self.messages[: -len(results)]
        else:
            self.ids = self.ids + result_ids

    def sample(self) -> Sample:
        """Return the episode as a completion; its tokens include the results of calls."""
        text, end = transcript(self.messages), "a call hung" if self.played.hung else self.ended
        messages = tuple(self.messages)
        return Sample(text, len(self.ids), self.truncated, self.ids, messages, end)


def check_rows(environment: Environment | None, rows: Sequence[Row]) -> list[Check]:
    """Begin an episode with each row; return a list of one check, or [] without an environment.

    Stage 01 calls this function before anything is sampled.

    Raises:
        ValueError: A row has images, or lacks a column that `reset` takes.
    """
    if environment is None:
        return []
    if any("images" in row for row in rows):
        raise ValueError(
            f"{environment.title} supports no images: clear data.image_column or data.environment"
        )
    played = environment.factory()
    for row in rows:
        Episode(environment, row, played)
    tools = ", ".join(environment.methods)
    evidence = f"{environment.kind.__name__} starts with each of {len(rows)} rows; tools: {tools}"
    return [Check("environment", "ok", evidence)]


def run_call(played: Played, call: Mapping[str, Any]) -> Message:
    """Run a call and return the tool's message, in TRL's wording."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        if name not in played.environment.methods:
            raise ValueError(f"Tool {name} not found.")
        content = getattr(played, name)(**arguments)
    except Exception as error:
        content = str({"error": str(error)})
    return {"role": "tool", "name": name, "content": content}


def play(
    engine: Engine, environment: Environment, rows: Sequence[Row], **sampling: Any
) -> list[list[Sample]]:
    """Let a model play episodes of each row; return them as samples, [rows][num_generations].

    Args:
        engine: The model that plays.
        environment: The environment to play in.
        rows: Rows with a prompt and the columns that `reset` takes.
        sampling: The fields of `Sampling`; max_completion_length limits all turns of an episode
            together, including results.
    """
    options, tokenizer = Sampling(**sampling), template.with_tools(engine.tokenizer)
    size, cap = options.num_generations, options.max_completion_length
    groups = [[Sampled(environment, row, tokenizer, cap) for _ in range(size)] for row in rows]
    active, seed = [episode for group in groups for episode in group], count(options.seed)
    while active := [episode for episode in active if not episode.ended]:
        one_turn = options._replace(num_generations=1, seed=next(seed))
        samples = engine.complete([each.prompt_ids + each.ids for each in active], one_turn)
        for episode, sample in zip(active, samples, strict=True):
            episode.add_sample(sample)
    return [[episode.sample() for episode in group] for group in groups]


def answer(
    engine: Engine, rows: Sequence[Row], environment: Environment | None, **sampling: Any
) -> list[list[Sample]]:
    """Sample completions of the rows' prompts, or episodes if there is an environment."""
    if environment:
        return play(engine, environment, rows, **sampling)
    return engine.generate([row["prompt"] for row in rows], **sampling)


def answer_cached(
    path: Path,
    settings: dict[str, Any],
    rows: Sequence[dict],
    environment: Environment | None,
    opened: Callable[[], Engine],
    **sampling: Any,
) -> list[list[Sample]]:
    """Return completions of all rows; sample those that the file lacks, and add them to it.

    Rows with the same prompt, and the same columns for the environment, share their completions.

    Args:
        path: The JSON file.
        settings: Everything that the completions depend on, except the prompts, as JSON types. A
            file that was written with other settings is not read.
        rows: Rows with a prompt, and the columns that the environment reads.
        environment: The environment of the task, if there is one.
        opened: A function that returns the engine; it is called only if a completion is missing.
        sampling: Fields of `Sampling`.
    """
    columns = [environment.columns(row) if environment else {} for row in rows]
    pairs = zip(rows, columns, strict=True)
    keys = [json.dumps([row["prompt"], more], default=json_key) for row, more in pairs]
    stored = read_json(path) if path.exists() else {}
    bare = {"ids": ()}  # nothing reads the token ids later
    samples = stored["completions"] if stored.get("settings") == settings else {}
    if missing := {k: row for k, row in zip(keys, rows, strict=True) if k not in samples}:
        groups = answer(opened(), list(missing.values()), environment, **sampling)
        lines = [[each._asdict() | bare for each in group] for group in groups]
        samples |= zip(missing, lines, strict=True)
        write_json(path, {"settings": settings, "completions": samples})
    return [
        [Sample(**line | bare | {"messages": tuple(line["messages"])}) for line in samples[key]]
        for key in keys
    ]


def replay(environment: Environment, row: Row, messages: Sequence[Message]) -> Played:
    """Run an episode's calls again and return the instance in its final state.

    As in the episode itself, calls in turns beyond the limit are not run.
    """
    episode = Episode(environment, row)
    for message in messages:
        if message.get("tool_calls"):
            episode.add_turn(message)
    return episode.played


def script(turns: Sequence[Any]) -> list[Message]:
    """Convert the turns of an author's `solve` to messages.

    A turn is a string, a call {"name": …, "arguments": …}, or a list of calls.

    Raises:
        ValueError: A turn is none of these; the message quotes it.
    """
    messages = []
    for turn in turns:
        calls = [] if isinstance(turn, str) else turn if isinstance(turn, list) else [turn]
        for call in calls:
            if not isinstance(call, Mapping) or {*call} != {"name", "arguments"}:
                raise ValueError(
                    f'solve gave the turn {turn!r}: give a text, or a call such as {{"name": '
                    '"guess", "arguments": {"number": 4}}'
                )
        tool_calls = [{"type": "function", "function": dict(call)} for call in calls]
        message = {"role": "assistant", "content": turn if isinstance(turn, str) else ""}
        messages.append(message | ({"tool_calls": tool_calls} if tool_calls else {}))
    return messages


def tools_of(config: "RunConfig", tokenizer: "PreTrainedTokenizerBase") -> list[Mapping[str, Any]]:
    """Return the tools listed in the run's prompts, and prepare the tokenizer for their calls.

    Raises:
        ValueError: The environment cannot be loaded, or the chat template does not support tools.
    """
    environment = of(config)
    if environment is None:
        return []
    template.with_tools(tokenizer)
    return environment.tools
