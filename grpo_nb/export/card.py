"""Write the model card from the run's manifest, configuration and reports."""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from grpo_nb.export.merging import refuse_incomplete
from grpo_nb.export.of_run import MERGED
from grpo_nb.files import atomic_path, project_path, read_json
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import Run, refuse_changed
from grpo_nb.runs.config import flatten

HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def write_card(run: Run) -> Path:
    """Write the model card into model/merged, so that `hf upload` sends it with the model.

    Raises:
        ValueError: An earlier stage was run again, or a file changed, after stage 04.
        FileNotFoundError: There is no complete merged model.
    """
    run.refuse_outdated()
    folder = refuse_incomplete(run / MERGED)
    refuse_changed(run, "04", "or restore the file")  # copying the run may have truncated it
    with atomic_path(folder / "README.md") as temporary:
        temporary.write_text(model_card(run), encoding="utf-8")
    return folder / "README.md"


def model_card(run: Run) -> str:
    """Return the card as Markdown with the hub's metadata; outdated results are left out.

    Everything that the run recorded is in one indented block of YAML; no value can close it early.
    """
    from huggingface_hub import ModelCard, ModelCardData

    config, manifest = run.config(), run.manifest()
    base, preset = config.model.model_name, load_rewards(config.rewards)
    of_hub = HUB_NAME.fullmatch(base) and not project_path(base).exists()
    head = ModelCardData(
        base_model=base if of_hub else None,
        library_name="transformers",
        tags=["grpo", "trl", "grpo_nb"],
    )
    details = {} if run.outdated("04") else _results(run)
    details |= {"profile": config.profile}
    details |= {name: _without_folder(value) for name, value in flatten(config).items()}
    details |= {
        "weights of the rewards": dict(zip(preset.names, preset.reward_weights, strict=True)),
        "training rows, sha256": manifest["01"]["outputs"].get("data/train.parquet", "unknown"),
        "versions": manifest["03"]["versions"],
        "code": manifest["03"]["git_commit"],
    }
    text = yaml.safe_dump(details, sort_keys=False, allow_unicode=True, width=1000)
    template, block = Path(__file__).with_name("card.md"), indent(text, "    ")
    return f"{ModelCard.from_template(head, str(template), name=run.name, details=block)}\n"


def _without_folder(value: Any) -> Any:
    """Strip the folders of this machine from a local path; return anything else unchanged."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _results(run: Run) -> dict[str, Any]:
    """Return the comparisons of eval/report.json and the checks of stage 04."""
    results: dict[str, Any] = {}
    if (run / "eval/report.json").exists():
        report = read_json(run / "eval/report.json")
        results["held-out prompts"] = report["prompts"]
        results["evaluation"] = [pair["sentence"] for pair in report["comparisons"]]
    checks = run.manifest().get("04", {}).get("checks", [])
    return results | {check["name"]: f"{check['state']}, {check['evidence']}" for check in checks}
