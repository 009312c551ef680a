"""Read an environment's episodes turn by turn, change their turns, and play them again."""

import html
import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb import environments
from grpo_nb.environments.findings import findings
from grpo_nb.environments.play import Episode, script
from grpo_nb.environments.scripted import Policy, Turn, follow, perform, policies
from grpo_nb.models import template, tool_calls
from grpo_nb.reward_lab import Bench, RewardTest
from grpo_nb.rewards.prompts import Message, completion_text, transcript
from grpo_nb.runs import Check, Checks
from grpo_nb.views import tables
from grpo_nb.views.widgets import View, row_list

OWN = "your own turns"
HELP = """Write one turn per line: a call {"name": "…", "arguments": {…}}, a list of calls, or a \
text in quotes, which ends the episode."""


class EnvironmentLab(View):
    """Show an environment's findings, and episodes by the base model, scripts and the user.

    Args:
        test: The test, with an environment; its baseline rollouts are episodes.
    """

    def __init__(self, test: RewardTest) -> None:
        super().__init__()
        self.stage, self.rows, self.baseline, self.bench = test
        self._make_widgets()
        self.on(self._take_row, self.number)
        self.on(self._take_player, self.player)
        self.guard(self._test)

    def _make_widgets(self) -> None:
        self.number = row_list(self.baseline.rows, "Row")
        self.player = w.Select(description="Player", rows=12, layout={"width": "28em"})
        self.box = self.code_box("Turns", HELP, rows=9)
        self.box.style.description_width = "initial"
        self.test = self.button("Test", "Read the class again, and test it", self._test)
        self.play = self.button("Play", "Play these turns", self._play)
        self.findings, self.view = w.HTML(), w.HTML()
        editor = [self.box, w.HBox([self.play]), self.errors]
        players = w.HBox([self.player, w.VBox(editor, layout={"flex": "1", "min_width": "0"})])
        self.children = [self.findings, w.HBox([self.test]), self.number, players, self.view]

    @property
    def row(self) -> dict[str, Any]:
        """Return the selected row."""
        return self.baseline.rows[self.number.value]

    def _test(self) -> None:
        """Reload the class from its file, and show the findings of scripted policies."""
        environment = environments.of(self.stage.config)
        self.bench = self.bench._replace(environment=environment)
        cap = self.bench.train.max_completion_length
        faults = findings(environment, self.rows, self.bench.tokenizer, cap)
        sound = Check(environment.title, "ok", "scripted policies find no fault")
        self.findings.value = tables.table(Checks(faults or [sound]).table())
        self._take_row()

    def _take_row(self) -> None:
        """List the players of the row: the base model, scripted policies, and the user."""
        samples = self.baseline.samples_P_G[self.number.value]
        self.group = self.bench.table([self.row], [[each.completion for each in samples]])
        other = self.baseline.rows[(self.number.value + 1) % len(self.baseline.rows)]
        self.policies = policies(self.bench.environment, self.row, other)
        scores = self.group[["total", "advantage"]].itertuples(name=None)
        label = "rollout {} (reward {:.3g}, advantage {:+.2f})".format
        rollouts = [(label(i + 1, total, gain), i) for i, total, gain in scores]
        scripts = [(f"scripted: {name}", name) for name in self.policies]
        self.player.index = None  # so that selecting the first player below is a change
        self.player.options = [*rollouts, *scripts, (OWN, OWN)]
        self.player.index = 0

    def _take_player(self) -> None:
        player = self.player.value
        if isinstance(player, int):
            sample = self.baseline.samples_P_G[self.number.value][player]
            prompt = Episode(self.bench.environment, self.row).prompt
            self._show(prompt, sample.messages, sample.ended, self.group.iloc[player])
        elif player in self.policies:
            self._perform(self.policies[player])

    def _play(self) -> None:
        """Play the turns in the box."""
        turns, self.player.value = turns_of(self.box.value), OWN
        self._perform(partial(follow, turns))

    def _perform(self, policy: Policy) -> None:
        """Play an episode with the policy; show it, scored as an additional member of the group."""
        self.view.value = ""
        episode = perform(self.bench.environment, self.row, policy, self.number.value)
        scores = self.bench.table([self.row], [[episode.messages]])
        group = pd.concat([self.group, scores], ignore_index=True)
        scores = self.bench.weighed(group, len(group)).iloc[-1]
        self._show(episode.prompt, episode.messages, episode.ended, scores)

    def _show(self, prompt: Any, messages: Sequence, ended: str, scores: pd.Series) -> None:
        lines = [_line(message) for message in messages if message["role"] == "assistant"]
        self.box.value = "\n".join(line for line in lines if line != '""')
        rewards = [f"{tables.short(f)} {scores[f]:.3g}" for f in self.bench.preset.names]
        parts = f" ({', '.join(rewards)})" if rewards[1:] else ""
        caption = (
            f"<b>{self.player.label.partition(' (')[0]}</b>, ended: {ended}\n"
            f"reward {scores['total']:.3g}{parts}, mean of the group {scores['mean']:.3g}, "
            f"advantage {scores['advantage']:+.2f}"
        )
        self.view.value = episode_page(self.bench, prompt, messages, caption)


def _line(message: Message) -> str:
    """Return a message as one line of the text box."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    turn = calls[0] if len(calls) == 1 else calls or completion_text([message])
    return json.dumps(turn, ensure_ascii=False, default=str)


def turns_of(text: str) -> list[Turn]:
    """Parse text in which each line is a turn, as JSON.

    Raises:
        ValueError: A line is not a turn; the message names the line.
    """
    turns = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            turns += [json.loads(line)] if line.strip() else []
            script(turns)
        except ValueError:
            raise ValueError(f"line {number} is not a turn: {line:.80}\n{HELP}") from None
    return turns


def episode_page(
    bench: Bench, prompt: list[Message], messages: Sequence[Message], caption: str
) -> tables.Page:
    """Render an episode turn by turn; turns that are masked from the loss are grey.

    Args:
        bench: The bench, with its environment and the tokenizer that counts tokens.
        prompt: The prompt, including the text that `reset` returned.
        messages: The episode's messages.
        caption: The caption, as HTML.
    """
    by_role = groupby(messages, lambda message: message["role"])
    groups = [prompt, *(list(group) for _, group in by_role)]
    roles = [", ".join(message["role"] for message in group) for group in groups]
    texts = [tables.text(transcript(group) or "(says nothing)") for group in groups]
    grey = [number for number, role in enumerate(roles) if role != "assistant"]
    tokenizer, tools = tool_calls.with_tools(bench.tokenizer), bench.environment.tools
    chat = [*template.fold_system(tokenizer, prompt), *messages]
    whole = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False).rstrip()
    tokens = len(tokenizer(whole, add_special_tokens=False)["input_ids"])
    tokens -= template.count_tokens(tokenizer, [prompt], tools)[0]
    caption += f"\n{tokens} of {bench.train.max_completion_length} tokens; grey: masked"
    sheet = tables.markup(["", "turn"], zip(roles, texts, strict=True), caption, grey)
    reading = f"<div class='text'>{html.escape(whole)}</div>"
    details = f"<details class='sheet'><summary>as the model reads it</summary>{reading}</details>"
    return tables.Page(sheet + details, transcript([*prompt, *messages]))
