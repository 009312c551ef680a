"""Rows that are prepared as stage 01 prepares them, and what is left out of them."""

import json

from grpo_nb import data
from grpo_nb.rewards import load_preset, prompts
from grpo_nb.runs import Run, runs_root
from grpo_nb.runs.settings import DataConfig


def count(chats):
    """A token per word, and one per 100 pixels of an image."""
    words = [sum(len(prompts.message_text(turn).split()) for turn in chat) for chat in chats]
    images = [sum(i.width * i.height // 100 for i in prompts.images_of(chat)) for chat in chats]
    return [sum(pair) for pair in zip(words, images, strict=True)]


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prepare(rows, count=count, preset=None, **settings):
    """(train, held out, report) of these rows, or of the setting `source`, in run "r"."""
    settings = {"eval_rows": 1, "eval_share": 0.9} | settings
    if rows is not None:
        settings["source"] = write_jsonl(runs_root() / "rows.jsonl", *rows)
    chosen = preset or load_preset("math")
    report = data.prepare_run(Run("r"), DataConfig(**settings), 0, count, chosen)
    return data.load(Run("r"), "train"), data.load(Run("r"), "eval"), report


def dropped(report):
    """The numbers of the rows that were left out, by reason."""
    return {entry["reason"]: entry["rows"] for entry in report["dropped"]}
