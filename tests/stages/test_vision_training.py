"""Training and merging models that read images, as random tiny ones of current families."""

import pandas as pd
import pytest
import torch
import vision_families
from trainings import stop_at
from vision_families import FAMILIES, learn, trainer_of

import grpo_nb
from grpo_nb import models, stages
from grpo_nb.models import hub, template
from grpo_nb.runs import Run
from grpo_nb.training import stock


@pytest.fixture(scope="module", autouse=True)
def smolvlm():
    with vision_families.smolvlm_loads():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("vision")
    return {name: vision_families.build(name, parent) for name in FAMILIES}


def chats_of(trainer, count):
    return list(map(stock.chat_of, stock.rows_of(trainer, count)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_learns_from_images_and_merges_as_it_was_trained(folders, name, runs_dir):
    moved, _, checks, parity = learn(name, folders[name])
    assert moved[0] == moved[1] > 0
    assert {check.state for check in checks.values()} == {"ok"}, checks
    assert parity["kl"] < 1e-4


TWICE = {"grpo.max_steps": 4, "grpo.save_steps": 2, "grpo.learning_rate": 1e-2}


def test_a_training_that_goes_on_ends_with_the_same_bytes_and_logs_no_image(folders, runs_dir):
    straight, updates = trainer_of(folders["qwen3_vl"], "straight", **TWICE), []
    straight.monitor.watchers.append(updates.append)
    straight.train()
    cut = trainer_of(folders["qwen3_vl"], "cut", **TWICE)
    stop_at(cut, 2)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = trainer_of(folders["qwen3_vl"], "cut", **TWICE)
    assert again.plan == "goes on after step 2 of 4"
    again.train()
    weights = [
        (Run(name) / "train/checkpoint-4/adapter_model.safetensors").read_bytes()
        for name in ("straight", "cut")
    ]
    assert weights[0] == weights[1]
    completions = [record for update in updates for record in update.completions]
    for record in completions:  # each with its own image: of the even questions, red discs
        red, _, blue = record["images"][0].getpixel((28, 28))
        assert (red > blue) == (int(record["question"][6:-1]) % 2 == 0)
    for path in (Run("straight") / "train/completions").iterdir():
        assert path.stat().st_size < 20_000 and b"\x89PNG" not in path.read_bytes()
        assert "PIL" not in pd.read_parquet(path).to_string()
    Run("straight").write_config(straight.stage.config)  # as stage 03 does
    table = stages.read_completions(Run("straight"), straight.rewards)
    assert sorted(table["question"]) == sorted(record["question"] for record in completions)


def test_trl_and_the_engine_read_the_same_tokens_of_a_row_that_keeps_its_pixels(folders, runs_dir):
    for name, folder in folders.items():
        trainer = trainer_of(folder, name)
        chats, rows = chats_of(trainer, 4), trainer.train_dataset.select(range(4))
        by_trl, images, _ = trainer._tokenize_prompts(chats)
        assert by_trl == template.encode(trainer.policy.tokenizer, chats), name
        for row, chat, [image] in zip(rows, chats, images, strict=True):
            [own] = row["images"]
            assert own.size == image.size
            assert own.tobytes() == template.images_of(chat)[0].tobytes()
            assert [part["type"] for part in row["prompt"][-1]["content"]] == ["image", "text"]


def test_rows_with_and_without_images_are_refused_together(folders, runs_dir):
    """Of four families three fail in TRL's loss, at the first micro-batch without an image."""
    with pytest.raises(ValueError, match=r"12 of 24 prompts have no image"):
        trainer_of(folders["qwen2_5_vl"], "mixed", mixed=True)


def test_the_tower_learns_if_it_has_an_adapter(folders, runs_dir):
    settings = {"lora.finetune_vision_layers": True}
    moved, *_ = learn("qwen3_vl", folders["qwen3_vl"], **settings)
    assert moved[0] == moved[1] > 14


def test_trl_samples_no_token_of_an_image(folders, runs_dir):
    """It would end the training: more tokens of images than images."""
    trainer = trainer_of(folders["qwen2_5_vl"], "sampling")
    tokens = hub.image_tokens(trainer.policy.model.config)
    head = trainer.policy.model.get_base_model().lm_head.weight
    with torch.no_grad():
        head[tokens] = 50 * head[tokens]
    _, completions, *_ = trainer._generate(chats_of(trainer, 8))
    assert not {token for ids in completions for token in ids} & set(tokens)
    trainer.policy.model.generation_config.suppress_tokens = None
    _, completions, *_ = trainer._generate(chats_of(trainer, 8))
    assert {token for ids in completions for token in ids} & set(tokens)


def test_the_guard_notices_samples_that_did_not_see_the_image(folders, runs_dir):
    trainer = trainer_of(folders["qwen2_5_vl"], "blind")
    grpo_nb.Guard(trainer, every=1)
    model = trainer.policy.model.get_base_model()
    with torch.no_grad():
        model.lm_head.weight *= 20  # a model that is sure of what it writes
    sample = trainer._generate_single_turn

    def blind(ids, images, fields, *args, **kwargs):
        fields = {**fields, "pixel_values": torch.zeros_like(torch.tensor(fields["pixel_values"]))}
        return sample(ids, images, fields, *args, **kwargs)

    trainer._generate_single_turn = blind
    with pytest.raises(RuntimeError, match="do not come from the policy"):
        trainer.train()


def test_the_warm_up_learns_with_images(folders, runs_dir):
    from grpo_nb.stages.warm_start import train_on

    settings = {"train.sft_steps": 12, "data.sft_rows": 8, "train.sft_learning_rate": 1e-2}
    config = vision_families.settings_of(folders["qwen3_vl"], **settings)
    policy = models.load_policy(config)
    examples = [
        row | {"completion": [{"role": "assistant", "content": row["answer"]}]}
        for row in vision_families.rows(16)
    ]
    lines = train_on(policy, vision_families.stage_of("warm", config), examples)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
