"""Episodes: our loop is TRL's, token by token, and what goes with one is right."""

import json

import pytest
import torch
from datasets import Dataset
from trainings import make_run, trainer_of
from trl import GRPOConfig, GRPOTrainer

import grpo_nb
from grpo_nb import environments, models, rewards, stages, training
from grpo_nb.environments.play import Episode
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import hub, template, use_torch_head
from grpo_nb.models.engine import TransformersEngine
from grpo_nb.rewards.prompts import build_prompt

BASE = PROJECT_ROOT / "data/agent_base"
CAP, SIDES = 96, ("prompt", "completion")


def rows_of(name, count):
    environment = environments.load(name)
    lines = (PROJECT_ROOT / f"data/tasks/{name}.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    system = environment.system_prompt
    return environment, [row | {"prompt": build_prompt(row["question"], system)} for row in rows]


@pytest.fixture(scope="module")
def engine():
    use_torch_head()  # TRL's own product with the head needs a GPU
    model = models.load_checkpoint(str(BASE), adapter=None, quantization="16bit")
    return TransformersEngine(model.float(), hub.load_tokenizer(str(BASE)))


def trls_trainer(engine, environment, rows, kind, folder):
    """TRL's own, greedy; `kind` is what it makes an environment for each rollout of."""
    options = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": []}
    options |= {"top_k": 1, "num_generations": 2, "per_device_train_batch_size": 32}
    options |= {"max_tool_calling_iterations": environment.max_turns}
    return GRPOTrainer(
        engine.model,
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(max_completion_length=CAP, **options),
        Dataset.from_list(rows),
        processing_class=engine.tokenizer,
        environment_factory=kind,
    )


def test_trl_takes_the_authors_own_class(engine, tmp_path):
    environment, rows = rows_of("calculator", 16)
    trainer = trls_trainer(engine, environment, rows, environment.kind, tmp_path)
    [tools] = trainer._env_tools.values()
    assert [one.__name__ for one in tools] == [*environment.methods] == ["answer", "multiply"]


def log_probabilities(model, prompt, completion):
    """Of an episode's tokens, alone and without padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def theirs(trainer, seen):
    """The same of TRL's, of its whole padded batch."""
    parts = [[seen[f"{side}_{part}"] for side in SIDES] for part in ("ids", "mask")]
    ids, mask = (torch.cat(part, 1) for part in parts)
    width = seen["completion_ids"].shape[1]
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]


@pytest.mark.parametrize("name", ["calculator", "guess"])
def test_an_episode_has_the_tokens_and_log_probabilities_of_trls(engine, name, tmp_path):
    environment, rows = rows_of(name, 16)
    [*ours] = environments.play(engine, environment, rows, max_completion_length=CAP)
    trainer = trls_trainer(engine, environment, rows, environment.factory, tmp_path)
    seen = trainer._generate_and_score_completions([row for row in rows for _ in range(2)])
    lengths, logs_N_T = seen["completion_mask"].sum(1), theirs(trainer, seen)
    for place, [episode] in enumerate(ours):
        for twin in (2 * place, 2 * place + 1):
            assert seen["completion_ids"][twin, : lengths[twin]].tolist() == list(episode.ids)
        ids = seen["prompt_ids"][2 * place][seen["prompt_mask"][2 * place].bool()].tolist()
        prompt = Episode(environment, rows[place]).prompt
        text = template.render(engine.tokenizer, prompt, environment.tools)
        assert engine.tokenizer(text)["input_ids"] == ids
        logs = log_probabilities(engine.model, ids, list(episode.ids))
        assert torch.allclose(logs, logs_N_T[2 * place, : len(logs)], atol=1e-5)
    assert (seen["tool_mask"] == 0).any(), "no tool was called"


@pytest.fixture
def trainer(runs_dir):
    """Of a run on the guessing game, through our trainer."""
    environment = environments.load("guess")
    told = {"data.system_prompt": environment.system_prompt, "data.max_rows": 40}
    short = {"grpo.max_steps": 2, "train.eval_steps": 2, "grpo.max_completion_length": CAP}
    run = make_run("plays", task="guess", **told, **short)
    return trainer_of(run, chosen=rewards.load_preset("environment"), task="guess", **short)


def test_a_training_plays_logs_and_validates_episodes(trainer):
    states = {check.name: check.state for check in grpo_nb.preflight(trainer)}
    assert "stop" not in states.values()
    trainer.train()
    lines = training.read_lines(trainer.folder / "metrics.jsonl")
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == 2 and all(0 < line["tools/call_frequency"] <= 4 for line in steps)
    assert {"eval/accuracy", "eval/reward"} <= {key for line in lines for key in line}
    table = stages.read_completions(trainer.stage.run, trainer.rewards)
    assert table["completion"].str.contains(r"guess\(n=\d+\)\n→ (?:higher|lower|right)").any()
    assert (table["environment_reward"] > 0).any()
