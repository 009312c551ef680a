"""The run's model on the hub, with a card from its manifest, configuration and reports."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_nb import rewards
from grpo_nb.export.merging import MERGED, check_complete
from grpo_nb.runs import Run, atomic_path, project_path, sha256

SHOWN = (
    *("max_steps", "learning_rate", "num_generations", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_completion_length", "temperature", "beta"),
    *("loss_type", "scale_rewards"),
)
LIMITS = """It was rewarded for what the rewards above measure, and evaluated on held-out rows of
the same source: nothing is known of other prompts. A reward may be cheated in ways its tests did
not try. What the base does wrong (facts, bias, harmful text) it still does."""


def plan_push(run: Run, repo: str) -> dict[str, Path]:
    """Write the card to model/README.md, and say what goes up: {path there: file here}.

    That is the card, everything of model/merged, GGUF files beside it, and the pictures.

    Raises:
        ValueError: Not of the form OWNER/NAME, a file is not as stage 04 wrote it, or a
            stage before was run again since.
        FileNotFoundError: No whole merged model.
    """
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"--repo {repo!r}: give OWNER/NAME")
    run.refuse_stale()
    merged, card = check_complete(run / MERGED), run / "model/README.md"
    _check_written(run)
    with atomic_path(card) as temporary:
        temporary.write_text(model_card(run, repo), encoding="utf-8")
    files = [card, *sorted(merged.iterdir()), *sorted((run / "model").glob("*.gguf"))]
    pictures = sorted((run / "figures").glob("*.png"))
    return {path.name: path for path in files} | {f"figures/{path.name}": path for path in pictures}


def _check_written(run: Run) -> None:
    """Refuse a merged model that a copy or a full disk has cut short."""
    recorded = run.manifest().get("04", {}).get("outputs", {})
    for name, digest in recorded.items():
        if name.startswith(f"{MERGED}/") and (
            not (run / name).is_file() or sha256(run / name) != digest
        ):
            raise ValueError(
                f"{run / name} is not as 04_merge_and_infer wrote it (its sha256 is another than "
                "in manifest.json): run that notebook (--from 04) again"
            )


def push(files: Mapping[str, Path], repo: str, private: bool = True) -> str:
    """Create the repository if need be and upload in one commit; returns the commit's address.

    The token is the hub client's own: `$HF_TOKEN`, or `hf auth login`.

    Raises:
        RuntimeError: The hub refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    operations, api = [CommitOperationAdd(name, path) for name, path in files.items()], HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return api.create_commit(repo, operations, commit_message="Trained with grpo_nb").commit_url
    except HfHubHTTPError as error:
        raise RuntimeError(
            f"the hub refused {repo} ({str(error).splitlines()[0]}): see that $HF_TOKEN "
            "or `hf auth login` gives a token that may write there"
        ) from None


def model_card(run: Run, name: str = "") -> str:
    """Markdown with the hub's metadata; what is of an earlier training is left out.

    Args:
        name: Title; default: the run's name.
    """
    config, license_name = run.config(), _license(run.config().model.model_path)
    base, source = config.model.model_path, f"{_shown(config.data.source)} {config.data.subset}"
    meta: dict[str, Any] = {"library_name": "transformers", "tags": ["grpo", "trl", "grpo_nb"]}
    meta |= {} if project_path(base).exists() else {"base_model": base}
    meta |= {"license": license_name} if license_name else {}
    preset = rewards.load_rewards(config.rewards)
    manifest, trained = run.manifest(), "all weights"
    if config.policy.finetuning == "lora":
        trained = f"LoRA, rank {config.model.lora_rank}, alpha {config.model.lora_alpha}"
    digest = manifest.get("01", {}).get("outputs", {}).get("data/train.parquet", "unknown")
    facts = {
        "base": f"{_shown(base)}, {config.model.quantization} in training",
        "data": source.strip(),
        "sha256 of the training rows": digest,
        "trained": trained,
        "seed": config.seed,
        **config.train.model_dump(include=set(SHOWN)),
        **manifest["03"]["versions"],
        "code": manifest["03"]["git_commit"],
    }
    weighed = zip(preset.names, preset.reward_weights, strict=True)
    parts = [
        f"---\n{yaml.safe_dump(meta, sort_keys=False)}---\n\n# {name or run.name}\n",
        f"Trained by GRPO on {source.strip()} with verifiable rewards.\n",
        f"## How\n\n{_table(('', ''), facts.items())}",
        f"## Rewards\n\n{_table(('reward', 'weight'), weighed)}",
        "" if run.why_stale() else _results(run),
        f"## Limits\n\n{LIMITS}\n",
        f"## Licence\n\n{license_name or 'Not stated by the base: ask before you publish.'}\n",
    ]
    return "\n".join(filter(None, parts))


def _shown(name: str) -> str:
    """A local path without the folders of this machine; a hub name as it is."""
    return Path(name).name if Path(name).is_absolute() else name


def _table(head: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    rows = [list(head), *(list(line) for line in lines)]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows) + "\n"


def _license(base: str) -> str:
    """What the base's own card says; "" where it has none."""
    from huggingface_hub import ModelCard

    folder = project_path(base)
    try:
        card = ModelCard.load(
            folder / "README.md" if folder.exists() else base, ignore_metadata_errors=True
        )
    except (OSError, ValueError):  # no network, no such repository, no such file
        return ""
    return card.data.get("license") or ""


def _results(run: Run) -> str:
    """The comparisons of eval/report.json, and the checks of stage 04."""
    path, checks = run / "eval/report.json", run.manifest().get("04", {}).get("checks", [])
    lines = [(check["name"], check["state"], check["evidence"]) for check in checks]
    text = f"## Checks\n\n{_table(('check', 'state', 'evidence'), lines)}" if lines else ""
    if not path.exists():
        return text
    report = json.loads(path.read_text(encoding="utf-8"))
    said = "\n".join(f"- {one['sentence']}" for one in report["comparisons"])
    return f"## Evaluation\n\nOn {report['prompts']} held-out prompts.\n\n{said}\n\n{text}"
