"""One question to base and tuned model of a run, and their answers side by side."""

import shutil
from contextlib import closing

import pytest

from grpo_nb import models, reward_lab
from grpo_nb.runs import Run, config
from grpo_nb.views import Chat

SUM = "What is 47 + 38?"
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def chat(moved_run):
    return Chat(moved_run)


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_base_and_tuned_say_what_they_say_loaded_alone_and_differ(moved_run, chat, how):
    said = {}
    for model, adapter in (("tuned", moved_run / "train/adapter"), ("base", None)):
        alone = models.open_engine("data/tiny_base", adapter=adapter, quantization="4bit")
        prompts = [chat.row(SUM)["prompt"]]
        [[expected]] = alone.generate(prompts, max_completion_length=48, **how)
        said[model] = chat.answer(SUM, model, **how)["completion"]
        assert said[model] == expected.text
    assert said["base"] != said["tuned"]


def test_an_interrupt_while_the_base_answers_leaves_the_adapter_on(chat, monkeypatch):
    before = chat.answer(SUM, "tuned")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("torch.nn.functional.embedding", interrupt)
        chat.answer(SUM, "base")
    assert chat.answer(SUM, "tuned") == before


def test_a_gold_brings_the_scores_of_the_bench(chat):
    said = chat.answer(chat.row(SUM, "85"), "base")
    tokenizer = models.load_tokenizer("data/tiny_base")
    judge = reward_lab.Bench(chat.preset, chat.config.grpo, tokenizer)
    table = judge.table([chat.row(SUM, "85")], [[said["completion"]] * 2])
    assert said.items() <= table.iloc[0].to_dict().items() and {"total", "answer"} <= said.keys()
    assert chat.answer(SUM, "base").keys() == {"question", "completion", "answer"}


def test_a_cell_shows_both_answers_or_that_of_the_model_that_is_named(chat):
    page, shown = chat.ask(SUM, "base"), "<div class='text'>"  # question and completion
    assert page.count(shown) == 2 and "</mark>" in page
    assert "base\n" in repr(page) and SUM in repr(page) and "<reasoning>" in repr(page)
    assert chat.ask(SUM).count(shown) == 4
    with pytest.raises(ValueError, match="tunned"):
        chat.ask(SUM, "tunned")


def test_models_are_asked_with_the_template_that_they_were_trained_with(
    moved_run, tmp_path, monkeypatch
):
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path))
    run = Run(shutil.copytree(moved_run.path, tmp_path / "quick").name)
    settings = {"grpo.chat_template_kwargs": {"enable_thinking": False}}
    run.write_config(config.resolve("tiny-cpu", settings))
    with closing(Chat(run)) as chat:
        for engine in chat._engines.values():
            assert "enable_thinking = False" in engine.tokenizer.chat_template


def test_a_run_that_was_not_trained_says_so(runs_dir):
    untrained = Run("new")
    untrained.write_config(config.resolve("tiny-cpu", {}))
    with pytest.raises(FileNotFoundError, match="holds no train/adapter: run 03_train_grpo first"):
        Chat(untrained).answer(SUM)
