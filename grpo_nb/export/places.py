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
    merged, adapter = run / "model/merged", run / "train/adapter"
    if not merged.is_dir():
        raise FileNotFoundError(f"{merged} is missing: run 04_merge_and_infer first")
    files = sorted(merged.glob("gguf/*.gguf"))
    model = files[0] if files else merged
    llama_cpp = f"llama-server -m '{model}'"
    if not files:
        llama_cpp = f"python convert_hf_to_gguf.py '{merged}' --outfile model.gguf"
    lines = {
        "merged model": merged,
        "adapter": adapter,
        "vLLM": f"vllm serve '{merged}'",
        "transformers": f"AutoModelForCausalLM.from_pretrained({str(merged)!r})",
        "llama.cpp": llama_cpp,
        "Ollama": f"echo 'FROM {model}' > Modelfile && ollama create my-model",
    }
    return "\n".join(f"{name:<13} {line}" for name, line in lines.items())
