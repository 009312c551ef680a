"""Merge the adapter into 16-bit weights, so that the merged model is the policy trained."""

from pathlib import Path

from grpo_nb.models import load_checkpoint, load_tokenizer
from grpo_nb.runs import Run, atomic_path


def merge_adapter(model_path: str, adapter: Path, quantization: str, run: Run) -> Path:
    """Write model/merged/: the base as it was trained on, plus the adapter, in 16 bit.

    A 4-bit base is dequantised first. The adapter was rewarded on those weights; merged
    into the original 16-bit base it is another policy (KL about a hundred times larger).

    Args:
        model_path: The base.
        adapter: Folder that stage 03 wrote.
        quantization: How the base was kept in training: "4bit" or "16bit".

    Returns:
        The folder, with safetensors, tokenizer, chat template and generation config.
    """
    base = load_checkpoint(model_path, adapter=None, quantization=quantization)
    from peft import PeftModel  # which imports bitsandbytes, quiet only from here on

    if quantization == "4bit":
        base = base.dequantize()
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    target = run / "model/merged"
    with atomic_path(target) as temporary:
        merged.save_pretrained(temporary)
        load_tokenizer(model_path).save_pretrained(temporary)
    return target
