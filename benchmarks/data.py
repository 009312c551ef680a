"""How long does data preparation take, and how much memory?

    python benchmarks/data.py                          # 200,000 rows, about a minute
    python benchmarks/data.py --rows 0 gsm8k_train.jsonl

Each source is prepared in a process of its own, with the tokenizer of the shipped tiny model:
read, validated, tokenized, searched for duplicates, split, written. Prints seconds (imports
and the tokenizer's loading apart), rows a second and the process's peak memory. The
synthetic rows are word problems of 35 to 45 words, one row in a hundred faulty, one in a
hundred repeated; making them is not timed.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("pens", "apples", "tickets", "marbles", "stamps", "shells", "coins")
PLACES = ("market", "school fair", "station", "library", "harbour", "museum")


def synthetic_row(draws: random.Random) -> dict[str, str]:
    who, other = draws.sample(NAMES, 2)
    thing, place = draws.choice(THINGS), draws.choice(PLACES)
    a, b, c = (draws.randrange(10, 10_000) for _ in range(3))
    middle = " ".join(draws.choices((*NAMES, *THINGS, *PLACES), k=draws.randrange(10)))
    question = (
        f"{who} walks to the {place} with {a} {thing} and meets {other}, who has {b} more. They "
        f"talk about {middle}. On the way home {who} loses {c} {thing}. How many are left in all?"
    )
    return {"question": question, "answer": "about a dozen" if c < 110 else str(a + a + b - c)}


def write_rows(path: Path, count: int) -> None:
    draws = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            # Every hundredth row is one of the same few thousand.
            source = draws if number % 100 else random.Random(draws.randrange(5_000))
            file.write(json.dumps(synthetic_row(source)) + "\n")


def prepare(source: str) -> None:
    """In a process of its own."""
    from grpo_nb import data
    from grpo_nb.models import hub, template
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import resolve

    settings = {"data.source": source, "data.max_prompt_tokens": 1000, "model.max_seq_length": 2000}
    config = resolve("tiny-cpu", settings)
    tokenizer = hub.load_tokenizer(config.model.model_name)
    started = time.monotonic()
    count_tokens = partial(template.count_tokens, tokenizer)
    report = data.prepare_run(Run("benchmark"), config.data, config.seed, count_tokens)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rate = report["rows_read"] / seconds
    print(f"{report['rows_read']:,} rows: {seconds:.1f} s, {rate:,.0f} rows/s, peak {peak:.2f} GB")
    for entry in report["dropped"]:
        print(f"  dropped: {entry['count']:,} {entry['reason']}")
    print(f"  train {report['train_rows']:,}, held out {report['eval_rows']:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="data files, such as GSM8K's train.jsonl")
    parser.add_argument("--rows", type=int, default=200_000, help="synthetic rows; 0: none")
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        return prepare(options.prepare)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GRPO_NB_RUNS": folder, "TQDM_DISABLE": "1"}
        sources = [str(Path(file).resolve()) for file in options.files]
        if options.rows:
            sources.append(f"{folder}/synthetic.jsonl")
            write_rows(Path(sources[-1]), options.rows)
        for source in sources:
            command = [sys.executable, __file__, "--prepare", source]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
