"""How many tokens a second the dense engine samples, and transformers' `generate` as it was before.

    python benchmarks/generation.py .venv/smollm2     # on an idle machine; about three minutes

One thread; 16 completions of 47 tokens of two prompts, which take turns. `generate` samples from
the 4-bit model, whose weights it dequantises for every token, and from the same weights dequantised
once. No completion ends early: the model's end of turn is not a stop here.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import statistics
import time

ROWS, TOKENS = 16, 47


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()

    from grpo_nb import models
    from grpo_nb.models.dense import DenseEngine
    from grpo_nb.models.weights import load_base, load_checkpoint

    tokenizer = models.load_tokenizer(given.model)
    plain = load_checkpoint(given.model, adapter=None, quantization="4bit")
    engines = {
        "generate, 4 bit": models.TransformersEngine(load_base(given.model, "4bit"), tokenizer),
        "generate, dequantised once": models.TransformersEngine(plain, tokenizer),
        "the dense engine": DenseEngine(plain, tokenizer),
    }
    prompts = [
        [{"role": "user", "content": f"Write a story about {word}."}] for word in ("rain", "snow")
    ]
    for engine in engines.values():
        engine.model.generation_config.eos_token_id = tokenizer.pad_token_id
    sampling = {"max_completion_length": TOKENS, "temperature": 1.0, "num_generations": ROWS // 2}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(given.turns + 1):
        for name, engine in engines.items():
            began = time.process_time()
            groups = engine.generate(prompts, seed=turn, **sampling)
            tokens = sum(sample.tokens for group in groups for sample in group)
            if turn:  # the first warms up
                rates[name].append(tokens / (time.process_time() - began))
    first = statistics.median(rates["generate, 4 bit"])
    print("| | tokens per second of processor time | |\n|---|---|---|")
    for name, values in rates.items():
        median = statistics.median(values)
        spread = f"{median:.0f} ({min(values):.0f} to {max(values):.0f})"
        print(f"| {name} | {spread} | {median / first:.2f} × |")


if __name__ == "__main__":
    main()
