"""A teacher: only answers that the run's rewards call right are shown, and none is asked twice."""

import re

import pytest
from judge_server import serving
from trainings import make_run

from grpo_nb import data, models, training
from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.training.teacher import KEPT_AT, right_answers

MATH = load_preset("math")


@pytest.fixture
def lesson(runs_dir, monkeypatch):
    """A function that lets a server teach 8 rows: settings -> (stage, rows, bench)."""
    monkeypatch.setenv("SECRET_KEY_OF_A_TEST", "sk-never-in-a-file")

    def lesson(url, **settings):
        run = make_run("taught", **{"data.sft_rows": 8, "data.max_rows": 64})
        settings |= {"rescue.teacher": url, "train.sft_answers": "teacher", "data.sft_rows": 8}
        settings |= {"rescue.api_key_env": "SECRET_KEY_OF_A_TEST"}
        stage = Stage(run, "02", resolve("tiny-cpu", {"rescue.answers": 2}, settings))
        tokenizer = models.load_tokenizer(stage.config.model.model_path)
        return stage, data.load(run, "sft"), Bench(MATH, stage.config.train, tokenizer)

    return lesson


def solver(rows, wrong=()):
    """Answer a request rightly, except for the questions in `wrong`."""
    answers = {row["question"]: row["answer"] for row in rows}

    def reply(body):
        question = body["messages"][-1]["content"]
        answer = "12345" if question in wrong else answers[question]
        return f"<reasoning>seed {body['seed']}</reasoning><answer>{answer}</answer>"

    return reply


def test_only_right_and_different_answers_are_shown_and_none_is_asked_again(lesson, capsys):
    with serving() as server:
        stage, rows, bench = lesson(server.url)
        server.script = [solver(rows, wrong={rows[0]["question"]})]
        pairs = right_answers(stage, rows, bench)
        assert len(server.seen) == 16, "8 rows, 2 answers each"
        assert right_answers(stage, rows, bench) == pairs and len(server.seen) == 16
    assert len(pairs) == 14 and rows[0]["question"] not in {pair["question"] for pair in pairs}
    assert server.seen[0]["model"] == "served-model" and server.seen[0]["temperature"] == 1.0
    assert server.headers_seen[0]["authorization"] == "Bearer sk-never-in-a-file"
    written = [path.read_bytes() for path in stage.run.path.rglob("*") if path.is_file()]
    assert written and not [text for text in written if b"sk-never-in-a-file" in text]
    assert "answers 8 prompts 2 times: about" in capsys.readouterr().out


def test_the_price_is_told_before_the_first_request(lesson, capsys):
    with serving() as server:
        stage, rows, bench = lesson(server.url, **{"rescue.dollars_per_million_tokens": 5000.0})
        server.script = [solver(rows)]
        right_answers(stage, rows, bench)
    dollars = float(re.search(r"at most \$([\d.]+)", capsys.readouterr().out)[1])
    tokens = 2 * sum(row["prompt_tokens"] for row in rows) + 16 * 48
    assert tokens * 5000 / 1e6 * 0.5 < dollars < tokens * 5000 / 1e6 * 2


def test_an_interrupted_teacher_goes_on_where_it_was(lesson):
    with serving() as server:
        small = {"train.per_device_train_batch_size": 8}  # 4 rows in a batch
        stage, rows, bench = lesson(server.url, **small)
        server.script = [*[solver(rows)] * 8, 400]
        with pytest.raises(RuntimeError, match=r"Error code: 400.* the model's name"):
            right_answers(stage, rows, bench)
        assert (stage.run / KEPT_AT).exists()
        asked, server.script = len(server.seen), [solver(rows)]
        assert len(right_answers(stage, rows, bench)) == 16
        assert len(server.seen) - asked == 8, "the first batch is kept"


@pytest.mark.parametrize(
    ("reply", "error", "sentence"),
    [
        (401, RuntimeError, "Error code: 401.* variable SECRET_KEY_OF_A_TEST"),
        (404, RuntimeError, "Error code: 404"),
        (500, RuntimeError, "gives no answer .* received so far are kept"),
        (b"<html>", RuntimeError, "gives no answer"),
        (None, ValueError, "none of the 16 answers of .* in the form 'tags' .0% are correct, 0%"),
        ("I cannot help.", ValueError, "The first: 'I cannot help.'"),
        (r"\boxed{4}", ValueError, "Choose another rescue.teacher, or the rewards.form"),
        (
            "<reasoning>x</reasoning><answer>-1</answer>",
            ValueError,
            "none of the 16 .* 100% in the form",
        ),
    ],
)
def test_a_teacher_that_does_not_help_is_one_sentence(lesson, reply, error, sentence):
    with serving() as server:
        stage, rows, bench = lesson(server.url)
        server.script = [reply]
        with pytest.raises(error, match=sentence):
            right_answers(stage, rows, bench)


def test_a_model_in_a_folder_teaches_and_the_warm_up_shows_its_answers(runs_dir):
    run = make_run("folder", **{"data.sft_rows": 8, "data.max_rows": 64})
    settings = {"rescue.teacher": "data/tiny_base", "train.sft_answers": "teacher"}
    settings |= {"data.sft_rows": 8, "train.sft_steps": 2}
    stage = Stage(run, "02", resolve("tiny-cpu", settings))
    sentence = training.warm_up_base(stage)
    assert sentence.startswith("2 SFT warm-up steps")
    taught = re.search(
        r"the teacher solves (\d) of 8 rows; the base does not solve (\d) of them", sentence
    )
    assert 0 <= int(taught[2]) <= int(taught[1]) <= 8 and int(taught[1]) > 0
    tokenizer = models.load_tokenizer("data/tiny_base")
    rows = data.load(Run("folder"), "sft")
    pairs = right_answers(stage, rows, Bench(MATH, stage.config.train, tokenizer))
    answers = {row["question"]: row["answer"] for row in rows}
    texts = [(answers[pair["question"]], pair["completion"][0]["content"]) for pair in pairs]
    assert texts and all(f"<answer>{answer}</answer>" in text for answer, text in texts)
