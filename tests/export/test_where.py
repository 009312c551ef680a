"""Where a run's models are, for other programs."""

import pytest

from grpo_nb.export import where
from grpo_nb.runs import Run


def test_each_program_gets_a_line_with_an_absolute_path(runs_dir):
    run = Run("r")
    with pytest.raises(FileNotFoundError, match="run 04_merge_and_infer first"):
        where(run)
    merged = run / "model/merged"
    merged.mkdir(parents=True)
    lines = dict(line.split(maxsplit=1) for line in where(run).splitlines()[1:])
    assert lines["adapter"] == str(run / "train/adapter") and merged.is_absolute()
    assert lines["vLLM"] == f"vllm serve '{merged}'"
    assert "grpo_nb run --name r --only 04 --set export.gguf=q8_0" in lines["GGUF"]
    (merged / "gguf").mkdir()
    (merged / "gguf/r-q8_0.gguf").touch()
    text = where(run)
    assert f"llama-server -m '{merged}/gguf/r-q8_0.gguf'" in text
    assert f"ollama create r -f '{merged}/gguf/Modelfile'" in text
