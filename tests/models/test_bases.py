"""The three shipped bases: small, safe, what their scripts make, and read alike by everyone.

That of arithmetic is imperfect on purpose, and ignorant of the shipped problems; that for tools is
half competent.
"""

import importlib
import json
import random
from unittest.mock import Mock

import make_arithmetic
import make_tiny_base
import pytest
from tokenizers import Tokenizer

from grpo_nb import data, evaluate, evaluation
from grpo_nb.files import project_path
from grpo_nb.models import hub, template
from grpo_nb.models.policy import import_unsloth
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 47, "b": 38}}\n</tool_call><|im_end|>'
# base: (its data, a few steps of its script)
BASES = {
    "tiny_base": (["arithmetic"], ["--steps", "2"]),
    "task_base": ([f"tasks/{t}" for t in ("code", "summarization", "qa", "json_extraction")], []),
    "agent_base": (["tasks/calculator", "tasks/guess"], ["--steps", "1"]),
}
PRESETS = {"arithmetic": "math", "tasks/calculator": "environment", "tasks/guess": "environment"}
each_base = pytest.mark.parametrize("name", BASES)


@each_base
def test_a_script_is_reproducible_and_its_tokenizer_is_the_shipped_one(name, tmp_path, monkeypatch):
    script = importlib.import_module(f"make_{name}")
    if name == "task_base":
        monkeypatch.setattr(script, "LESSONS", [(0.5, False, 1), (0.0, True, 1)])
    for folder in "ab":
        out = str(tmp_path / folder)
        monkeypatch.setattr("sys.argv", ["x", "--out", out, *BASES[name][1]])
        script.main()
    weights, again = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in "ab"]
    assert weights == again
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shipped = project_path(f"data/{name}/{file}")
        assert (tmp_path / "a" / file).read_bytes() == shipped.read_bytes()


@each_base
def test_every_reader_cuts_every_row_as_the_training_did(name):
    """AutoTokenizer is what TRL and vLLM call too; it builds the model type's own pre-tokenizer.

    A base is small, and holds no pickles.
    """
    folder, pairs = project_path(f"data/{name}"), []
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000
    suffixes = {path.suffix for path in folder.iterdir()}
    assert suffixes == {".json", ".jinja", ".md", ".safetensors"}
    for source in BASES[name][0]:
        lines = project_path(f"data/{source}.jsonl").read_text(encoding="utf-8").splitlines()
        preset = load_preset(PRESETS.get(source, source.partition("/")[2]))
        for row in map(json.loads, lines):
            said = CALL if name == "agent_base" else preset.reference(row)
            pairs.append((build_prompt(row["question"], preset.form.system_prompt), said))
    auto = hub.load_tokenizer(str(folder))
    parts = [(template.render(auto, prompt), completion) for prompt, completion in pairs]
    texts = [prompt + completion for prompt, completion in parts]
    ids = auto(texts)["input_ids"]
    # The training put prompt and completion together.
    assert ids == [auto(a)["input_ids"] + auto(b)["input_ids"] for a, b in parts]
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [encoding.ids for encoding in plain.encode_batch(texts)] == ids
    with hub.quiet():
        _, unsloth = import_unsloth().from_pretrained(str(folder), max_seq_length=128)
    assert unsloth(texts)["input_ids"] == ids


def test_tiny_base_starts_with_room_to_improve(runs_dir):
    config = resolve("tiny-cpu", {"data.eval_share": 0.25})
    data.prepare_run(Run("r"), config.data, 0, lambda prompts: [0] * len(prompts))
    held_out = data.load(Run("r"), "eval")[::2]
    results = evaluate({"base": "data/tiny_base"}, held_out, **evaluation.options(config))
    lines = results.samples["base"].groupby("decoding")[["accuracy", "format"]].mean()
    assert 0.55 <= lines["accuracy"]["sampled"] <= 0.7
    assert 0.45 <= lines["format"]["sampled"] <= 0.75
    assert lines["accuracy"]["greedy"] <= 0.7


def test_chats_of_its_training_never_hold_a_shipped_problem(monkeypatch):
    shipped = make_arithmetic.read_problems()
    assert len(shipped) == make_arithmetic.ROWS
    draws = random.Random(1)
    drawn = {make_arithmetic.sample_problem(draws) for _ in range(20_000)}
    assert drawn & shipped, "the sampler could draw them"
    steps = Mock(side_effect=make_tiny_base.column_steps)
    monkeypatch.setattr(make_tiny_base, "column_steps", steps)
    for _ in range(5000):
        make_tiny_base.sample_chat(shipped, draws)
    problems = [call.args[0] for call in steps.call_args_list]
    assert len(problems) == 5000 and not set(problems) & shipped
