"""The chat: base and tuned model answer the same prompt, side by side."""

import html
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as w

from grpo_nb.views.infer import Chat, Said, answers_page


class ChatPanel(w.VBox):
    """A question, typed; its two answers as they are written, and their scores if a gold is given.

    Enter in either field asks. The models are loaded at the first question.

    Args:
        chat: Of a trained run.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._lock = threading.Lock()  # a click may come on another thread while one is answered
        wide = w.Layout(flex="1 1 16em")
        self.question = w.Text(placeholder="a question", description="Question", layout=wide)
        narrow = w.Layout(flex="0 1 18em")
        self.gold = w.Text(placeholder="optional: scores them", description="Gold", layout=narrow)
        self.button = w.Button(description="Ask", button_style="primary", layout={"width": "7em"})
        look = {"description": "Temperature", "readout_format": ".1f"}
        look["style"] = {"description_width": "initial"}
        self.temperature = w.FloatSlider(0.0, min=0.0, max=2.0, step=0.1, **look)
        self.seed = w.IntText(0, description="Seed", layout=w.Layout(width="12em"))
        self.status, self.errors, self.view = w.HTML(), w.HTML(), w.HTML()
        asked = w.HBox(
            [self.question, self.gold, self.button], layout=w.Layout(flex_flow="row wrap")
        )
        how = w.HBox([self.temperature, self.seed, self.status])
        super().__init__(children=[asked, how, self.errors, self.view])
        self.button.on_click(partial(self._guard, self._ask))
        for field in (self.question, self.gold):
            field.on_msg(self._entered)

    def __repr__(self) -> str:
        return "The chat: run this notebook to use it"

    def _entered(self, _: Any, content: dict, buffers: Any) -> None:
        if content.get("event") == "submit":  # Enter
            self._guard(self._ask)

    def _guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run it, unless a question is being answered; an error is shown here."""
        if not self._lock.acquire(blocking=False):
            return
        self.button.disabled, self.errors.value = True, ""
        try:
            action()
        except Exception:
            text = html.escape(traceback.format_exc())
            look = "border-left: 4px solid #d33; padding-left: 8px; white-space: pre-wrap"
            self.errors.value = f"<pre role='alert' style='{look}'>{text}</pre>"
        finally:
            self.status.value, self.button.disabled = "", False
            self._lock.release()

    def _ask(self) -> None:
        if not self.question.value.strip():
            raise ValueError("type a question first")
        row = self.chat.row(self.question.value.strip(), self.gold.value.strip())
        said = {"base": Said(""), "tuned": Said("")}
        self.view.value = answers_page(row, said)
        how = {"temperature": self.temperature.value, "seed": self.seed.value}
        for model in said:
            self.status.value = f"<span role='status'>{model} is answering…</span>"

            def show(text: str, model: str = model) -> None:
                self.view.value = answers_page(row, said | {model: Said(text)})

            said[model] = self.chat.answer(row, model, **how, on_text=show)
            self.view.value = answers_page(row, said)
