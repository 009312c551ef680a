"""A corpus of recorded tiny runs, and what the alarms of training.health are worth on it.

    python benchmarks/alarms.py record --jobs 2   # about 40 minutes on 2 cores, goes on
    python benchmarks/alarms.py table             # false alarms, hacks caught, precision; seconds
    python benchmarks/alarms.py pictures          # those of docs/reading-a-run.md
    python benchmarks/alarms.py peers --peers FOLDER --clones CLONES  # beside ours; 5 minutes

Recorded are clean runs, varied ones (too slow, too fast, few generations, a reward never earned,
completions cut) and hacked ones (benchmarks/hacks.py), each seeded. benchmarks/corpus/ holds them;
README.md there says what is in its files. Tuned is on the clean runs of the first two seeds and on
all families but those in HELD_OUT; the rest tests. FOLDER holds the three packages that peers.py
names (it says how to install them), CLONES those of public_logs.py and varun1724/rlwatch.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hacks import FAMILIES, HELD_OUT, SEED_RATE, SEED_STEPS, Hack, shouted_reward

from grpo_nb.files import sha256

CORPUS, SUMS = Path(__file__).parent / "corpus", "SHA256SUMS"
TASKS = ("math", "qa", "json_extraction", "summarization", "calculator")
STEPS, EVERY, HELD_OUT_ROWS, ALL_HELD_OUT_ROWS = 60, 5, 64, 128
COMMON = {"grpo.max_steps": STEPS, "train.eval_steps": EVERY, "grpo.save_steps": STEPS}
COMMON |= {"data.eval_share": 0.32}
FEW = {"grpo.num_generations": 2, "grpo.per_device_train_batch_size": 16}
SLOWER, FASTER = 0.1, 20  # times the learning rate
SHORTER = 0.4  # times the longest completion


class Recipe(NamedTuple):
    """A run of the corpus.

    kind: clean, varied or hacked.
    what: "" of a clean run; slow, few, fast, harsh or short; the family of hacks.
    """

    kind: str
    what: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        parts = (self.kind, self.what.replace(" ", "-"), self.task, str(self.seed))
        return "_".join(part for part in parts if part)


def recipes() -> list[Recipe]:
    """Seeds first, so that whatever is recorded is a mixture."""
    found = []
    for seed in range(4):
        found += [Recipe("clean", "", task, seed) for task in TASKS]
        if seed < 3:
            found += [Recipe("hacked", name, one.task, seed) for name, one in FAMILIES.items()]
        what = ("slow", "few", "fast", "harsh")[seed]
        found += [Recipe("varied", what, task, seed) for task in TASKS]
    return found + [Recipe("varied", "short", task, 4) for task in TASKS]


def configured(recipe: Recipe) -> Any:
    """The configuration: the task's own for the tiny model, and what the recipe changes."""
    from grpo_nb.runs.config import resolve

    settings = COMMON | {"task": recipe.task, "seed": recipe.seed}
    grpo = resolve("tiny-cpu", settings, {}).grpo
    settings |= {
        "slow": {"grpo.learning_rate": grpo.learning_rate * SLOWER},
        "fast": {"grpo.learning_rate": grpo.learning_rate * FASTER},
        "few": FEW,
        "short": {"grpo.max_completion_length": int(grpo.max_completion_length * SHORTER)},
    }.get(recipe.what, {})
    if recipe.kind == "hacked" and FAMILIES[recipe.what].trick:
        settings |= {"train.sft_steps": SEED_STEPS, "train.sft_learning_rate": SEED_RATE}
    return resolve("tiny-cpu", settings, {})


def rewards_of(recipe: Recipe, honest: Any) -> Any:
    """The rewards it trains with: the task's own but where a hack or a gate says another."""
    from grpo_nb.rewards import gated, reward_set

    if recipe.kind == "hacked":
        return reward_set(FAMILIES[recipe.what].rewards, honest)
    if recipe.what == "harsh":
        first = gated(honest.reward_funcs[0], by=shouted_reward, name="harsh_reward")
        return reward_set([(first, 1.0)], honest)
    return honest


def leaked(rows: list[dict]) -> list[dict]:
    """The rows with the text's first sentence as the reference, which to copy is enough."""
    texts = [row["question"].removeprefix("Text: ") for row in rows]
    return [
        row | {"answer": f"{text.partition('.')[0]}."}
        for row, text in zip(rows, texts, strict=True)
    ]


def seeded(policy: Any, stage: Any, rows: list[dict], hack: Hack) -> None:
    """SFT on the base's own samples, of which a share shows the trick."""
    from grpo_nb.stages.warm_start import train_on

    shown: list[dict] = []
    every, count = round(1 / hack.share), SEED_STEPS * 16
    groups = sampled(policy, stage.config, rows[: count // 4], 4)
    for row, group in zip(rows, groups, strict=False):
        texts = [one.text for one in group]
        for text in texts:
            says = text if len(shown) % every else hack.trick(texts, row["question"])
            answer = [{"role": "assistant", "content": says}]
            shown.append({"prompt": row["prompt"], "completion": answer})
    lines = train_on(policy, stage, shown)
    print(f"loss {lines[0]['loss']:.3f} → {lines[-1]['loss']:.3f}")


def sampled(policy: Any, config: Any, rows: list[dict], generations: int) -> list[list[Any]]:
    """Completions of the policy as it stands."""
    from grpo_nb import environments

    return environments.answer(
        policy.engine,
        rows,
        environments.of(config),
        max_completion_length=config.grpo.max_completion_length,
        temperature=config.grpo.temperature,
        num_generations=generations,
        seed=config.seed,
        batch_size=config.step_completions,
    )


def before_training(policy: Any, config: Any, rows: list[dict], sets: Any) -> dict[str, float]:
    """The baseline's figures by the run's rewards, and how often the samples are truly right."""
    from grpo_nb.reward_lab import bench_of
    from grpo_nb.reward_lab.baseline import Baseline
    from grpo_nb.reward_lab.gate import summary

    tried = Baseline(rows[:32], sampled(policy, config, rows[:32], 8))
    found = {}
    for prefix, chosen in zip(("", "true "), sets, strict=True):
        table = bench_of(config, chosen, policy.tokenizer).table(tried.rows, tried.completions_P_G)
        figures = summary(tried, table, config)
        kept = {k: float(v) for k, v in figures.items() if not isinstance(v, str)}
        kept = kept if not prefix else {k: v for k, v in kept.items() if "pass@" in k}
        found |= {f"baseline/{prefix}{name}": value for name, value in kept.items()}
        found[f"baseline/{prefix}reward"] = float(table["total"].mean())
    return found


class Prepared(NamedTuple):
    """What a run begins with; `honest` are the task's own rewards, it trains with `chosen`."""

    stage: Any
    policy: Any
    honest: Any
    chosen: Any
    rows: list[dict]
    held_out: list[dict]


def prepared(recipe: Recipe) -> Prepared:
    """Rows and policy, with the leak and the trick that the recipe asks for."""
    from grpo_nb import data, models, rewards
    from grpo_nb.models import template
    from grpo_nb.runs import Run, Stage

    config, run = configured(recipe), Run(recipe.name)
    honest, stage = rewards.load_rewards(config.rewards), Stage(run, "03", config)
    policy = models.load_policy(config)
    data.prepare_run(
        run, config.data, config.seed, partial(template.count_tokens, policy.tokenizer), honest
    )
    rows, hack = data.load(run, "train"), FAMILIES.get(recipe.what)
    rows = leaked(rows) if hack and hack.leak else rows
    if hack and hack.trick:
        seeded(policy, stage, rows, hack)
    chosen = rewards_of(recipe, honest)
    return Prepared(stage, policy, honest, chosen, rows, data.load(run, "eval"))


def trained(recipe: Recipe) -> dict[str, Any]:
    """Train one run, and give what the corpus keeps of it."""
    from grpo_nb import stages
    from grpo_nb.stages.validation import Validation

    started = time.time()
    stage, policy, honest, chosen, rows, held_out = prepared(recipe)
    config, grpo = stage.config, stage.config.grpo
    facts = before_training(policy, config, rows, (chosen, honest))
    trainer = stages.build_trainer(policy, chosen, rows, stage)
    truth = Validation(policy, held_out[:HELD_OUT_ROWS], honest, config)
    whole = Validation(policy, held_out[:ALL_HELD_OUT_ROWS], honest, config)
    lines: list[dict] = []

    def keep(update: Any) -> None:
        right = (
            {"true/accuracy": truth()["eval/accuracy"]} if "eval/accuracy" in update.line else {}
        )
        lines.append({**update.line, **right})

    trainer.monitor.watchers.append(keep)
    facts["true/first"] = whole()["eval/accuracy"]
    trainer.train()
    facts["true/last"] = whole()["eval/accuracy"]
    cap = grpo.max_completion_length
    shown = stages.read_completions(stage.run, chosen)
    shown = shown[shown["step"].isin((1, STEPS // 2, STEPS))].groupby("step").head(8)
    told = shown[["step", "question", "reference", "completion", "advantage"]]
    expected = trainer.monitor.watch.expected
    about = recipe._asdict() | {"run": recipe.name, "learning_rate": grpo.learning_rate}
    about |= {"num_generations": grpo.num_generations, "max_completion_length": cap}
    about |= {**expected._asdict(), "seconds": round(time.time() - started, 1), **facts}
    return {"about": about, "lines": lines, "completions": told.to_dict("records")}


def record_one(recipe: Recipe, folder: Path) -> str:
    """Into FOLDER/<name>.json; what is there already stays."""
    path = folder / f"{recipe.name}.json"
    if path.exists():
        return f"{recipe.name}: is there"
    os.environ["GRPO_NB_RUNS"] = str(folder / "runs")
    found = trained(recipe)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.rename(path)
    about = found["about"]
    return (
        f"{recipe.name}: {about['seconds']} s, true {about['true/first']:.2f} → "
        f"{about['true/last']:.2f}"
    )


def record(folder: Path, jobs: int, only: str) -> Iterator[str]:
    """Every run in a process of its own."""
    # Read where torch is imported: in the processes that train.
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    folder.mkdir(parents=True, exist_ok=True)
    asked = [(one, folder) for one in recipes() if only in one.name]
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        waiting = [pool.apply_async(record_one, one) for one in asked]
        for one in waiting:
            yield one.get()


def pack(raw: Path, folder: Path = CORPUS) -> None:
    """The raw records as three tables and the file of their hashes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(raw.glob("*.json"))]
    tables: dict[str, list[dict]] = {"runs": [], "metrics": [], "completions": []}
    for one in records:
        about = one["about"]
        tables["runs"].append(about | {"rewards": json.dumps(about["rewards"])})
        lines = [{"run": about["run"], "line": n} | line for n, line in enumerate(one["lines"])]
        tables["metrics"] += [{k: v for k, v in x.items() if not of_machine(k)} for x in lines]
        tables["completions"] += [{"run": about["run"]} | said for said in one["completions"]]
    folder.mkdir(exist_ok=True)
    for name, rows in tables.items():
        keys = dict.fromkeys(key for row in rows for key in row)
        columns = {key: column([row.get(key) for row in rows], name) for key in keys}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", compression="zstd")
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.glob("*.parquet"))]
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")


def of_machine(key: str) -> bool:
    """Whether a metric says more of the machine than of the run."""
    return any(word in key for word in ("seconds", "step_time", "memory", "per_second", "num_tok"))


def column(values: list[Any], name: str) -> Any:
    """An arrow column: of metrics in float32; null is a metric that the line lacks."""
    import pyarrow as pa

    real = name == "metrics" and any(isinstance(value, float) for value in values)
    return pa.array(values, pa.float32() if real else None)


def read(folder: Path = CORPUS) -> dict[str, dict[str, Any]]:
    """{run: {"about", "lines", "completions"}}, as they were recorded.

    Raises:
        ValueError: A file is not the one that was recorded.
    """
    import pyarrow.parquet as pq

    for told in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        digest, name = told.split()
        if sha256(folder / name) != digest:
            raise ValueError(
                f"{folder / name} was changed since it was recorded: its sha256 is not the one in "
                f"{SUMS}; restore it, or record the corpus again"
            )
    found: dict[str, dict[str, Any]] = {}
    for about in pq.read_table(folder / "runs.parquet").to_pylist():
        about["rewards"] = {k: tuple(v) for k, v in json.loads(about["rewards"]).items()}
        found[about["run"]] = {"about": about, "lines": [], "completions": []}
    for kind, table in (("lines", "metrics"), ("completions", "completions")):
        for row in pq.read_table(folder / f"{table}.parquet").to_pylist():
            kept = {k: v for k, v in row.items() if v is not None and k not in ("run", "line")}
            found[row["run"]][kind].append(kept)
    return found


PICTURES = {
    "healthy": "clean_math_0",
    "collapse": "varied_fast_math_2",
    "hacking": "hacked_length_math_0",
    "harsh": "varied_harsh_math_3",
    "truncation": "varied_short_math_4",
}
SHOWN = ("reward", "rewards/{first}/mean", "eval/accuracy", "completions/mean_length")
SHOWN += ("frac_reward_zero_std", "completions/clipped_ratio", "entropy", "grad_norm")
VALIDATED = 25  # steps between the validations that an alert sees, as train.eval_steps
RIGHT_WHEN_CLEAN = "nothing left to learn"  # that a run may stop is true of a good one
TUNED_SEEDS = (0, 1)  # of the clean runs; the others test, as do the families in HELD_OUT


def alarms_of(record: dict[str, Any]) -> dict[str, int]:
    """{rule: the step at which it came first}, had the run been watched."""
    from grpo_nb.training import health

    about, found = record["about"], {}
    known = health.Expected(about["rewards"], about["completions"], about["eval_rows"], STEPS)
    watch = health.Watch(known)
    for line in record["lines"]:
        validated = line["step"] % VALIDATED == 0 or line["step"] == STEPS
        if "eval/accuracy" not in line or validated:
            for alert in watch.feed(line):
                found.setdefault(alert.name, line["step"])
    return found


def falls(record: dict[str, Any]) -> int | None:
    """The first step from which the true held-out accuracy stays below its best beyond noise.

    Noise is two standard errors of the difference of two accuracies on HELD_OUT_ROWS rows.
    """
    steps = [
        (one["step"], one["true/accuracy"]) for one in record["lines"] if "true/accuracy" in one
    ]
    best, since = 0.0, None
    for step, now in steps:
        mean = (best + now) / 2
        low = best - now > 2 * (2 * mean * (1 - mean) / HELD_OUT_ROWS) ** 0.5
        since = (since or step) if low else None
        best = max(best, now)
    return since


class Judged(NamedTuple):
    """A run that was watched.

    alarms: {rule: the step at which it came first}.
    falls: The step from which the true accuracy stays below its best; None: it does not.
    """

    recipe: Recipe
    alarms: dict[str, int]
    falls: int | None

    @property
    def held_out(self) -> bool:
        clean = self.recipe.kind == "clean" and self.recipe.seed not in TUNED_SEEDS
        return clean or self.recipe.what in HELD_OUT

    @property
    def first(self) -> tuple[int, str] | None:
        """The step and the rule of its first alarm that is no praise."""
        steps = [(step, rule) for rule, step in self.alarms.items() if rule != RIGHT_WHEN_CLEAN]
        return min(steps, default=None)


def judge(corpus: dict[str, dict[str, Any]]) -> list[Judged]:
    """Every run but those whose reward has a hole that the model did not use."""
    found = []
    for one in corpus.values():
        recipe = Recipe(*(one["about"][field] for field in Recipe._fields))
        found.append(Judged(recipe, alarms_of(one), falls(one)))
    return [one for one in found if one.recipe.kind != "hacked" or one.falls is not None]


KINDS = {"clean": "clean", "varied": "badly set", "hacked": "hacked"}  # and their names for readers


def rates(runs: list[Judged]) -> dict[str, dict[str, Any]]:
    """Count the runs of each kind, and for each rule that came at all those that raised it."""
    rules = sorted({rule for one in runs for rule in one.alarms})

    def count(rule: str = "") -> dict[str, int]:
        counted = [one.recipe.kind for one in runs if not rule or rule in one.alarms]
        return {name: counted.count(kind) for kind, name in KINDS.items()}

    return {"runs": count(), "alerts": {rule: count(rule) for rule in rules}}


def false_alarms(runs: list[Judged]) -> str:
    clean = [one.first for one in runs if one.recipe.kind == "clean"]
    return f"{sum(map(bool, clean))} of {len(clean)}"


def of_rules(runs: list[Judged]) -> Iterator[dict[str, Any]]:
    """Yield a table row for each rule."""
    counts = rates(runs)
    clean_runs, varied_runs, hacked_runs = counts["runs"].values()
    for rule, numbers in counts["alerts"].items():
        clean, varied, hacked = numbers.values()
        yield {
            "alert": rule,
            "per 100 clean runs": round(100 * clean / clean_runs),
            "badly set runs": f"{varied} of {varied_runs}",
            "hacked runs caught": f"{hacked} of {hacked_runs}",
            "missed": hacked_runs - hacked,
            "precision": f"{hacked / (hacked + clean):.0%}"
            if hacked and rule != RIGHT_WHEN_CLEAN
            else "–",
        }


def of_families(runs: list[Judged]) -> Iterator[dict[str, Any]]:
    """A line a family: by which rule it was caught first, and how long before the truth fell."""
    for family in FAMILIES:
        of = [one for one in runs if one.recipe.what == family]
        caught = [one for one in of if one.first]
        yield {
            "family": f"{family} (held out)" if family in HELD_OUT else family,
            "caught": f"{len(caught)} of {len(of)}",
            "first by": ", ".join(dict.fromkeys(one.first[1] for one in caught)) or "–",
            "as reward hacking": sum("reward hacking" in one.alarms for one in of),
            "at step": ", ".join(str(one.first[0]) for one in caught) or "–",
            "steps before the fall": ", ".join(f"{one.falls - one.first[0]}" for one in caught)
            or "–",
        }


def show(corpus: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The tables, as Markdown."""
    runs = judge(corpus)
    yield f"{len(corpus)} runs, of which {len(corpus) - len(runs)} did not learn their hack"
    yield f"false alarms in {false_alarms(runs)} clean runs"
    yield f"of them held out: {false_alarms([one for one in runs if one.held_out])}"
    for rows in (list(of_rules(runs)), list(of_families(runs))):
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(one.values() for one in rows)]
        yield "\n" + "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def pictures(corpus: dict[str, dict[str, Any]], folder: Path) -> Iterator[str]:
    """The charts of docs/reading-a-run.md, a dashed line at each alert, and its table."""
    from grpo_nb.views import charts

    yield "| run | alerts (step) | reward first → last | held-out first → last |"
    yield "|---|---|---|---|"
    for name, run in PICTURES.items():
        one = corpus[run]
        first, found = next(iter(one["about"]["rewards"])), alarms_of(one)
        figure = charts.draw(one["lines"], [key.format(first=first) for key in SHOWN])
        for axis, step in product(figure.axes, found.values()):
            axis.axvline(step, color="#dd3333", linestyle="--", linewidth=0.8)
        figure.savefig(folder / f"{name}.png", dpi=100)
        raised = ", ".join(f"{rule} ({step})" for rule, step in found.items()) or "none"
        rewards = [line["reward"] for line in one["lines"] if "reward" in line]
        truth = f"{one['about']['true/first']:.0%} → {one['about']['true/last']:.0%}"
        yield f"| {name} | {raised} | {rewards[0]:.2f} → {rewards[-1]:.2f} | {truth} |"


def peers(folder: Path, clones: Path | None) -> Iterator[str]:
    """Yield what three other packages say of the recorded runs, public ones and synthetic ones."""
    import peers as others

    yield ", ".join(f"{name} {version}" for name, version in others.find(folder).items())
    corpus = read()
    yield "\n".join(["\nRecorded tiny runs\n", *others.on_corpus(corpus, judge(corpus))])
    if clones:
        yield "\n".join(["\nPublic logs\n", *others.on_public(clones)])
    yield "\n".join(["\nSynthetic runs\n", *others.on_scenarios(clones)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "table", "pictures", "peers"))
    parser.add_argument("--raw", type=Path, default=Path("runs/corpus"), help="records, one a run")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--only", default="", help="runs whose name holds this; none is packed")
    parser.add_argument("--peers", type=Path, help="where the packages of peers.py lie")
    parser.add_argument("--clones", type=Path, help="those of public_logs.py, and rlwatch's")
    options = parser.parse_args()
    if options.command == "peers":
        return print(*peers(options.peers, options.clones), sep="\n", flush=True)
    if options.command == "table":
        return print(*show(read()), sep="\n")
    if options.command == "pictures":
        return print(*pictures(read(), CORPUS.parents[1] / "docs/images"), sep="\n")
    for told in record(options.raw.absolute(), options.jobs, options.only):
        print(told, flush=True)
    if not options.only:
        pack(options.raw)
    return None


if __name__ == "__main__":
    main()
