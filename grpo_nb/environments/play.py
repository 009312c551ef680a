"""Episodes: the model speaks, its calls are run, it reads the results, until it calls no more.

    [[episode]] = play(engine, environment, rows, max_completion_length=128)

This is the loop of TRL's GRPOTrainer, token by token, for whoever does not train: baseline
rollouts, validation, evaluation, chat and the Environment Lab. An episode's completion is all
that follows the prompt; what the environment wrote of it is masked from the loss.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from grpo_nb.environments.contract import Environment, Played, of
from grpo_nb.models import chat
from grpo_nb.models.engine import Engine, Sample, Sampling
from grpo_nb.rewards.prompts import Message, transcript
from grpo_nb.runs.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]


class Episode:
    """An episode under way, whoever plays.

    Args:
        environment: It is played in.
        row: It begins with.
        used: An instance to play in; None: a new one.

    Attributes:
        prompt: What it began with, the words of `reset` included.
        messages: The player's turns and the results.
        turns: Of them, those with calls that were run.
        ended: Why; "" while it goes on.
    """

    def __init__(self, environment: Environment, row: Row, used: Played | None = None) -> None:
        self.environment, self.max_turns = environment, environment.max_turns
        self.played = used or environment.factory()
        said, [*before, last] = self.played.reset(**row), row["prompt"]
        added = {} if said is None else {"content": last["content"] + str(said)}
        self.prompt: list[Message] = [*before, last | added]
        self.messages: list[Message] = []
        self.turns, self.ended = 0, ""

    def say(self, message: Message) -> list[Message]:
        """The results of the calls in the player's next turn; without any, the episode is over."""
        self.messages += [message] if message else []
        calls = message.get("tool_calls")
        if not calls or self.turns == self.max_turns:
            self.ended = "turn limit" if calls else "answered"
            return []
        results = [run_call(self.played, call) for call in calls]
        self.messages, self.turns = self.messages + results, self.turns + 1
        return results


class Sampled(Episode):
    """An episode that a model plays, token by token.

    Args:
        environment: It is played in.
        row: It begins with.
        tokenizer: Prepared by `chat.with_tools`.
        cap: Of all turns, results included [tokens].
    """

    def __init__(
        self, environment: Environment, row: Row, tokenizer: "PreTrainedTokenizerBase", cap: int
    ) -> None:
        super().__init__(environment, row)
        self.tokenizer, self.cap, self.truncated = tokenizer, cap, False
        [self.prompt_ids] = chat.encode(tokenizer, [self.prompt], environment.tools)
        self.ids: list[int] = []
        self.mask: list[int] = []  # 1: the model's token; 0: the environment's

    def hear(self, said: Sample) -> None:
        """What the model says next; then its calls are run, or the episode is over."""
        ids = said.ids[: self.cap - len(self.ids)]
        self.truncated = said.truncated or len(ids) < len(said.ids)
        before = self.prompt_ids + self.ids
        self.ids, self.mask = self.ids + ids, self.mask + [1] * len(ids)
        results = self.say(chat.parse(self.tokenizer, ids, before) if ids else {})
        if self.ended == "answered" and self.truncated:
            self.ended = "cut off"
        heard = chat.tool_turn(self.tokenizer, results) if results else []
        if len(self.ids) + len(heard) > self.cap:  # TRL rolls such results back as well
            self.ended, self.messages = "no room for a result", self.messages[: -len(results)]
        else:
            self.ids, self.mask = self.ids + heard, self.mask + [0] * len(heard)

    def sample(self) -> Sample:
        """The episode as a completion; its tokens are all that the cap counts."""
        text, ended = transcript(self.messages), "a call hung" if self.played.hung else self.ended
        told = self.ids, self.mask, tuple(self.messages), ended
        return Sample(text, len(self.ids), self.truncated, *told)


def begin(environment: Environment, row: Row) -> tuple[Played, list[Message]]:
    """An instance at the start of the row's episode, and the prompt, with what `reset` says."""
    episode = Episode(environment, row)
    return episode.played, episode.prompt


def run_call(played: Played, call: Mapping[str, Any]) -> Message:
    """The message that answers a call, as TRL words it."""
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
    """Episodes of each row, [rows][num_generations].

    Args:
        engine: The model that plays.
        environment: Its tools answer.
        rows: [rows] with a prompt, and the columns that `reset` takes.
        sampling: The fields of `Sampling`; max_completion_length spans all turns of an episode,
            results included.
    """
    asked, tokenizer = Sampling(**sampling), chat.with_tools(engine.tokenizer)
    told, again = (tokenizer, asked.max_completion_length), range(asked.num_generations)
    groups = [[Sampled(environment, row, *told) for _ in again] for row in rows]
    go_on, seed = [one for group in groups for one in group], count(asked.seed)
    while go_on := [one for one in go_on if not one.ended]:
        once = asked._replace(num_generations=1, seed=next(seed))
        said = engine.complete([one.prompt_ids + one.ids for one in go_on], once)
        for one, sample in zip(go_on, said, strict=True):
            one.hear(sample)
    return [[one.sample() for one in group] for group in groups]


def answer(
    engine: Engine, rows: Sequence[Row], environment: Environment | None, **sampling: Any
) -> list[list[Sample]]:
    """Completions of the rows' prompts, or their episodes: whoever asks a model asks here."""
    if environment:
        return play(engine, environment, rows, **sampling)
    return engine.generate([row["prompt"] for row in rows], **sampling)


def replay(environment: Environment, row: Row, messages: Sequence[Message]) -> Played:
    """The instance as it was at the end of an episode: its calls, run once more.

    Those of a turn beyond the limit were not run.
    """
    episode = Episode(environment, row)
    for message in messages:
        if message.get("tool_calls"):
            episode.say(message)
    return episode.played


def script(turns: Sequence[Any]) -> list[Message]:
    """Turns of an author's `solve`, as messages: a text, a call {"name": …, "arguments": …}, or
    a list of calls.

    Raises:
        ValueError: A turn is none of them; the message holds it.
    """
    messages = []
    for turn in turns:
        calls = [] if isinstance(turn, str) else turn if isinstance(turn, list) else [turn]
        for one in calls:
            if not isinstance(one, Mapping) or {*one} != {"name", "arguments"}:
                raise ValueError(
                    f"solve gave the turn {turn!r}: give a text, or a call as "
                    '{"name": "guess", "arguments": {"number": 4}}'
                )
        called = [{"type": "function", "function": dict(one)} for one in calls]
        said = {"role": "assistant", "content": turn if isinstance(turn, str) else ""}
        messages.append(said | ({"tool_calls": called} if called else {}))
    return messages


def figures(messages: Sequence[Message], opens_call: str) -> dict[str, float]:
    """What an episode's messages say of its calls.

    Args:
        messages: Of the episode.
        opens_call: What opens a call in the model's text: `chat.opens_call`.

    Returns:
        turns (with calls), calls, tool_errors, malformed (turns that meant to call, and whose call
        nobody could read), and at_limit (1 where a limit ended it in a call).
    """
    said = [message for message in messages if message["role"] == "assistant"]
    calls = [message.get("tool_calls") or [] for message in said]
    heard = [str(message["content"]) for message in messages if message["role"] == "tool"]
    unread = [one for one, call in zip(said, calls, strict=True) if not call]
    return {
        "turns": float(sum(map(bool, calls))),
        "calls": float(sum(map(len, calls))),
        "tool_errors": float(sum(text.startswith("{'error': ") for text in heard)),
        "at_limit": float(bool(calls and calls[-1] and messages[-1]["role"] == "assistant")),
        "malformed": float(sum(opens_call in str(one["content"]) for one in unread)),
    }


def tools_of(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Mapping[str, Any]]:
    """The tools that the run's prompts tell of; the tokenizer is made fit for their calls.

    Raises:
        ValueError: The environment cannot be loaded, or the template knows no tools.
    """
    environment = of(config)
    if environment is None:
        return []
    chat.with_tools(tokenizer)
    return environment.tools
