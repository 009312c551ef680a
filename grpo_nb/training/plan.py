"""The stages of a training: one, or those of a YAML file (`train.stages`), on one adapter.

    - name: format                        # 30 steps for the format, on the easier half
      max_steps: 30
      weights: {soft_xml_format_reward: 1.0}
      rows: [0.0, 0.5]                    # shares of the training rows, in their order
    - name: correctness
      max_steps: 70
      learning_rate: 5.0e-4
      where: {level: [2, 3]}              # rows by a column

Any other key is a setting of `train`, or of `trl` as a mapping.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_nb import reward_lab
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.runs import Stage, project_path, refuse_path
from grpo_nb.runs.config import RunConfig, flatten, resolve
from grpo_nb.runs.files import load_yaml, sha256
from grpo_nb.runs.profiles import refuse_unknown
from grpo_nb.runs.settings import TrainConfig
from grpo_nb.runs.trl_arguments import refuse_unknown_trl
from grpo_nb.training import health

OWN = ("name", "weights", "rows", "where", "trl")
# Settings that may differ between a training and its resumption.
FREE = ("resume", "report_to", "save_steps", "keep_checkpoints", "eval_steps", "early_stop_evals")
OF_THE_RUN = ("stages", "priming_steps", "priming_learning_rate", "resume", "keep")
Row = Mapping[str, Any]


class TrainStage(NamedTuple):
    """One GRPO stage: `config.train` and `rewards` are its own."""

    number: int
    name: str
    config: RunConfig
    rewards: RewardSet
    rows: Sequence[Row]
    first_step: int  # steps of the stages before it

    @property
    def folder(self) -> str:
        """Relative to the run."""
        return f"train/{self.number}-{self.name}"

    @property
    def last_step(self) -> int:
        return self.first_step + self.config.train.max_steps

    def line(self) -> dict[str, Any]:
        """What a reader wants to know of it."""
        pairs = zip(self.rewards.names, self.rewards.reward_weights, strict=True)
        return {
            "stage": self.name,
            "steps": f"{self.first_step + 1} to {self.last_step}",
            "prompts": len(self.rows),
            "rewards": ", ".join(f"{weight:g} {name}" for name, weight in pairs),
            "learning rate": self.config.train.learning_rate,
        }


def plan(config: RunConfig, rewards: RewardSet, rows: Sequence[Row]) -> list[TrainStage]:
    """The stages in their order.

    Raises:
        FileNotFoundError: `train.stages` names no file.
        ValueError: It cannot be read, or a stage has an unknown key, reward or no rows.
    """
    stages, first = [], 0
    for number, entry in enumerate(_entries(config.train.stages), start=1):
        of_stage = _config(config, entry)
        chosen = _rewards(rewards, entry.get("weights"), entry["name"])
        selected = _rows(rows, entry)
        stages.append(TrainStage(number, entry["name"], of_stage, chosen, selected, first))
        first = stages[-1].last_step
    return stages


def _entries(path: str) -> list[dict[str, Any]]:
    if not path:
        return [{"name": "grpo"}]
    file = project_path(path)
    if not file.is_file():
        raise FileNotFoundError(f"train.stages = {path!r} is not a file")
    entries = load_yaml(file)
    good = isinstance(entries, list) and entries and all(isinstance(e, dict) for e in entries)
    names = [str(entry.get("name", "")) for entry in entries] if good else []
    if not good or "" in names or len(set(names)) < len(names):
        raise ValueError(f"train.stages = {path!r}: write a list of stages, each with its own name")
    for name in names:
        refuse_path(f"train.stages = {path!r}: name", name)
    return [{**entry, "name": str(entry["name"])} for entry in entries]


def _config(config: RunConfig, entry: Mapping[str, Any]) -> RunConfig:
    known = [name for name in TrainConfig.model_fields if name not in OF_THE_RUN]
    for key in entry:
        refuse_unknown(f"key of stage {entry['name']!r}", key, [*OWN, *known])
    for key in ("trl", "where"):
        if not isinstance(entry.get(key, {}), dict):
            raise ValueError(
                f"stage {entry['name']!r}: {key} = {entry[key]!r}: write {{name: value}}"
            )
    settings = {f"train.{key}": value for key, value in entry.items() if key in known}
    settings |= {f"trl.{key}": value for key, value in entry.get("trl", {}).items()}
    of_stage = resolve(config.profile, flatten(config), settings)
    refuse_unknown_trl(of_stage)
    return of_stage


def check(config: RunConfig) -> None:
    """Raise ValueError or FileNotFoundError for what is wrong with `train.stages` as it stands."""
    for entry in _entries(config.train.stages):
        _config(config, entry)
        _share(entry)
        _finite(entry)


def _rewards(rewards: RewardSet, weights: Mapping[str, float] | None, stage: str) -> RewardSet:
    """Those named, with their weights: all of them were tested in notebook 2."""
    if weights is None:
        return rewards
    _finite({"name": stage, "weights": weights})
    for name in weights:
        refuse_unknown(f"reward of stage {stage!r}", name, rewards.names)
    by_name = dict(zip(rewards.names, rewards.reward_funcs, strict=True))
    chosen = {name: float(weights[name]) for name in rewards.names if weights.get(name)}
    if not chosen:
        raise ValueError(f"stage {stage!r}: no reward has a weight")
    funcs = [by_name[name] for name in chosen]
    return rewards._replace(reward_funcs=funcs, reward_weights=list(chosen.values()))


def _finite(entry: Mapping[str, Any]) -> None:
    """Raise ValueError unless a stage's weights are numbers to multiply by."""
    weights = entry.get("weights") or {}
    good = isinstance(weights, dict) and all(type(w) in (int, float) for w in weights.values())
    if not good or not all(map(math.isfinite, weights.values())):
        raise ValueError(f"stage {entry['name']!r}: weights = {weights!r}: write {{reward: 1.0}}")


def _share(entry: Mapping[str, Any]) -> tuple[float, float]:
    share = entry.get("rows", [0.0, 1.0])
    numbers = isinstance(share, list) and all(type(end) in (int, float) for end in share)
    if not numbers or len(share) != 2 or not 0 <= share[0] <= share[1] <= 1:
        raise ValueError(f"stage {entry['name']!r}: rows = {share!r}: write two shares, [0.0, 0.5]")
    return share[0], share[1]


def _rows(rows: Sequence[Row], entry: Mapping[str, Any]) -> Sequence[Row]:
    low, high = _share(entry)
    chosen = list(rows[round(low * len(rows)) : round(high * len(rows))])
    for column, wanted in entry.get("where", {}).items():
        refuse_unknown("column of rows", column, list(rows[0]))
        values = wanted if isinstance(wanted, list) else [wanted]
        values = [*values, *map(str, values)]  # every column of a CSV file is text
        chosen = [row for row in chosen if row[column] in values]
    if not chosen:
        raise ValueError(f"stage {entry['name']!r}: no row is left by its rows and where")
    return chosen


def fingerprint(stage: Stage, rewards: RewardSet, stages: Sequence[TrainStage]) -> dict[str, Any]:
    """What a training depends on: settings, rows, rewards and the stages."""
    known = _bound(stage.config)
    known["the stages"] = [[s.name, _bound(s.config), len(s.rows)] for s in stages]
    known["the rewards"] = reward_lab.fingerprint(rewards)
    known["data/train.parquet"] = sha256(stage.run / "data/train.parquet")
    return json.loads(json.dumps(known))


def _bound(config: RunConfig) -> dict[str, Any]:
    """The settings that a resumed training has to share."""
    sections, free = ("seed", "model.", "policy.", "train.", "trl."), {f"train.{n}" for n in FREE}
    return {k: v for k, v in flatten(config).items() if k.startswith(sections) and k not in free}


def only_longer(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints are of the same training but for `train.max_steps`."""

    def rest(known: Mapping[str, Any]) -> dict[str, Any]:
        stages = [
            [name, {**of, "train.max_steps": 0}, rows] for name, of, rows in known["the stages"]
        ]
        return {**known, "the stages": stages, "train.max_steps": 0}

    return rest(before) == rest(now)


def expected(one: TrainStage, stage: Stage) -> health.Expected:
    """What the run knows before step 1, by which its health is judged."""
    report = stage.run / "rewards/report.json"
    pilot = json.loads(report.read_text(encoding="utf-8"))["pilot"] if report.exists() else {}
    ranges = {
        func.__name__: (weight, *declared_range(getattr(func, "reward", func)))
        for func, weight in zip(one.rewards.reward_funcs, one.rewards.reward_weights, strict=True)
    }
    seconds = pilot.get("predicted seconds per step", math.inf)
    eval_rows = stage.config.train.eval_prompts
    return health.Expected(ranges, one.config.step_completions, eval_rows, seconds)
