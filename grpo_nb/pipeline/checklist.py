"""`python -m grpo_nb checklist`: what of a run is in order, by which evidence, and what is next.

A check looks at what the stages wrote. Its state is "pass", "fail", "n/a" (it does not concern
this run), "not yet" (it is too early to say) or "look" (only a person can say).
"""

import json
from collections import Counter
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from grpo_nb import reward_lab
from grpo_nb.evaluation.report import LEAST_PROMPTS
from grpo_nb.rewards import load_preset
from grpo_nb.runs import NOTEBOOKS, Run, check_stages_before, config
from grpo_nb.training import health, read_lines
from grpo_nb.training.replay import watch_of_last_stage

Found = tuple[str, str, str]  # state, evidence, action
FIELDS = ("section", "check", "state", "evidence", "action")
REWARDS, METRICS, EVALUATION = "rewards/report.json", "train/metrics.jsonl", "eval/report.json"
WRITER = {"data": "01", "rewards": "02", "train": "03", "model": "04", "eval": "04"}


class Seen(NamedTuple):
    """What every check may ask for; a stage whose process is gone has the status "cut off"."""

    run: Run
    config: config.RunConfig
    manifest: dict[str, dict]
    status: dict[str, str]

    @property
    def next(self) -> str:
        """What brings the run on."""
        stage = next((one for one in NOTEBOOKS if self.status[one] != "done"), "04")
        wait, name = self.status[stage] == "running", self.run.name
        return "wait" if wait else f"python -m grpo_nb run --name {name} --from {stage}"


def _judged(good: Any, evidence: str, action: str) -> Found:
    return ("pass", evidence, "") if good else ("fail", evidence, action)


def _stages(seen: Seen, _: None, *, own: str) -> Found:
    """Whether a section's own stages and those before are done, their files as when written."""
    last = own.split()[-1]
    for stage in [one for one in NOTEBOOKS if one <= last]:
        status, entry = seen.status[stage], seen.manifest.get(stage, {})
        if status in ("failed", "cut off") and stage in own:
            why = entry.get("error") or f"started {entry.get('started')}"
            return "fail", f"{NOTEBOOKS[stage]} {status}: {why}", seen.next
        if status != "done":
            said = f"{NOTEBOOKS[stage]} {status}"
            said = seen.run.why_stale(stage) if status == "stale" else said
            return "not yet", said, seen.next
    check_stages_before(seen.run, f"{int(last) + 1:02}")
    count = sum(len(seen.manifest[one]["outputs"]) for one in NOTEBOOKS if one <= last)
    return "pass", f"done; {count} files have the sha256 that manifest.json recorded", ""


def _dataset(seen: Seen, report: dict) -> Found:
    rate, rows = report["gold_parse_rate"], (report["train_rows"], report["eval_rows"])
    dropped = ", ".join(f"{one['count']} {one['reason']}" for one in report["dropped"])
    evidence = f"{rows[0]} rows to train on, {rows[1]} held out, {dropped or 'none'} left out; "
    good = rate >= 1 - seen.config.data.max_dropped_share and min(rows) > 0
    return _judged(good, f"{evidence}{rate:.1%} of the golds parse", "mend the rows of data.source")


def _leakage(seen: Seen, held_out: set) -> Found:
    shared = held_out & _read(seen.run, "data/train.parquet")
    evidence = f"{len(shared)} of {len(held_out)} held-out prompts are trained on"
    return _judged(not shared, evidence, "run 01_prepare_data again")


def _rewards(seen: Seen, _: dict) -> Found:
    chosen = load_preset(seen.config.rewards.preset, seen.config.rewards.reward_weights)
    return "pass", f"{reward_lab.check(seen.run, chosen)}, and have not changed since", ""


def _base(_: Seen, report: dict) -> Found:
    rate, silent = (report["pilot"][key] for key in ("pass@1", "share of groups without signal"))
    evidence = f"right in {rate:.1%} of its samples; {silent:.0%} of the groups without signal"
    return _judged(0 < rate < 1, evidence, "take easier or harder rows, or another base")


def _prompts(seen: Seen, report: dict) -> Found:
    tokens, cap = report["prompt_tokens"], seen.config.data.max_prompt_tokens
    evidence = f"99 % have at most {tokens['p99']} tokens, the longest {tokens['max']}; cap {cap}"
    best = f"set data.max_prompt_tokens = {tokens['recommended_cap']}"
    return _judged(tokens["p99"] <= cap, evidence, best)


def _completions(seen: Seen, report: dict) -> Found:
    pilot, cap = report["pilot"], seen.config.train.max_completion_length
    cut, p95 = pilot["share truncated"], pilot["completion tokens, p95"]
    best = pilot["recommended max_completion_length"]
    evidence = f"95 % of the base's have at most {p95:.0f} tokens, {cut:.0%} were cut; cap {cap}"
    good = cap >= best or (cut <= 0.05 and cap >= p95)
    return _judged(good, evidence, f"set train.max_completion_length = {best}")


def _memory(_: Seen, report: dict) -> Found:
    stops = [one for one in report["checks"] if one["result"] == "stop"]
    shown = stops or [one for one in report["checks"] if one["check"].endswith("memory")]
    seen, do = ("; ".join(one[key] for one in shown) for key in ("seen", "do"))
    return _judged(not stops, seen, do)


def _tracking(seen: Seen, lines: list[dict]) -> Found:
    steps = [line["step"] for line in lines if "loss" in line]
    evidence = f"{METRICS} keeps {len(steps)} steps; trackers: {seen.config.train.report_to}"
    whole = steps == list(range(1, len(steps) + 1)) and (steps or seen.status["03"] != "done")
    return _judged(whole, evidence, "run 03_train_grpo again: steps are missing")


def _watch(seen: Seen, lines: list[dict]) -> health.Watch:
    """The steps of the last training stage (others may have other rewards)."""
    watch = health.Watch(health.Expected({}), seen.config.health)
    watch.lines = [x for x in lines if x["stage"] == lines[-1]["stage"] and "reward" in x]
    return watch


def _rise(seen: Seen, lines: list[dict]) -> Found:
    """The second half of the steps against the first, with the standard error of that."""
    watch = _watch(seen, lines)
    steps, half = len(watch.lines), len(watch.lines) // 2
    if steps < watch.limits.window:
        return "not yet", f"{steps} steps are too few to tell", "train longer"
    rise, error = watch.rise("reward", steps - half, half)
    evidence = f"{rise:+.3f} ± {2 * error:.3f} (2 standard errors), half to half of {steps} steps"
    if abs(rise) <= 2 * error and steps < watch.limits.patience:
        return "not yet", evidence, "train longer: noise may hide a rise"
    return _judged(rise > 2 * error, evidence, "see docs/troubleshooting.md")


def _share(what: str, key: str, limit: str, action: str, seen: Seen, lines: list) -> Found:
    """A share, over the last steps."""
    watch, most = _watch(seen, lines), getattr(seen.config.health, limit)
    if not (count := min(len(watch.lines), watch.limits.window)):
        return "not yet", "no step is done", seen.next
    share = fmean(watch.last(key, 0, count))
    evidence = f"{share:.0%} of the {what} in the last {count} steps; at most {most:.0%}"
    return _judged(share <= most, evidence, action)


ROWS, CAP = "take easier or harder rows (data.source)", "raise train.max_completion_length"
_signal = partial(_share, "groups earn alike", "frac_reward_zero_std", "no_signal", ROWS)
_cut = partial(_share, "completions are cut", "completions/clipped_ratio", "truncated", CAP)


def _alerts(seen: Seen, lines: list[dict]) -> Found:
    """Grave ones whose rule held in the last window of steps; those before are over."""
    grave = [alert for line in lines if (alert := health.Alert(**line)).severity == "error"]
    evidence = f"{len(grave)} grave, {len(lines) - len(grave)} warnings"
    if not grave:
        return "pass", evidence, ""
    chosen = load_preset(seen.config.rewards.preset, seen.config.rewards.reward_weights)
    watch = watch_of_last_stage(seen.run, seen.config, chosen, _read(seen.run, METRICS))
    recent = watch.lines[-1]["step"] - watch.limits.window
    still = [one for one in grave if one.step > recent or one.rule in watch.holding()]
    over = f"{evidence}; all grave ones are over: {health.summary(grave)}"
    return _judged(not still, health.summary(still) if still else over, "do what the last says")


def _samples(seen: Seen, _: list) -> Found:
    count = len(list((seen.run / "train").glob("*/completions/*.parquet")))
    evidence = f"{count} files in train/*/completions/; no file says whether you read them"
    return "look", evidence, "read some: docs/reading-a-run.md#reading-completions"


def _format(seen: Seen, lines: list[dict]) -> Found:
    rates = [line["eval/format"] for line in lines if "eval/format" in line]
    if not rates:
        return "n/a", "no validation (train.eval_steps), or no reward of format", ""
    least = seen.config.health.solved
    evidence = f"{rates[0]:.0%} → {rates[-1]:.0%} in validation; at least {least:.0%}"
    if rates[-1] < least and seen.status["03"] == "running":
        return "not yet", evidence, "wait"
    return _judged(rates[-1] >= least, evidence, "train longer; weigh the format reward higher")


def _parity(_: Seen, report: dict) -> Found:
    if "kl" not in report:
        return "n/a", f"{report['mode']}: there is nothing to merge", ""
    evidence = f"{report['mode']}: KL {report['kl']:.2g} a token, {report['token_agreement']:.1%} "
    evidence += "; ".join(["of greedy tokens equal", *report["faults"]])
    return _judged(report["passed"], evidence, "set export.merge = merged_16bit, run 04 again")


def _better(_: Seen, report: dict, *, surely: bool) -> Found:
    """The last model against the first, greedily: compared at all, or surely better."""
    pairs = {(one["decoding"], one["before"], one["after"]): one for one in report["comparisons"]}
    models, prompts = list(report["models"]), report["prompts"]
    found = pairs["greedy", models[0], models[-1]]
    if surely:
        better, said = found["verdict"] == "better", found["sentence"]
        whole = found["mcnemar_p"] < 0.05 and found["gained"] > found["lost"]
        if better and found.get("graded") and not whole:
            return "look", said, "see in notebook 4 what answers that are partly right lack"
        return _judged(better, said, "train longer, or hold out more prompts (data.eval_rows)")
    known = found["differences"]["accuracy"]["interval"] and prompts >= LEAST_PROMPTS
    evidence = f"{models[0]} and {models[-1]} answered the same {prompts} held-out prompts"
    return _judged(known, evidence, "raise data.eval_rows and begin again with notebook 1")


def _reproducible(seen: Seen, _: None) -> Found:
    known = [[e[k] for k in ("git_commit", "seed", "versions")] for e in seen.manifest.values()]
    commit, seed, versions = known[0]
    same = all(one == known[0] for one in known)
    evidence = f"commit {commit[:12]}{commit[40:]}, seed {seed}, trl {versions['trl']}; "
    evidence += "the same in each stage" if same else "stages differ in one of these"
    action = "run all stages from one commit, with the same packages, and nothing uncommitted "
    action += "in grpo_nb/ and data/ (notebooks may differ: they are kept as executed)"
    return _judged(same and len(commit) == 40, evidence, action)


CHECKS = {
    ("before", "notebooks 1 and 2", ""): partial(_stages, own="01 02"),
    ("before", "dataset", "data/report.json"): _dataset,
    ("before", "no leakage", "data/eval.parquet"): _leakage,
    ("before", "rewards", REWARDS): _rewards,
    ("before", "base model", REWARDS): _base,
    ("before", "prompt length", "data/report.json"): _prompts,
    ("before", "completion length", REWARDS): _completions,
    ("before", "memory", "train/preflight.json"): _memory,
    ("before", "tracking", METRICS): _tracking,
    ("during", "notebook 3", ""): partial(_stages, own="03"),
    ("during", "reward rises", METRICS): _rise,
    ("during", "signal", METRICS): _signal,
    ("during", "alerts", "train/health.jsonl"): _alerts,
    ("during", "samples", METRICS): _samples,
    ("during", "format", METRICS): _format,
    ("during", "truncation", METRICS): _cut,
    ("after", "merge", "model/parity.json"): _parity,
    ("after", "baseline", EVALUATION): partial(_better, surely=False),
    ("after", "better", EVALUATION): partial(_better, surely=True),
    ("after", "recorded", ""): partial(_stages, own="04"),
    ("after", "reproducible", ""): _reproducible,
}


def examine(run: Run) -> list[dict[str, str]]:
    """FIELDS of every check in order; a file that cannot be read fails those that need it."""
    try:
        manifest, settings = _read(run, "manifest.json"), _read(run, "config.yaml")
        status = {stage: run.status(stage) for stage in NOTEBOOKS}
    except (ValueError, AttributeError) as error:
        found = ("before", "run", "fail", str(error), "restore it, or begin a new run")
        return [dict(zip(FIELDS, found, strict=True))]
    seen = Seen(run, settings, manifest, status)
    found = [(*key[:2], *_look(seen, key[2], check)) for key, check in CHECKS.items()]
    return [dict(zip(FIELDS, values, strict=True)) for values in found]


def _look(seen: Seen, needs: str, check: Any) -> Found:
    writer = WRITER.get(needs.partition("/")[0], "")
    again = f"run {NOTEBOOKS[writer]} again" if needs else ""  # else the error says it
    if needs and not (seen.run / needs).exists():
        if seen.status[writer] == "done":
            return "fail", f"{needs} was removed", again
        return "not yet", f"{NOTEBOOKS[writer]} {seen.status[writer]}", ""
    try:
        return check(seen, _read(seen.run, needs) if needs else None)
    except (ValueError, OSError) as error:
        return "fail", str(error), again
    except Exception as error:  # a file of another shape, or what a reward file of the run raises
        return "fail", f"{needs or 'manifest.json'}: {error!r}", again


def _read(run: Run, relative: str) -> Any:
    path = run / relative
    readers = {
        ".yaml": lambda: run.config(),
        ".json": lambda: {**json.loads(path.read_text(encoding="utf-8"))},
        ".jsonl": lambda: read_lines(path),
        ".parquet": lambda: set(map(str, pq.read_table(path, columns=["prompt"])["prompt"])),
    }
    try:
        return readers[path.suffix]()
    except (ValueError, OSError, AttributeError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{relative} cannot be read: {error}") from None


def show(lines: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table("", "check", "state", "evidence, → next action")
    for line, after in zip(lines, [*lines[1:], lines[-1]], strict=True):
        *shown, evidence, action = line.values()
        said = f"{evidence}\n→ {action}" if action else evidence
        table.add_row(*shown, said, end_section=line["section"] != after["section"])
    console.print(table)
    counts = Counter(line["state"] for line in lines)
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()))
