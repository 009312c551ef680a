import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.runs import config, profiles
from grpo_nb.runs.config import flatten


def test_a_misspelt_setting_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'train.max_stepz': did you mean 'train.max_steps'"):
        config.resolve("tiny-cpu", {"train.max_stepz": 3})
    with pytest.raises(ValueError, match=r"'trian.beta': did you mean 'train.beta'"):
        config.resolve("tiny-cpu", {"trian.beta": 3})
    with pytest.raises(ValueError, match=r"profile 'tiny-gpu': did you mean 'tiny-cpu'"):
        config.resolve("tiny-gpu")


def test_a_value_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"train.max_steps = 'many': input should be a valid int"):
        config.resolve("tiny-cpu", {"train.max_steps": "many"})
    with pytest.raises(ValueError, match=r"train.learning_rate = -1.0"):
        config.resolve("tiny-cpu", {"train.learning_rate": -1.0})


def test_a_batch_that_the_group_does_not_divide_is_refused_with_one_that_it_does():
    with pytest.raises(ValueError, match=r"1 x gradient_accumulation_steps 4 = 4; take .* 8"):
        config.resolve(
            "tiny-cpu",
            {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 4},
        )


def test_a_context_too_short_for_prompt_and_completion_is_refused():
    with pytest.raises(ValueError, match="raise it to 304"):
        config.resolve("tiny-cpu", {"model.max_seq_length": 64})


@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_every_profile_is_valid(profile):
    assert config.resolve(profile).profile == profile


def test_later_layers_win_and_keep_the_rest():
    stored = {"train.max_steps": 7, "train.beta": 0.1}
    resolved = config.resolve("tiny-cpu", stored, {"train.max_steps": 9})
    assert (resolved.train.max_steps, resolved.train.beta) == (9, 0.1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.learning_rate=1e-5", 1e-5),
        ("train.max_steps=20", 20),
        ("data.source=arithmetic", "arithmetic"),
        ("data.system_prompt=", ""),
        ("train.scale_rewards=none", "none"),
    ],
)
def test_assignments_are_read_as_the_type_of_the_setting(text, value):
    name, parsed = config.parse_assignment(text)
    effective = config.flatten(config.resolve("tiny-cpu", {name: parsed}))[name]
    assert effective == value
    assert type(effective) is type(value)


@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_a_configuration_survives_being_stored(profile):
    resolved = config.resolve(profile, {"train.max_steps": 3, "seed": 5})
    assert flatten(config.resolve(profile, flatten(resolved))) == flatten(resolved)


def test_an_assignment_without_value_is_refused():
    with pytest.raises(ValueError, match="has no value"):
        config.parse_assignment("train.max_steps")


FLOATS = [
    name
    for name, value in config.flatten(config.resolve("tiny-cpu")).items()
    if isinstance(value, float)
]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", float("inf"), float("nan")])
@pytest.mark.parametrize("name", FLOATS)
def test_no_setting_takes_what_is_not_finite(name, value):
    with pytest.raises(ValueError, match=name):
        config.resolve("tiny-cpu", {name: value})


@pytest.mark.parametrize(
    "setting",
    [
        {"seed": 2**32},
        {"train.learning_rate": 1e3},
        {"train.temperature": 1e-30},
        {"train.temperature": 1e30},
        {"train.beta": 1e30},
    ],
)
def test_what_could_not_be_trained_with_is_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} = .*: input should be"):
        config.resolve("tiny-cpu", setting)


@pytest.mark.parametrize("profile", [None, "", 5, ["tiny-cpu"], {"a": 1}])
def test_a_profile_that_is_no_name_is_refused(profile):
    with pytest.raises(ValueError, match=r"profile = .*: write a name, such as tiny-cpu"):
        config.resolve(profile)


@given(st.sampled_from(config.setting_names()))
def test_every_setting_belongs_to_one_stage(name):
    assert config.stage_of(name) in {"01", "02", "03", "04"}


def test_the_table_says_where_each_value_came_from():
    resolved = config.resolve("l4-24gb", {"train.max_steps": 5})
    rows = config.describe(resolved, "train")
    sources = {row["setting"]: row["from"] for row in rows}
    assert sources["train.max_steps"] == "set here"
    assert sources["train.learning_rate"] == "profile l4-24gb"
    assert sources["train.beta"] == "default"
    assert all(row["meaning"] for row in rows)


def test_a_task_sets_data_and_rewards_and_on_the_tiny_profile_the_model():
    tiny = config.resolve("tiny-cpu", {"task": "json_extraction"})
    assert (tiny.data.source, tiny.rewards.preset) == ("json_extraction", "json_extraction")
    assert (tiny.data.answer_kind, tiny.model.model_path) == ("json", "data/task_base")
    large = config.resolve("l4-24gb", {"task": "json_extraction"})
    assert large.data.source == "json_extraction"
    assert large.model == config.resolve("l4-24gb").model
    assert flatten(config.resolve("tiny-cpu", {"task": "math"})) == flatten(
        config.resolve("tiny-cpu")
    )


def test_what_is_set_wins_over_the_task_which_wins_over_the_profile():
    resolved = config.resolve("l4-24gb", {"task": "code"}, {"data.source": "mine.jsonl"})
    assert (resolved.data.source, resolved.data.answer_kind) == ("mine.jsonl", "code")
    rows = config.describe(resolved, "data")
    sources = {row["setting"]: row["from"] for row in rows}
    assert sources["data.source"] == "set here"
    assert sources["data.answer_kind"] == "task code"
    assert sources["data.subset"] == "profile l4-24gb"


@pytest.mark.parametrize("task", profiles.TASKS)
def test_every_task_is_valid_and_survives_being_stored(task):
    for profile in profiles.PROFILES:
        resolved = config.resolve(profile, {"task": task})
        assert flatten(config.resolve(profile, flatten(resolved))) == flatten(resolved)


def test_a_misspelt_task_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="task 'jsonextraction': did you mean 'json_extraction'"):
        config.resolve("tiny-cpu", dict([config.parse_assignment("task=jsonextraction")]))


def test_4bit_weights_cannot_all_be_trained():
    full = {"policy.finetuning": "full"}
    with pytest.raises(
        ValueError, match=r"policy.finetuning = 'full' with model.quantization = '4"
    ):
        config.resolve("tiny-cpu", full)
    assert config.resolve("tiny-cpu", {**full, "model.quantization": "16bit"}).policy.finetuning
