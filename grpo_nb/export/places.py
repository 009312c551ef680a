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
    files = sorted(folder.glob("gguf/*.gguf"))
    file = files[0] if files else folder
    llama_cpp = f"llama-server -m '{file}'"
    if not files:
        llama_cpp = f"python convert_hf_to_gguf.py '{folder}' --outfile model.gguf"
    lines = {
        "merged model": folder,
        "adapter": adapter,
        "vLLM": f"vllm serve '{folder}'",
        "transformers": f"AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        "llama.cpp": llama_cpp,
        "Ollama": f"echo 'FROM {file}' > Modelfile && ollama create my-model",
    }
    return "\n".join(f"{name:<13} {line}" for name, line in lines.items())
