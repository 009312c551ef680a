"""Merge an adapter into its base, and keep the result only if it is the policy that was trained.

    merge("Qwen/Qwen3-1.7B", "outputs/checkpoint-250", "merged", dataset, load_in_4bit=True)

`merge_run` merges the adapter of a run, in stage 04. `compare_server` compares a server with a
run's merged model, and `where` says how other programs load that model.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb import data
from grpo_nb.checks import Check, Checks, shown
from grpo_nb.export import gate
from grpo_nb.export import gguf as gguf_files
from grpo_nb.files import atomic_path, write_json
from grpo_nb.models import (
    engine_of,
    free_memory,
    load_checkpoint,
    load_dequantized,
    load_tokenizer,
    save_tokenizer,
    trained_base,
)
from grpo_nb.models.hub import quiet
from grpo_nb.reward_lab import bench_of
from grpo_nb.rewards import load_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import RunConfig

MERGED = "model/merged"
# Without a dataset, the merged model is compared on these.
QUESTIONS = (
    *("What is 17 + 25?", "Name three rivers.", "Write one sentence about the sea."),
    *("Is 91 a prime number? Explain.", "Translate 'good morning' into French."),
)


def merge(
    base: str | Path,
    adapter: str | Path,
    to: str | Path,
    dataset: Iterable[Mapping[str, Any]] = (),
    *,
    load_in_4bit: bool,
    max_completion_length: int = 64,
    parity_prompts: int = 32,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    gguf: str | Sequence[str] = (),
    force: bool = False,
) -> Check:
    """Merge a LoRA adapter into its base, and keep the result if it passes the parity gate.

    Args:
        base: Folder or hub name of the base that was trained.
        adapter: Folder with the adapter, such as a checkpoint of the trainer.
        to: Folder for the merged model: safetensors, tokenizer, chat template. What the folder
            held before is replaced only by a model that passes, or if `force` is true.
        dataset: Held-out rows with TRL's column `prompt`; empty for five questions of ours.
        load_in_4bit: Whether the base was in 4 bit in training. The adapter is merged into the
            weights that it was trained on, so a 4-bit base is dequantised.
        max_completion_length: Length of the completions that are compared [tokens].
        parity_prompts: Rows of the dataset that are compared, at most.
        chat_template_kwargs: Arguments of the chat template, as in training.
        gguf: Kinds of GGUF files for llama.cpp, Ollama and LM Studio, which are written into the
            merged model's folder gguf: "q8_0, q4_k_m", f16, bf16, q6_k, q5_k_m.
        force: Whether to put the model in place even if it fails the gate.

    Returns:
        The check "merge".

    Raises:
        FileNotFoundError: The folder `adapter` holds no adapter.
        ValueError: The adapter belongs to another base, is all zero or not finite, or the merge or
            a GGUF file fails the gate.
        RuntimeError: A package for GGUF files is missing, or the converter does not take the model.
    """
    kinds = gguf_files.kinds_of(gguf)
    prompts = [row["prompt"] for row in islice(dataset, parity_prompts)] or list(QUESTIONS)
    chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    questions = gate.Questions(chats, max_completion_length)
    policy = trained_base(str(base), Path(adapter))
    paths, quantization = (policy, policy, Path(adapter)), "4bit" if load_in_4bit else "16bit"
    options = {"chat_template_kwargs": chat_template_kwargs, "kinds": kinds, "force": force}
    return merge_tested(paths, Path(to), questions, quantization, **options)


def merge_tested(
    paths: tuple[str, str, Path | None],
    to: Path,
    questions: gate.Questions,
    quantization: str,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    kinds: Sequence[str] = (),
    force: bool = False,
    record: Callable[[Checks, dict[str, Any]], Any] = lambda checks, figures: None,
) -> Check:
    """Write a merged model and its GGUF files, and put in place what passes its gate.

    The 16-bit weights need room in memory, on the GPU if there is one, and on the disk.

    Args:
        paths: (base, policy, adapter), as `trained_paths` returns them. After full fine-tuning,
            adapter is None, and policy is the folder of the trained model.
        to: Folder for the merged model.
        questions: Held-out chats, and the length of the completions that are compared.
        quantization: Precision of the base in training, "4bit" or "16bit".
        chat_template_kwargs: Arguments of the chat template.
        kinds: Kinds of GGUF files.
        force: Whether to put in place even what fails.
        record: A function that is called with the model's check and figures, and then with the
            checks of the files and {}.

    Returns:
        The check of the model.
    """
    base, policy, adapter = paths
    print("merge: the base and its adapter are read, merged and compared …", flush=True)
    figures: dict[str, Any] = {"text": "every weight was trained, and is copied in 16 bit"}
    if adapter is not None:
        refuse_unusable(adapter)
    with atomic_path(to) as temporary:
        tokenizer = load_tokenizer(base, chat_template_kwargs, adapter)
        _write(_merged(policy, adapter, quantization), base, tokenizer, temporary)
        free_memory()
        if adapter is not None:
            path = str(temporary.resolve())
            tuned = load_checkpoint(base, adapter=adapter, quantization=quantization)
            files = load_checkpoint(path, adapter=None, quantization="16bit")
            figures = gate.merged(engine_of(tuned, load_tokenizer(path)), files, questions)
            del tuned, files
            free_memory()  # both models are gone before the next engine is loaded
        check = gate.verdict("merge", figures)
        record(Checks([check]), figures)
        Checks([check]).refuse(force)
    if kinds:
        checks = gguf_files.write(to, kinds, questions)
        record(checks, {})
        checks.refuse(force)
    return check


def refuse_unusable(adapter: Path) -> None:
    """Raise ValueError if an adapter is not finite, or if it is all zero as at initialization."""
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    if faults := [name for name, tensor in tensors.items() if not tensor.sum().isfinite()]:
        raise ValueError(
            f"NaN or inf in the adapter's {faults[0]}: train again with a lower learning_rate"
        )
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        raise ValueError(
            "the adapter is all zero (every B still has LoRA's initial value), so it equals the "
            "base: see in the log why rewards or gradients were 0, and train again"
        )


def _merged(policy: str, adapter: Path | None, quantization: str) -> "PreTrainedModel":
    if adapter is None:
        return load_checkpoint(policy, adapter=None, quantization="16bit")
    with quiet():
        model = load_dequantized(policy, quantization)
    from peft import PeftConfig, PeftModel  # late: it imports bitsandbytes, whose messages are off

    tuned = PeftModel(model, PeftConfig.from_pretrained(adapter))
    if names := tuned.load_adapter(adapter, "default").unexpected_keys:  # peft only warns of them
        raise ValueError(
            f"the adapter changes {names[0]}, which the base {policy} lacks: give the base that "
            "the adapter was trained on (in a run: model.model_name)"
        )
    _add_changes(tuned)
    return tuned.unload()


def _add_changes(tuned: "PreTrainedModel") -> None:
    """Add the adapter's change to the weights that it adapts, with stochastic rounding.

    The base's weights are bf16 numbers. Rounding to the nearest, as peft does, loses every change
    of less than half a step: up to 90 % of a small update. Stochastic rounding is correct on
    average, so no part of the update is lost: see docs/figures.md.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    generator = torch.Generator(tuned.device).manual_seed(0)
    for layer in [module for module in tuned.modules() if isinstance(module, LoraLayer)]:
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        with torch.no_grad():
            exact = weight.float() + layer.get_delta_weight("default")
            # bf16 is fp32 without its last 16 bits. A random number added there may carry over.
            chance = {"dtype": torch.int32, "device": exact.device, "generator": generator}
            bits = exact.view(torch.int32) + torch.randint(2**16, exact.shape, **chance)
            weight.copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))


def _write(model: "PreTrainedModel", base: str, tokenizer: Any, folder: Path) -> None:
    """Write weights, config, generation config, tokenizer and chat template to a new folder."""
    with quiet():
        model.save_pretrained(folder, max_shard_size="5GB")
    save_tokenizer(tokenizer, folder, base)


def merge_run(stage: "Stage", *, force: bool = False) -> tuple[Path, Check]:
    """Write model/merged and model/parity.json, and record the check "merge".

    With `export.gguf`, also write GGUF files into model/merged/gguf, with a check for each.

    Args:
        stage: Stage 04 of a trained run.
        force: Whether to put the model in place even if it fails the gate.

    Returns:
        The folder, and the check. The errors that are raised are those of `merge`.
    """
    run, config = stage.run, stage.config
    folder, kinds = run / MERGED, gguf_files.kinds_of(config.export.gguf)
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover)  # left by a killed merge; the run's lock excludes a running one
    precision = config.model.quantization

    def record(checks: Checks, figures: dict[str, Any]) -> None:
        if figures:
            about = {"passed": checks[0].state == "ok", "model_name": paths[0]}
            about |= {"quantization": precision, **figures}
            write_json(run / "model/parity.json", about)
        stage.record_checks(checks)

    paths, options = trained_paths(run, config), {"kinds": kinds, "force": force, "record": record}
    options["chat_template_kwargs"] = config.grpo.chat_template_kwargs
    return folder, merge_tested(paths, folder, questions_of(run, config), precision, **options)


def questions_of(run: "Run", config: "RunConfig") -> gate.Questions:
    """Return the held-out prompts of the parity gate, with the run's rewards."""
    rows = data.load(run, "eval")[: config.export.parity_prompts]
    bench = bench_of(config, load_rewards(config.rewards))
    return gate.Questions(
        [row["prompt"] for row in rows],
        config.grpo.max_completion_length,
        lambda texts: float(np.nanmean(bench.totals(bench.score(rows, texts)))),
    )


def compare_server(run: "Run", url: str) -> int:
    """Print whether a server answers as the run's merged model does; return 0 if so, else 1.

    Raises:
        ValueError: No server answers there.
        FileNotFoundError: The run has no merged model.
    """
    model = gate.model_of(run / MERGED, questions_of(run, run.config()))
    check = gate.verdict("served", gate.served(url, model))
    print(shown(*check))
    return int(check.state == "stop")


def trained_paths(run: "Run", config: "RunConfig") -> tuple[str, str, Path | None]:
    """Return (base, policy, adapter) to load.

    After full fine-tuning, adapter is None, and policy is the folder of the trained model. Else
    base and policy are the same.

    Raises:
        FileNotFoundError: The run has not been trained.
    """
    adapter = run / "train/adapter"
    if not adapter.is_dir():
        raise FileNotFoundError(f"run {run.name!r} holds no train/adapter: run 03_train_grpo first")
    if config.model.full_finetuning:
        return config.model.model_name, str(adapter), None
    base = trained_base(config.model.model_name, adapter)
    return base, base, adapter


def where(run: "Run") -> str:
    """Return where the adapter and the merged model are, and how vLLM, llama.cpp, … load it.

    Args:
        run: A run whose notebook 4 has merged the adapter.

    Raises:
        FileNotFoundError: The run has no merged model.
    """
    folder, adapter = run / MERGED, run / "train/adapter"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: run 04_merge_and_infer first")
    lines = {
        "merged model": folder,
        "adapter": adapter,
        "vLLM": f"vllm serve '{folder}'",
        "transformers": f"AutoModelForCausalLM.from_pretrained({str(folder)!r})",
    }
    if files := sorted(folder.glob("gguf/*.gguf")):
        lines["llama.cpp"] = f"llama-server -m '{files[0]}' --jinja"
        lines["Ollama"] = f"ollama create {run.name} -f '{folder}/gguf/Modelfile'"
    else:
        only = f"python -m grpo_nb run --name {run.name} --only 04"
        lines["GGUF"] = f"{only} --set export.gguf=q8_0    # for llama.cpp and Ollama, tested"
    return "\n".join(f"{name:<13} {line}" for name, line in lines.items())
