"""`grpo_nb.evaluate` beside a notebook of one's own: plain rewards, plain rows, no run."""

import json
import re
import shutil

import pytest

import grpo_nb
from grpo_nb import models
from grpo_nb.rewards.prompts import build_prompt

TINY = "data/tiny_base"
ROWS = [
    {"prompt": build_prompt(f"What is {a} + {a + 7}?"), "target": str(2 * a + 7)}
    for a in range(20, 44)
]


def tidy(completions, **kwargs):
    """Stands first, and says nothing about the answer."""
    return [0.5 * ("</answer>" in one[0]["content"]) for one in completions]


def right(completions, target, **kwargs):
    answers = [re.findall(r"<answer>(.*?)</answer>", one[0]["content"]) for one in completions]
    return [float(a[-1:] == [t]) for a, t in zip(answers, target, strict=True)]


def compared(candidates, rows=ROWS, **options):
    options = {"samples": 1, "max_completion_length": 48} | options
    return grpo_nb.evaluate(candidates, rows, [tidy, right], **options)


@pytest.fixture(scope="module")
def adapter(moved_run):
    return moved_run.path / "train/adapter"


def test_an_adapter_of_noise_is_worse_than_its_base_and_the_sentence_says_by_how_much(adapter):
    result = compared({"base": TINY, "trained": (TINY, adapter)}, load_in_4bit=True)
    [pair] = result.report["comparisons"]
    assert pair["verdict"] == "worse" and pair["lost"] > pair["gained"]
    assert pair["sentence"] in str(result) and "right, read leniently" in str(result)
    lines = result.samples["base"].query("decoding == 'greedy'")
    assert lines["accuracy"].tolist() == lines["right"].tolist()  # the reward that reads the target
    assert lines["question"].iloc[0] == "What is 20 + 27?"
    assert result.samples["base"]["reward"].max() == 1.5


def test_a_loaded_model_answers_as_its_folder_does():
    tokenizer = models.load_tokenizer(TINY)
    model = models.load_checkpoint(TINY, adapter=None, quantization="16bit")
    result = compared({"folder": TINY, "loaded": (model, tokenizer)})
    texts = [table["completion"].tolist() for table in result.samples.values()]
    assert texts[0] == texts[1]
    assert result.report["comparisons"][0]["verdict"] == "not distinguishable"


def test_answers_that_are_cut_are_told():
    [pair] = compared({"a": TINY, "b": TINY}, ROWS[:6], max_completion_length=3).report[
        "comparisons"
    ]
    assert pair["sentence"].endswith("; 100 % of the answers of b were cut at the cap")


def test_an_adapter_is_asked_in_the_chat_template_that_was_saved_with_it(adapter, tmp_path):
    """A notebook may set its own; a trainer saves it beside the adapter."""
    own, folder = "{{ messages[-1].content }}", tmp_path / "checkpoint-1"
    shutil.copytree(adapter, folder)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        text = json.dumps({"chat_template": own}) if file.endswith(".json") else own
        (folder / file).write_text(text)
        assert models.load_tokenizer(TINY, adapter=folder).chat_template == own
    with pytest.raises(ValueError, match=re.escape("is an adapter: give (base, ")):
        compared({"trained": folder})
    grpo_nb.merge(TINY, folder, tmp_path / "merged", load_in_4bit=True)
    assert models.load_tokenizer(str(tmp_path / "merged")).chat_template == own


@pytest.mark.parametrize(
    ("candidates", "options", "words"),
    [
        ({"base": TINY}, {"rows": [{"prompt": "What is 1 + 1?", "target": "2"}]}, "is not a chat"),
        ({"base": TINY}, {"rows": []}, "holds no rows"),
        ({"base": TINY}, {"correct": "wright"}, "give the name of a reward: tidy, right"),
        ({}, {}, "give at least one, with its label"),
        ({"base": TINY}, {"samples": 0}, "samples = 0: give at least 1"),
        ({"base": TINY}, {"reward_weights": [1.0]}, "give one for each of 2 rewards"),
        ({"base": object()}, {}, "object alone cannot be asked: give (model, tokenizer)"),
        ({"base": TINY, "a": "data/nowhere/x"}, {}, "holds no config.json"),
        ({"base": TINY, "a": (TINY, "no/checkpoint-9")}, {}, "no/checkpoint-9"),
        ({"base": TINY, "a": (TINY, "no")}, {}, "adapter_config.json"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_model_is_loaded(
    candidates, options, words, monkeypatch
):
    monkeypatch.delattr("grpo_nb.evaluation.evaluate.open_engine")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
        compared(candidates, **options)
