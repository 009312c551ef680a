"""Merge an adapter into its base, and write GGUF files: each is kept only if it passes its gate.

`merging` merges, and `gguf` writes the files for llama.cpp, Ollama and LM Studio. `gate` tests
whether a merged model, a GGUF file or a server answers as the model that was trained. `of_run` does
this for a run, in stage 04, and compares a server with a run's model.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.export.merging": "merge",
        "grpo_nb.export.of_run": "merge_run questions_of trained_paths where",
    },
)
