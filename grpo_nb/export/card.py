"""The model card, from the run's manifest, configuration and reports."""

from pathlib import Path
from typing import Any

import yaml

from grpo_nb import rewards
from grpo_nb.export.merging import MERGED, check_complete
from grpo_nb.runs import Run, atomic_path, project_path
from grpo_nb.runs.config import stored
from grpo_nb.runs.files import read_json

LIMITS = """It was rewarded for what the rewards above measure, and evaluated on held-out rows of
the same source: nothing is known of other prompts. A reward may be cheated in ways its tests did
not try. What the base does wrong (facts, bias, harmful text) it still does.

The licences of the base and of the data hold for it, too: see their pages before you publish."""


def write_card(run: Run) -> Path:
    """Write the model card into model/merged, so that `hf upload` sends it with the model.

    Raises:
        ValueError: A stage before was run again since, or a file is not as stage 04 wrote it.
        FileNotFoundError: No whole merged model.
    """
    run.refuse_stale()
    folder, now = check_complete(run / MERGED), run.files(MERGED)
    recorded = run.manifest().get("04", {}).get("outputs", {})
    for name in [name for name in recorded if name.startswith(f"{MERGED}/")]:
        if now.get(name) != recorded[name]:  # a copy or a full disk has cut it short
            raise ValueError(
                f"{run / name} is not as 04_merge_and_infer wrote it (its sha256 is another than "
                "in manifest.json): run that notebook (--from 04) again"
            )
    with atomic_path(folder / "README.md") as temporary:
        temporary.write_text(model_card(run), encoding="utf-8")
    return folder / "README.md"


def model_card(run: Run) -> str:
    """Markdown with the hub's metadata; what is of an earlier training is left out."""
    config, manifest = run.config(), run.manifest()
    base, preset = config.model.model_path, rewards.load_rewards(config.rewards)
    meta: dict[str, Any] = {"library_name": "transformers", "tags": ["grpo", "trl", "grpo_nb"]}
    meta |= {} if project_path(base).exists() else {"base_model": base}
    made = {name: _shown(value) for name, value in stored(config).items()} | {
        "weights of the rewards": dict(zip(preset.names, preset.reward_weights, strict=True)),
        "training rows, sha256": manifest["01"]["outputs"].get("data/train.parquet", "unknown"),
        "versions": manifest["03"]["versions"],
        "code": manifest["03"]["git_commit"],
    }
    return f"""---
{yaml.safe_dump(meta, sort_keys=False)}---

# {run.name}

Trained by GRPO on {made["data.source"]} with verifiable rewards.

{"" if run.why_stale() else _results(run)}
## How it was made

```yaml
{yaml.safe_dump(made, sort_keys=False)}```

## Limits

{LIMITS}
"""


def _shown(value: Any) -> Any:
    """A local path without the folders of this machine; anything else as it is."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _results(run: Run) -> str:
    """The comparisons of eval/report.json, and the checks of stage 04."""
    text = ""
    if (run / "eval/report.json").exists():
        report = read_json(run / "eval/report.json")
        text = f"## Evaluation\n\nOn {report['prompts']} held-out prompts:\n\n"
        text += "".join(f"- {one['sentence']}\n" for one in report["comparisons"])
    checks = run.manifest().get("04", {}).get("checks", [])
    return text + "".join(f"- {one['name']}: {one['state']}, {one['evidence']}\n" for one in checks)
