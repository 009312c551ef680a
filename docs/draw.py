"""The pictures of docs/concepts.md: `python docs/draw.py` writes them to docs/images/.

The first shows the page's own eight completions; the second what TRL's loss makes of a token,
asked of TRL's code by its gradient.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from markdown_it import MarkdownIt

from grpo_nb.rewards import load_preset, reward_set
from grpo_nb.views.charts import COLORS

PAGE = Path(__file__).parent / "concepts.md"
IMAGES = PAGE.parent / "images"
BLUE, ORANGE, GREEN, _ = COLORS
CAP = 48  # grpo.max_completion_length of the trainer below
LENGTHS = {"grpo": "grpo, sapo", "dapo": "dapo, bnpo, dr_grpo,\ncispo, luspo, vespo"}
# Loss types that treat a ratio alike, and what of TRL's each needs.
RATIOS = {
    "dapo (clipped)": ("dapo", {}),
    "cispo, epsilon_high 5": ("cispo", {"epsilon_high": 5.0}),
    "sapo": ("sapo", {}),
    "vespo": ("vespo", {}),
}


def plain_trainer(folder: Path) -> Any:
    """TRL's trainer as notebook 3 builds it, on the tiny model."""
    from grpo_nb import models, stages
    from grpo_nb.rewards.prompts import build_prompt
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import resolve

    config = resolve("tiny-cpu", {"policy.backend": "transformers", "train.eval_steps": 0})
    policy = models.load_policy(config)
    rewards = reward_set([(load_preset("math").reward_funcs[0], 1.0)])
    rows = [{"prompt": build_prompt("1 + 1"), "answer": "2"}] * 8
    os.environ["GRPO_NB_RUNS"] = str(folder)
    stage = Stage(Run("plain"), "03", config)
    trainer = stages.build_trainer(policy, rewards, rows, stage)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def token_weights(
    trainer: Any, loss_type: str, lengths: list[int], advantages: list[float], ratio: float = 1.0
) -> list[float]:
    """How much a step raises the log-probability of a token of each completion.

    Args:
        trainer: Of `plain_trainer`; its `loss_type` is set.
        loss_type: TRL's.
        lengths: Of the completions [tokens].
        advantages: One each.
        ratio: Probability of every token now, to that when it was sampled.

    Returns:
        Minus the gradient of TRL's loss by the log-probability of each one's first token.
    """
    import torch
    from trl import GRPOTrainer

    width, rows = max(lengths), len(lengths)
    logps = torch.full((rows, width), -1.0, requires_grad=True)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.ones(rows, width, dtype=torch.long)
    trainer.loss_type = loss_type
    trainer.importance_sampling_level = "sequence" if loss_type == "luspo" else "token"
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, logps.detach(), None)
    inputs = {
        **{"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask},
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": logps.detach() - float(np.log(ratio)),
        "num_items_in_batch": mask.sum(),
    }
    GRPOTrainer._compute_loss(trainer, trainer.model, inputs).backward()
    return (-logps.grad[:, 0]).tolist()


def group() -> plt.Figure:
    """What each completion of the page earns, and the advantage that TRL makes of it."""
    names: dict[str, Any] = {}
    fences = [t for t in MarkdownIt().parse(PAGE.read_text(encoding="utf-8")) if t.type == "fence"]
    exec(next(t.content for t in fences if t.info == "python"), names)
    table, preset, labels = names["table"], names["preset"], names["what"]
    figure, (earned, gained) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    places, start = np.arange(len(table)), np.zeros(len(table))
    for name, weight, color in zip(preset.names, preset.reward_weights, COLORS, strict=True):
        part = table[name].to_numpy() * weight
        label = f"{name.removesuffix('_reward').replace('_', ' ')} × {weight:g}"
        earned.barh(places, part, left=start, color=color, label=label)
        start += part
    earned.axvline(table["mean"].iloc[0], color="black", linestyle="--", linewidth=1)
    earned.set(title="weighted reward; dashed: mean of the group", yticks=places)
    earned.set_yticklabels(labels)
    gained.barh(places, table["advantage"], color=np.where(table["advantage"] > 0, GREEN, ORANGE))
    gained.axvline(0, color="black", linewidth=1)
    gained.set(title="advantage: less likely | more likely", yticks=[])
    for axis in (earned, gained):
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=4, loc="outside lower center", fontsize=8)
    return figure


def losses(trainer: Any) -> plt.Figure:
    """A token's weight by its completion's length on policy, and by its ratio off policy."""
    figure, (length, *sides) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    short = np.arange(4, CAP + 1, 4)
    for (kind, label), color in zip(LENGTHS.items(), (ORANGE, BLUE), strict=True):
        pairs = [token_weights(trainer, kind, [int(n), CAP], [1.0, 1.0]) for n in short]
        length.plot(short, [one / other for one, other in pairs], color=color, label=label)
    length.set(title=f"against a token of a completion of {CAP},\nby its completion's length")
    length.legend(frameon=False, fontsize=8)
    ratios = np.linspace(0.05, 2.5, 60)
    for axis, sign in zip(sides, (1.0, -1.0), strict=True):
        for (label, (kind, more)), color in zip(RATIOS.items(), COLORS, strict=True):
            vars(trainer).update({"epsilon_high": 0.2} | more)
            weights = [token_weights(trainer, kind, [1], [sign], float(r))[0] for r in ratios]
            wide = 4 if kind == "dapo" else 1.5  # others lie on it
            axis.plot(ratios, np.array(weights) * sign, color=color, label=label, linewidth=wide)
        axis.axvline(1, color="black", linestyle=":", linewidth=1)
        axis.set(title=f"by its ratio,\nadvantage {sign:+.0f}", xlabel="ratio", ylim=(-0.1, 2.6))
    sides[1].legend(frameon=False, fontsize=8)
    for axis in (length, *sides):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    group().savefig(IMAGES / "group.png", dpi=110)
    with TemporaryDirectory() as folder:
        losses(plain_trainer(Path(folder))).savefig(IMAGES / "loss_types.png", dpi=110)
