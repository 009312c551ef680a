"""Say where a run's models are, and how other programs load them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_nb.runs import Run


def where(run: "Run") -> str:
    """Return where the adapter and the merged model are, and a line for each program.

    Args:
        run: A run whose notebook 4 has merged the adapter.

    Raises:
        FileNotFoundError: There is no merged model.
    """
    folder, adapter = run / "model/merged", run / "train/adapter"
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
