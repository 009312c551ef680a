"""The shipped base for tools: small, safe, half competent, and read alike by everyone."""

import re

import pytest

from grpo_nb import environments, models
from grpo_nb.files import project_path
from grpo_nb.models import hub, template
from grpo_nb.rewards.prompts import build_prompt

FOLDER = project_path("data/agent_base")
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")
GAMES = ["calculator", "guess"]


@pytest.fixture(scope="module")
def tokenizer():
    return hub.load_tokenizer(str(FOLDER))


def test_its_template_keeps_what_the_trainer_and_the_package_ask_for(tokenizer):
    from trl.chat_template_utils import is_chat_template_prefix_preserving, supports_tool_calling

    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    for system in ("", "Play."):
        assert template.check_template(tokenizer, build_prompt("47 x 38 = ?", system)).state == "ok"


@pytest.mark.parametrize("content", ["", "I work it out."])
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_survive_the_way_to_text_and_back(tokenizer, content, calls):
    function = {"name": "multiply", "arguments": {"a": 47, "b": 38}}
    turn = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}] * calls,
    }
    question = [{"role": "user", "content": "47 x 38 = ?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*question, turn], tokenize=False)
    answer = whole.removeprefix(prompt).removesuffix("\n")
    ids = (tokenizer(answer)["input_ids"], tokenizer(prompt)["input_ids"])
    assert ids[0][-1] == tokenizer.eos_token_id, "the stop token ends a turn with calls, too"
    parsed = tokenizer.parse_response(ids[0], prefix=ids[1])
    assert {"content": "", **parsed} == turn


@pytest.mark.parametrize("name", GAMES)
def test_it_wins_as_often_as_its_card_says(tokenizer, name):
    """Greedily: the share of episodes that win, and of first turns that are a call."""
    from make_environments import read_rows

    environment = environments.load(name)
    model = models.load_checkpoint(str(FOLDER), adapter=None, quantization="16bit")
    engine = models.TransformersEngine(model, tokenizer)
    rows = [
        {**row, "prompt": build_prompt(row["question"], environment.kind.__doc__)}
        for row in read_rows(name)[:100]
    ]
    played = environments.play(engine, environment, rows, max_completion_length=256)
    ends = [
        environments.replay(environment, row, one.messages)
        for row, [one] in zip(rows, played, strict=True)
    ]
    won = sum(end.get_reward() for end in ends) / len(rows)
    called = sum("tool_calls" in one.messages[0] for [one] in played) / len(rows)
    line = re.search(rf"\| {name} \| greedy \| (\d+) % \| (\d+) % \|", CARD)
    assert (won, called) == pytest.approx((int(line[1]) / 100, int(line[2]) / 100), abs=0.12)
    assert 0.1 <= won <= 0.5, "GRPO can gain 25 points and more"
