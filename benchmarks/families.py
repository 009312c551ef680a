"""Which model families work, by both backends: the table of docs/models.md.

    python benchmarks/families.py            # every family of tests/; 4 minutes
    python benchmarks/families.py lfm2       # only these

Random models of 0.4 to 1 M parameters in 4 bit, on a CPU: data, preflight, two steps, the merge
with its parity gate. Those of tests/vision_families.py do all of it with an image in each prompt,
without Unsloth, which loads them on a GPU only. Whether vLLM knows a family is read from its
registry, where it is installed.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import contextlib
import importlib.util
import io
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import families
import vision_families

HEAD = (
    *("family", "two steps and the merge: Unsloth", "transformers", "adapters", "system prompt"),
    *("completions begin", "dense engine", "shared prompts", "images", "vLLM 0.31"),
)
# Of vllm/model_executor/models/registry.py 0.31.0: those of ours without code of their own there.
BY_TRANSFORMERS, UNKNOWN = {"SmolLM3ForCausalLM", "Olmo2ForCausalLM"}, {"MinistralForCausalLM"}


def in_vllm(architecture: str) -> str:
    """Whether vLLM runs the architecture by its own code, by transformers', or does not name it."""
    found = importlib.util.find_spec("vllm")
    if not found:
        named, borrowed = architecture not in UNKNOWN, architecture in BY_TRANSFORMERS
    else:
        registry = Path(found.origin).parent / "model_executor/models/registry.py"
        entry = re.search(rf'"{architecture}": \(\s*"(\w+)"', registry.read_text(encoding="utf-8"))
        named, borrowed = bool(entry), bool(entry) and entry[1] == "transformers"
    return "not named" if not named else "by transformers' code" if borrowed else "yes"


def tried(name: str, folder: Path, backend: str) -> tuple[str, dict[str, str]]:
    """(the KL of the merge, or what failed; what the preflight said)."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            if name in vision_families.FAMILIES:
                outcome = vision_families.learn(name, folder, **{"policy.backend": backend})
            else:
                outcome = families.outcome_of(families.start(name, folder, backend))
    except Exception as error:  # a family that does not work is what this is to find
        return f"no: {type(error).__name__}: {str(error).splitlines()[0]}", {}
    said = {name: check.evidence for name, check in outcome.checks.items()}
    return f"KL {outcome.parity['kl']:.0e}", said


def row(name: str, parent: Path) -> list[str]:
    from grpo_nb.models import hub, template

    reads_images = name in vision_families.FAMILIES
    folder = (vision_families if reads_images else families).build(name, parent)
    merged, said = zip(*(tried(name, folder, backend) for backend in BACKENDS), strict=True)
    seen = next(filter(None, said), {"adapters": "", "paths": ""})
    tokenizer = hub.load_tokenizer(str(folder))
    asked = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    folded = len(template.fold_system(tokenizer, asked)) == 1
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    thinking = template.opens_thinking(tokenizer).strip()
    return [
        f"`{name}`",
        *merged,
        seen["adapters"].removeprefix("on ").replace(" linear layers and experts", ""),
        "in the user's turn" if folded else "yes",
        f"inside `{thinking}`" if thinking else "at once",
        "yes" if "by the dense engine" in seen["paths"] else "no",
        "yes" if "once for its group" in seen["paths"] else "no",
        "yes" if reads_images else "no",
        in_vllm(architecture),
    ]


BACKENDS = ("unsloth", "transformers")


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.environ["GRPO_NB_RUNS"] = parent
        print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
        with vision_families.smolvlm_loads():
            for name in names or [*families.FAMILIES, *vision_families.FAMILIES]:
                print("| " + " | ".join(row(name, Path(parent))) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
