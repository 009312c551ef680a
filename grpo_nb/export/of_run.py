"""Merge the adapter of a run in its stage 04, and say where its models are."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb import data
from grpo_nb.checks import Check, Checks, shown
from grpo_nb.export import gate, gguf
from grpo_nb.export.merging import merge_tested
from grpo_nb.files import write_json
from grpo_nb.models import trained_base
from grpo_nb.reward_lab import bench_of
from grpo_nb.rewards import load_rewards

if TYPE_CHECKING:
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import RunConfig

MERGED = "model/merged"


def merge_run(stage: "Stage", *, force: bool = False) -> tuple[Path, Check]:
    """Write model/merged and model/parity.json, and record the check "merge".

    With `export.gguf`, also write GGUF files into model/merged/gguf, with a check for each.

    Args:
        stage: Stage 04 of a trained run.
        force: Whether to put the model in place even if it fails the gate.

    Returns:
        The folder, and the check; the errors are those of `merge`.
    """
    run, config = stage.run, stage.config
    folder, kinds = run / MERGED, gguf.kinds_of(config.export.gguf)
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
    """Return (base, policy, adapter) to load; after full fine-tuning the adapter is None.

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
        FileNotFoundError: There is no merged model.
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
