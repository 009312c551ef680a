"""The model card, from the run's manifest, configuration and reports."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from grpo_nb import rewards
from grpo_nb.export import parity
from grpo_nb.models.chat import find_model
from grpo_nb.runs import Run, project_path

SHOWN = (
    *("max_steps", "learning_rate", "num_generations", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_completion_length", "temperature", "beta"),
    *("loss_type", "scale_rewards"),
)
LIMITS = """It was rewarded for what the rewards above measure, and evaluated on held-out rows of
the same source: nothing is known of other prompts. A reward may be cheated in ways its tests did
not try. What the base does wrong (facts, bias, harmful text) it still does."""


def model_card(run: Run, name: str = "") -> str:
    """Markdown with the hub's metadata; a report that is absent, or of an earlier training, is
    left out.

    Args:
        name: Title; default: the run's name.
    """
    config, manifest = run.config(), run.manifest()
    base, license_name = config.model.model_path, _license(config.model.model_path)
    meta: dict[str, Any] = {"library_name": "transformers", "tags": ["grpo", "trl", "grpo_nb"]}
    if not project_path(base).exists():
        meta["base_model"] = base
    if license_name:
        meta["license"] = license_name
    preset = rewards.load_preset(config.rewards.preset, config.rewards.reward_weights)
    outputs = {k: v for entry in manifest.values() for k, v in entry["outputs"].items()}
    data = config.data
    source = f"{_shown(data.source)} {data.subset}".strip()
    facts = [
        ("base", f"{_shown(base)}, {config.model.quantization} in training"),
        ("data", source),
        ("sha256 of the training rows", outputs.get("data/train.parquet", "unknown")),
        ("adapter", f"LoRA, rank {config.model.lora_rank}, alpha {config.model.lora_alpha}"),
        ("seed", config.seed),
        *((key, getattr(config.train, key)) for key in SHOWN),
        *((key, value) for key, value in manifest["03"]["versions"].items()),
        ("code", manifest["03"]["git_commit"]),
    ]
    weighed = zip(preset.names, preset.reward_weights, strict=True)
    parts = [
        f"---\n{yaml.safe_dump(meta, sort_keys=False)}---\n\n# {name or run.name}\n",
        f"Trained by GRPO on {source} with verifiable rewards.\n",
        f"## How\n\n{_table(('', ''), facts)}",
        f"## Rewards\n\n{_table(('reward', 'weight'), weighed)}",
        _curves(run),
        *([_evaluation(run), _parity(run)] if not run.why_stale() else []),
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
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows) + "\n"


def _license(base: str) -> str:
    """What the base's own card says; "" where it has none."""
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    folder = project_path(base)
    if folder.exists() and not (folder / "README.md").exists():
        return ""
    try:
        card = folder / "README.md" if folder.exists() else find_model(base)
        return ModelCard.load(card, ignore_metadata_errors=True).data.get("license") or ""
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return ""


def _curves(run: Run) -> str:
    """The learning curve at ten steps."""
    path = run / "train/metrics.jsonl"
    if not path.exists():
        return ""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "reward" in line]
    shown = lines[:: max(1, len(lines) // 10)]
    keys = ["step", "reward", *(k for k in lines[0] if k.startswith("rewards/") and "mean" in k)]
    rows = [[_figure(line.get(key)) for key in keys] for line in shown]
    return f"## Training\n\n{_table([k.removeprefix('rewards/') for k in keys], rows)}"


def _evaluation(run: Run) -> str:
    """eval/report.json: every decoding, model and figure there is, with its interval if any."""
    path = run / "eval/report.json"
    if not path.exists():
        return ""
    report = json.loads(path.read_text(encoding="utf-8"))
    models = [
        (decoding, model, figures)
        for decoding in ("greedy", "sampled")
        for model, figures in report.get(decoding, {}).items()
        if isinstance(figures, dict)
    ]
    keys = list(dict.fromkeys(key for *_, figures in models for key in figures))
    rows = [[d, m, *(_figure(figures.get(key)) for key in keys)] for d, m, figures in models]
    text = _table(("decoding", "model", *keys), rows)
    return f"## Evaluation\n\nOn {report['prompts']} held-out prompts.\n\n{text}"


def _parity(run: Run) -> str:
    path = run / "model/parity.json"
    if not path.exists():
        return ""
    report = json.loads(path.read_text(encoding="utf-8"))
    return f"## Weights\n\n```\n{parity.summary(report)}\n```\n"


def _figure(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " – ".join(_figure(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_figure(part)}" for key, part in value.items())
    return "" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)
