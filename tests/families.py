"""Random tiny models of current families, each as transformers builds it, with a chat template.

    folder = families.build("gemma2", parent)    # in under a second; nothing is downloaded
    outcome = families.outcome_of(families.start("gemma2", folder, "unsloth"))

What a family's architecture and template do to loading, training and merging shows at this size;
what a model has learnt does not.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import grpo_nb
from grpo_nb import data, export, models, rewards, stages
from grpo_nb.checks import Check
from grpo_nb.models import hub, template
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import RunConfig, resolve

HIDDEN = 128
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # else random weights repeat the last token
}
SLIDING = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
HALVES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
LINEAR = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
# Published ones stretch theirs.
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "llama_4_scaling_beta": 0.1}
ROPE |= {"original_max_position_embeddings": 512}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "patch_size": 14}
VISION |= {"num_attention_heads": 2, "image_size": 28}
PER_LAYER = {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 16}
PER_LAYER |= {"vocab_size_per_layer_input": 320, "num_global_key_value_heads": 2}
HYBRID = {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 128}
HYBRID |= {"num_local_experts": 4, "position_embedding_type": "rope"}
LOCAL_EXPERTS = {"num_local_experts": 4, "head_dim": 32}
ENDS = ("bos", "eos", "pad")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# Each as a published model's template acts: what it opens, closes and refuses.
BOS = "{{ bos_token }}"
END_OF_ANSWER = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% endfor %}"
)


def marked(before: str, after: str, end: str, **named: str) -> str:
    """A template that puts marks around a turn's role, and others at its end; `named` roles."""
    roles = {"system": "system", "user": "user", "assistant": "assistant"} | named
    return (
        f"{{% set roles = {roles} %}}{{% for m in messages %}}{before}{{{{ roles[m['role']] }}}}"
        f"{after}{{{{ m['content'] }}}}{end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{roles['assistant']}{after}{{% endif %}}"
    )


CHATML = marked("<|im_start|>", "\n", "<|im_end|>\n")
QWEN3 = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
OPENS_THOUGHT = "{% if add_generation_prompt %}<think>\n{% endif %}"
THINKING = CHATML + OPENS_THOUGHT
GEMMA = marked("<start_of_turn>", "\n", "<end_of_turn>\n", assistant="model")
GEMMA2 = BOS + (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + ALTERNATE + GEMMA
)
GEMMA3 = BOS + (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    + GEMMA.replace("{{ m['content'] }}", "{{ first if loop.first else '' }}{{ m['content'] }}")
)
INST = (
    "{% for m in messages %}{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{{ m['content'] }}"
    "[/SYSTEM_PROMPT]{% elif m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
TEKKEN = BOS + INST
# Of the first Instruct models.
MISTRAL = BOS + ALTERNATE + INST.replace("[INST]", "[INST] ").replace("[/INST]", " [/INST]")
LLAMA3 = BOS + marked("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
PHI3 = marked("<|", "|>\n", "<|end|>\n")
GRANITE = marked("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n")
OLMO = BOS + marked("<|", "|>\n", END_OF_ANSWER + "\n")
UPPER = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}
COHERE = BOS + marked("<|START_OF_TURN_TOKEN|><|", "_TOKEN|>", "<|END_OF_TURN_TOKEN|>", **UPPER)
HARMONY = (
    "{% for m in messages %}<|start|>{{ 'developer' if m['role'] == 'system' else m['role'] }}"
    "{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if m['role'] == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK = BOS + (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% else %}<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# template: (the token that ends a turn, others that it writes)
SPECIAL = {
    **dict.fromkeys((CHATML, QWEN3, THINKING), ("<|im_end|>", "<|im_start|>")),
    **dict.fromkeys((GEMMA2, GEMMA3), ("<end_of_turn>", "<start_of_turn>")),
    MISTRAL: ("</s>",),
    TEKKEN: ("</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    LLAMA3: ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    PHI3: ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    GRANITE: ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    OLMO: ("<|endoftext|>",),
    COHERE: (
        *("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
        *(f"<|{role}_TOKEN|>" for role in UPPER.values()),
    ),
    HARMONY: ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    DEEPSEEK: ("<｜end▁of▁sentence｜>",),
}


class Family(NamedTuple):
    """A model type of transformers, the template its models come with, and its configuration."""

    model_type: str
    template: str
    settings: Mapping[str, Any] = MappingProxyType({})


FAMILIES = {
    "qwen2": Family("qwen2", CHATML),
    "qwen3": Family("qwen3", QWEN3, {"head_dim": 32}),
    "qwen3 thinking": Family("qwen3", THINKING, {"head_dim": 32}),
    "qwen3_moe": Family("qwen3_moe", QWEN3, {"head_dim": 32, **EXPERTS}),
    "qwen3_5": Family("qwen3_5_text", THINKING, {"head_dim": 32, **LINEAR}),
    "llama": Family("llama", LLAMA3, {"tie_word_embeddings": True}),
    "deepseek distill": Family("qwen2", DEEPSEEK),
    "mistral": Family("mistral", MISTRAL, {"sliding_window": None}),
    "mistral window": Family("mistral", MISTRAL, {"sliding_window": 64}),
    "ministral": Family("ministral", TEKKEN, {**HALVES, "head_dim": 32}),
    "ministral3": Family("ministral3", TEKKEN, {"head_dim": 32, "rope_parameters": ROPE}),
    "gemma2": Family("gemma2", GEMMA2, SLIDING),
    "gemma3": Family("gemma3_text", GEMMA3, {**SLIDING, **HALVES}),
    "gemma3 vision": Family("gemma3", GEMMA3, {**SLIDING, **HALVES, "vision_config": VISION}),
    "gemma4": Family("gemma4_text", GEMMA3, {**HALVES, **PER_LAYER}),
    "phi3": Family("phi3", PHI3),
    "granite": Family("granite", GRANITE),
    "granite4": Family("granitemoehybrid", GRANITE, {**MAMBA, **HYBRID}),
    "smollm3": Family("smollm3", QWEN3, {"no_rope_layers": [1, 0]}),
    "lfm2": Family("lfm2", CHATML, {"layer_types": ["conv", "full_attention"]}),
    "olmo2": Family("olmo2", OLMO),
    "gpt_oss": Family("gpt_oss", HARMONY, {**HALVES, **LOCAL_EXPERTS, "rope_parameters": ROPE}),
    "falcon_h1": Family("falcon_h1", CHATML, {**MAMBA, "mamba_d_ssm": 256}),
    "cohere": Family("cohere", COHERE),
}


def tokenizer_for(template: str, end: str, *others: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes; `end` ends a turn, and the template writes the others as well."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: i for i, token in enumerate(["<pad>", "<bos>", end, *others, *alphabet])}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        **{"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": end},
        additional_special_tokens=list(others),
        chat_template=template,
        padding_side="left",
        model_max_length=COMMON["max_position_embeddings"],
    )


def build(name: str, parent: Path) -> Path:
    """Save a random model of the family, and its tokenizer, into a folder of its name."""
    family = FAMILIES[name]
    tokenizer = tokenizer_for(family.template, *SPECIAL[family.template])
    ends = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ENDS}
    own = {**COMMON, **family.settings, "vocab_size": 320}
    if vision := own.pop("vision_config", None):
        own = {"text_config": own, "vision_config": vision, "mm_tokens_per_image": 4}
        own |= {"boi_token_index": 317, "eoi_token_index": 318, "image_token_index": 319}
    config = AutoConfig.for_model(family.model_type, **own, **ends)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder = parent / name.replace(" ", "_")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SETTINGS = {
    **{"data.max_rows": 24, "data.eval_rows": 8, "data.max_prompt_tokens": 400},
    **{"grpo.max_steps": 2, "grpo.num_generations": 4, "grpo.per_device_train_batch_size": 8},
    **{"grpo.max_completion_length": 8, "train.eval_steps": 0, "train.eval_prompts": 2},
    **{"grpo.save_steps": 9, "grpo.learning_rate": 1e-2, "export.parity_prompts": 3},
    **{"train.guard_steps": 0},  # these models are random, and hardly feel its noise
}


class Outcome(NamedTuple):
    """What became of a family.

    moved: Of LoRA's B, which begins at 0: (how many are not 0 any more, how many there are).
    paths: How completions and log-probabilities are computed.
    checks: The preflight's, by name, and "merge".
    parity: What model/parity.json holds.
    """

    moved: tuple[int, int]
    paths: str
    checks: dict[str, Check]
    parity: dict[str, Any]


def settings_of(folder: Path, backend: str, **more: Any) -> RunConfig:
    own = {"model.model_name": str(folder), "policy.backend": backend}
    return resolve("tiny-cpu", SETTINGS | own | more)


def spread(completions, **columns):
    """A reward that differs within a group, whatever a random model writes."""
    return [sum(map(ord, one[0]["content"])) % 7 / 7 for one in completions]


def start(name: str, folder: Path, backend: str) -> stages.RunTrainer:
    """Prepare data, and build the trainer of a run by this backend, as the notebooks do."""
    config, run = settings_of(folder, backend), Run(f"{name.replace(' ', '-')}-{backend}")
    count = partial(template.count_tokens, hub.load_tokenizer(str(folder)))
    data.prepare_run(run, config.data, 0, count)
    return trainer_of(run, config, data.load(run, "train"), spread)


def trainer_of(run: Run, config: RunConfig, rows: list, reward: Any) -> stages.RunTrainer:
    """Build the trainer of a run that pays one reward."""
    run.write_config(config)
    policy, chosen = models.load_policy(config), rewards.reward_set([(reward, 1.0)])
    return stages.build_trainer(policy, chosen, rows, Stage(run, "03", config))


def outcome_of(trainer: stages.RunTrainer) -> Outcome:
    """Preflight, training, and the merge with its parity gate."""
    policy, run, config = trainer.policy, trainer.stage.run, trainer.stage.config
    checks = {check.name: check for check in grpo_nb.preflight(trainer)}
    trainer.train()
    weights = [p for n, p in policy.model.named_parameters() if "lora_B.default" in n]
    moved, paths = (sum(bool(w.count_nonzero()) for w in weights), len(weights)), trainer.paths
    policy.close()
    _, checks["merge"] = export.merge_run(Stage(run, "04", config))
    return Outcome(moved, paths, checks, json.loads((run / "model/parity.json").read_text()))
