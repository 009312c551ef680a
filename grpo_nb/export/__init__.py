"""Merge an adapter into its base, and write GGUF files: each is kept only if it passes its gate.

`merging` merges an adapter into its base, from two folders or for a run in stage 04. `gguf` writes
the files for llama.cpp, Ollama and LM Studio. `gate` tests whether a merged model, a GGUF file or a
server answers like the model that was trained.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.export.merging": "merge merge_run questions_of trained_paths where",
    },
)
