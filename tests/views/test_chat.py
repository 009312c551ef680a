"""One question to base and tuned model of a run, and their answers side by side."""

import shutil
from contextlib import closing

import pytest

from grpo_nb import models, reward_lab
from grpo_nb.answers import TAGS
from grpo_nb.data.rows import write_rows
from grpo_nb.runs import Run, config
from grpo_nb.views import Chat

SUM = "What is 47 + 38?"
SAMPLED = {"temperature": 1.0, "seed": 3}
SYSTEM = {"role": "system", "content": TAGS.system_prompt}
ROW = {
    "prompt": [SYSTEM, {"role": "user", "content": "What is 9 + 6?"}],
    "question": "What is 9 + 6?",
    "answer": "15",
}


@pytest.fixture(scope="module")
def run(moved_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(folder))
        run = Run(shutil.copytree(moved_run.path, folder / "quick").name)
    write_rows(run / "data/eval.parquet", [ROW])
    return run


@pytest.fixture(scope="module")
def chat(run):
    return Chat(run)


def said(chat, question, model, **how):
    """What is known of one model's answer."""
    return chat.ask(question, model, **how).set_index("")[model].to_dict()


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_base_and_tuned_say_what_they_say_loaded_alone_and_differ(run, chat, how):
    answers = {}
    for model, adapter in (("tuned", run / "train/adapter"), ("base", None)):
        alone = models.open_engine("data/tiny_base", adapter=adapter, quantization="4bit")
        prompts = [[SYSTEM, {"role": "user", "content": SUM}]]
        [[expected]] = alone.generate(prompts, max_completion_length=48, **how)
        answers[model] = said(chat, SUM, model, **how)["completion"]
        assert answers[model] == expected.text
    assert answers["base"] != answers["tuned"]


def test_an_interrupt_while_the_base_answers_leaves_the_adapter_on(chat, monkeypatch):
    before = said(chat, SUM, "tuned")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("torch.nn.functional.embedding", interrupt)
        chat.ask(SUM, "base")
    assert said(chat, SUM, "tuned") == before


def test_the_answers_to_a_row_are_scored_side_by_side(chat):
    both = chat.ask(ROW)
    assert list(both) == ["", "base", "tuned"]
    answer = both.set_index("")["base"]
    judge = reward_lab.Bench(chat.preset, chat.config.grpo, models.load_tokenizer("data/tiny_base"))
    [expected, _] = judge.table([ROW], [[answer["completion"]] * 2])["total"]
    assert answer["total"] == expected and answer["reference"] == "15"
    assert said(chat, SUM, "base").keys() == {"question", "completion"}
    with pytest.raises(ValueError, match="tunned"):
        chat.ask(SUM, "tunned")


def test_models_are_asked_with_the_template_that_they_were_trained_with(run):
    settings = {"grpo.chat_template_kwargs": {"enable_thinking": False}}
    run.write_config(config.resolve("tiny-cpu", settings))
    with closing(Chat(run)) as chat:
        for engine in chat._engines.values():
            assert "enable_thinking = False" in engine.tokenizer.chat_template


def test_a_run_that_was_not_trained_says_so(runs_dir):
    untrained = Run("new")
    untrained.write_config(config.resolve("tiny-cpu", {}))
    with pytest.raises(FileNotFoundError, match="holds no train/adapter: run 03_train_grpo first"):
        Chat(untrained).ask(ROW)
