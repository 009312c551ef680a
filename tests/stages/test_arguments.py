"""TRL's arguments: unknown ones refused, all of them shown, silent changes named."""

import re

import pytest
from trainings import arguments_of
from trl import GRPOConfig

from grpo_nb import names, ranks
from grpo_nb.models import weights
from grpo_nb.pipeline import notebooks as pipeline
from grpo_nb.runs import config as config_module
from grpo_nb.runs.config import resolve
from grpo_nb.stages import arguments


def taken(assignment):
    config = resolve("tiny-cpu", pipeline.assigned([assignment]))
    arguments.refuse_arguments(config.grpo.model_extra)
    return config


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("grpo.epsilom=0.1", r"'grpo.epsilom': did you mean 'grpo.epsilon'"),
        ("grpo.seed=3", "decided by seed"),
        ("grpo.output_dir=x", "other stages rely on it"),
        ("grpo.epsilon=0,1", r"grpo.epsilon = \(0, 1\): Input should be a valid number"),
        ("grpo.epsilon=True", "Input should be a valid number"),
        ("grpo.top_k=0.5", "Input should be a valid integer"),
        ("grpo.fp16=yes", "grpo.fp16 = 'yes': Input should be a valid boolean"),
        ("lora.random_state=3", "cannot be used here: set seed"),
        ("grpo.generation_kwargs=[1]", "Input should be a valid dictionary"),
        ("grpo.max_grad_norm=1e999", "grpo.max_grad_norm = inf: Input should be a finite number"),
    ],
)
def test_an_argument_that_trl_does_not_take_is_refused(assignment, message):
    with pytest.raises(ValueError, match=message):
        taken(assignment)


@pytest.mark.parametrize("section", ["grpo", "train"])
@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("vllm_sampling_params={'min_p': 0.1}", "grpo.min_p"),
        ("vllm_device=cuda:1", "grpo.vllm_mode=server"),
        ("torch_dtype=bfloat16", "named dtype"),
        ("num_train_epochs=1", "grpo.max_steps"),
        ("max_prompt_length=64", "data.max_prompt_tokens"),
        ("warmup_ratio=0.1", "grpo.warmup_steps"),
        ("load_in_4bit=True", "model.load_in_4bit"),
    ],
)
def test_what_public_notebooks_have_is_refused_with_what_to_do(section, argument, advice):
    name, _, _ = argument.partition("=")
    with pytest.raises(ValueError, match=rf"{section}\.{name} cannot be used here: .*{advice}"):
        taken(f"{section}.{argument}")


@pytest.mark.parametrize(
    ("value", "scale"), [(False, "none"), ("False", "none"), (True, "group"), ("batch", "batch")]
)
def test_scale_rewards_takes_true_and_false_as_trl_does(value, scale):
    config = resolve("tiny-cpu", {"grpo.scale_rewards": value})
    assert config.grpo.scale_rewards == scale
    assert GRPOConfig(**arguments_of(config)).scale_rewards == scale


def test_the_advice_names_settings_that_there_are():
    for advice in names.ELSEWHERE.values():
        for name in re.findall(r"\b(?:grpo|lora|train|model|data|policy|rewards)\.\w+", advice):
            config_module.refuse_unknown_setting(name)


@pytest.mark.parametrize(
    "assignment",
    [
        "grpo.epsilon_high=0.28",
        "grpo.epsilon=1",
        "grpo.fp16=False",
        "grpo.bf16=true",
        "grpo.lr_scheduler_type=cosine",
        "grpo.generation_kwargs={'num_beams': 1}",
        "grpo.importance_sampling_level=sequence",
    ],
)
def test_an_argument_of_trl_reaches_it(assignment, runs_dir):
    config = taken(assignment)
    [(name, value)] = config.grpo.model_extra.items()
    assert getattr(GRPOConfig(**arguments_of(config)), name) == value


def test_every_argument_that_is_set_is_there_with_who_decided_it(runs_dir):
    own = {"task": "code", "seed": 3, "grpo.max_steps": 7, "grpo.epsilon": 0.1}
    config = resolve("l4-24gb", own)
    given = arguments_of(config)
    args = GRPOConfig(**given)
    args.weight_decay = 0.5
    table = arguments.effective(args, given, config).set_index("argument")
    decided = {
        "max_steps": (7, "set"),
        "seed": (3, "set"),
        "learning_rate": (1e-5, "profile l4-24gb"),
        "beta": (0.0, "grpo_nb"),
        "disable_dropout": (True, "grpo_nb"),
        "weight_decay": (0.5, "changed from 0.0"),
        "generation_batch_size": (32, "changed from None"),
        "save_steps": (25, "grpo_nb"),
    }
    for name, value_and_source in decided.items():
        assert tuple(table.loc[name]) == value_and_source, name
    assert len(table) < 45 and not {"adam_beta1", "report_to", "debug"} & set(table.index)


def test_a_checkpoint_is_written_where_the_completions_are_used_up(runs_dir):
    settings = {"grpo.num_iterations": 3, "grpo.save_steps": 25}
    assert arguments_of(resolve("tiny-cpu", settings))["save_steps"] == 27


def test_a_step_is_shared_evenly(runs_dir, monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 16)
    shared = arguments_of(resolve("tiny-cpu", {"grpo.per_device_train_batch_size": 32}))
    assert shared["per_device_train_batch_size"] == 2  # and a group is cut between processes
    assert shared["gradient_accumulation_steps"] == 1


def test_vllm_is_driven_by_trl_where_its_mode_is_set(runs_dir):
    settings = {"policy.backend": "transformers", "model.load_in_4bit": False}
    of_trl = {"grpo.vllm_mode": "server", "grpo.vllm_server_base_url": "http://x:1"}
    config = resolve("tiny-cpu", settings, of_trl)
    arguments.refuse_arguments(config.grpo.model_extra)
    passed = arguments_of(config)
    assert {name.removeprefix("grpo."): of_trl[name] for name in of_trl}.items() <= passed.items()
    assert passed["use_vllm"]
    assert passed["vllm_max_model_length"] == config.model.max_seq_length
    with pytest.raises(ValueError, match="vllm_mode needs policy"):
        resolve("tiny-cpu", settings, of_trl, {"policy.backend": "unsloth"})


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp16")])
def test_precision_is_what_the_gpu_computes_in(native, precision, monkeypatch, runs_dir):
    import torch

    for module in (arguments, weights):
        monkeypatch.setattr(module, "cuda_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation
    )
    passed = arguments_of(resolve("t4-16gb"), vllm=True)
    assert [name for name in ("bf16", "fp16") if passed[name]] == [precision]
    passed = arguments_of(resolve("t4-16gb", {"grpo.fp16": True}), vllm=True)
    assert ("bf16" in passed, passed["fp16"]) == (False, True)


@pytest.mark.parametrize(
    ("has", "uses", "native"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_on_a_cpu_it_is_bf16_or_fp32_as_the_policy_s_weights(
    has, uses, native, monkeypatch, runs_dir
):
    """Most CPUs emulate bf16, which TRL takes by default, several times slower than fp32.

    oneDNN also emulates it with AVX-512 alone, and ONEDNN_MAX_CPU_ISA hides it from oneDNN.
    """
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": has})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: uses)
    passed = arguments_of(resolve("tiny-cpu"))
    assert (passed["bf16"], passed["fp16"]) == (native, False)
    assert weights.weights_dtype() == (torch.bfloat16 if native else torch.float32)
