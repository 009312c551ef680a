"""Three packages that judge GRPO runs, on what each of them documents as its input.

`alarms.py peers` uses this. Each judge takes a run as TRL logs it and returns {finding: "stop",
"warning" or "note"}; what a peer calls critical is "stop", and what it calls info is a "note".
Thresholds are those that a package comes with. The packages are no dependencies of ours: they lie
in a folder of their own, made by

    pip install --target FOLDER rldoctor==0.2.0 rlprobe==0.1.0 rlwatch==0.5.1
"""

import contextlib
import io
import logging
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

Lines = Sequence[Mapping[str, Any]]
Found = dict[str, str]
PACKAGES = ("rldoctor", "rlprobe", "rlwatch")
SEEDS = (0, 1, 2)
CONFIG = {"num_generations", "max_completion_length", "learning_rate", "beta"}
# What a scenario is called -> the findings of ours that name its fault.
OURS = {
    "entropy_collapse": {"entropy collapse", "collapse"},
    "saturated_groups": {"nothing left to learn", "little signal"},
    "too_hard": {"nothing learnt", "little signal"},
    "reward_hacking": {"reward hacking"},
    "length_hacking": {"length creep", "reward hacking"},
    "truncation": {"truncation"},
    "kl_blowup": {"kl grows", "spike"},
    "clip_saturation": set(),
    "grad_spikes": {"spike"},
    "plateau": {"reward stuck", "plateau"},
    "format_domination": {"one reward dominates", "format learnt, correctness flat"},
    "reward_hack_length": {"length creep", "longer"},
    "format_gaming": {"format learnt, correctness flat", "one reward dominates"},
    "degenerate_groups": {"little signal"},
    "adv_collapse": {"little signal", "nothing learnt"},
    "value_divergence": set(),
    "grad_pathology": {"spike", "not a number"},
    "truncation_starve": {"truncation"},
    "repetition_spiral": {"repetition"},
    "reward_std_death": {"little signal", "nothing learnt", "collapse"},
    "ref_drift_asymmetry": {"kl grows"},
    "throughput_rot": {"slower"},
    "kl_spike": {"spike"},
    "reward_variance_explosion": {"reward spread grows"},
    "loss_nan_at": {"not a number"},
    "gradient_norm_spike": {"spike"},
}
# The same -> the findings of peers that name it; those of its maker, and those that mean the same.
THEIRS = {
    "entropy_collapse": {"entropy_collapse", "ENTROPY_COLLAPSE"},
    "saturated_groups": {"advantage_collapse", "DEGENERATE_GROUPS"},
    "too_hard": {"advantage_collapse", "DEGENERATE_GROUPS"},
    "reward_hacking": {"reward_hacking"},
    "length_hacking": {"length_pathology", "REWARD_HACK_LENGTH", "reward_hacking"},
    "truncation": {"length_pathology", "TRUNCATION_STARVE"},
    "kl_blowup": {"kl_drift", "KL_BLOWUP", "kl_explosion"},
    "clip_saturation": {"clip_saturation", "CLIP_SATURATION"},
    "grad_spikes": {"gradient_pathology", "GRAD_PATHOLOGY", "gradient_norm_spike"},
    "plateau": {"plateau"},
    "format_domination": {"reward_composition", "FORMAT_GAMING"},
    "reward_hack_length": {"length_pathology", "REWARD_HACK_LENGTH"},
    "format_gaming": {"reward_composition", "FORMAT_GAMING"},
    "degenerate_groups": {"advantage_collapse", "DEGENERATE_GROUPS"},
    "adv_collapse": {"advantage_collapse", "ADV_COLLAPSE"},
    "value_divergence": {"VALUE_DIVERGENCE"},
    "grad_pathology": {"gradient_pathology", "GRAD_PATHOLOGY", "gradient_norm_spike"},
    "truncation_starve": {"length_pathology", "TRUNCATION_STARVE"},
    "repetition_spiral": {"REPETITION_SPIRAL"},
    "reward_std_death": {"advantage_collapse", "DEGENERATE_GROUPS", "REWARD_STD_DEATH"},
    "ref_drift_asymmetry": {"REF_POLICY_DRIFT_ASYMMETRY", "kl_drift", "KL_BLOWUP"},
    "throughput_rot": {"THROUGHPUT_ROT"},
    "kl_spike": {"kl_drift", "KL_BLOWUP", "kl_explosion"},
    "reward_variance_explosion": {"reward_hacking"},
    "loss_nan_at": {"loss_nan", "gradient_pathology", "GRAD_PATHOLOGY"},
    "gradient_norm_spike": {"gradient_pathology", "GRAD_PATHOLOGY", "gradient_norm_spike"},
}
# What a public run's fault was called -> the findings of peers that name it.
PUBLIC = {
    "truncation": THEIRS["truncation"],
    "no signal": THEIRS["reward_std_death"] | THEIRS["adv_collapse"],
    "reward never earned": THEIRS["reward_std_death"],
    "nothing learnt": THEIRS["too_hard"] | {"plateau"},
    "reward stuck": {"plateau"},
    "collapse": THEIRS["entropy_collapse"] | {"REWARD_STD_DEATH", "reward_mean_drift"},
    "kl grows": THEIRS["kl_blowup"],
    "spike": THEIRS["grad_spikes"] | THEIRS["kl_spike"],
    "reward hacking": {"reward_hacking", "REWARD_HACK_LENGTH", "reward_mean_drift"},
    "format learnt, correctness flat": THEIRS["format_gaming"],
    "length hacking": THEIRS["reward_hack_length"],
}
# The findings of peers that name a hack of the recorded corpus.
HACKING = PUBLIC["reward hacking"] | {"FORMAT_GAMING"}


def find(folder: Path) -> dict[str, str]:
    """Make the packages in a folder importable, after our own, and return their versions."""
    sys.path.append(str(folder))
    logging.disable(logging.WARNING)
    return {name: version(name) for name in PACKAGES}


# -- judges


def ours(lines: Lines, **known: Any) -> Found:
    """Judge with `grpo_nb.autopsy`, as a person would who gives it the logged lines."""
    from grpo_nb import autopsy

    correct = "correctness" if "correctness" in known["rewards"] else ""
    each = known.get("completions", 0)
    findings = autopsy([dict(line) for line in lines], completions_per_step=each, correct=correct)
    return {check.name: check.state for check in reversed(findings.findings)}


def rldoctor(lines: Lines, **known: Any) -> Found:
    """Judge with `rl_doctor.diagnose(run_from_records(...))`."""
    from rl_doctor import Severity, diagnose, run_from_records

    config = {key: value for key, value in known.items() if key in CONFIG}
    run = run_from_records([dict(line) for line in lines], config=config)
    states = {Severity.INFO: "note", Severity.WARNING: "warning", Severity.CRITICAL: "stop"}
    return {one.detector: states[one.severity] for one in diagnose(run).problems}


def rlprobe(lines: Lines, **known: Any) -> Found:
    """Judge with rlprobe's doctor, through the mapping of its callback for TRL."""
    from rlprobe.doctor.runview import RunView
    from rlprobe.integrations.trl import _map_logs
    from rlprobe.schemas import RunManifest, StepRecord

    steps = [(line["step"], _map_logs(line)) for line in lines if "reward" in line]
    config = {key: value for key, value in known.items() if key in CONFIG}
    manifest = RunManifest(run_id="run", created_at="", algorithm="grpo", trainer_config=config)
    return _of_probe(RunView(manifest, [StepRecord(step=n, **values) for n, values in steps]))


def _of_probe(view: Any) -> Found:
    from rlprobe.doctor.engine import diagnose_view

    states = {"info": "note", "warn": "warning", "critical": "stop"}
    return {one.signature_id: states[one.severity] for one in diagnose_view(view)}


def rlwatch(lines: Lines, **known: Any) -> Found:
    """Judge with rlwatch's callback for TRL, which is shown every logged line."""
    from rlwatch.core import _build_trl_callback

    def feed(monitor: Any) -> None:
        callback = _build_trl_callback(monitor)()
        for line in lines:
            state = SimpleNamespace(global_step=line["step"])
            callback.on_log(None, state, None, logs=dict(line))

    return _watched(feed)


def _watched(feed: Callable[[Any], None]) -> Found:
    """Return what a monitor of rlwatch, with its defaults, has sent; the gravest of each kind."""
    from rlwatch.config import RLWatchConfig
    from rlwatch.core import RLWatch

    config = RLWatchConfig()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        config.storage.log_dir = folder
        monitor = RLWatch(config)
        feed(monitor)
        alerts = monitor.store.get_alerts()
        monitor.stop()
    alerts.sort(key=lambda alert: alert["severity"] == "critical")
    return {a["detector"]: {"critical": "stop"}.get(a["severity"], "warning") for a in alerts}


JUDGES = {"ours": ours, "rldoctor": rldoctor, "rlprobe": rlprobe, "rlwatch": rlwatch}


# -- the scenarios of the peers' own simulators


class Scenario(NamedTuple):
    """Hold a synthetic run, in TRL's names, and what its maker says of it.

    family: The package that made it.
    lines: What TRL would have logged.
    known: The settings of the run, and "rewards".
    expected: The findings of its maker that name the fault; empty for a healthy run.
    native: The maker's own findings, on its own format.
    """

    family: str
    name: str
    lines: list[dict[str, Any]]
    known: dict[str, Any]
    expected: set[str]
    native: Found


def scenarios(clones: Path | None, seed: int) -> Iterator[Scenario]:
    """Yield every scenario of every simulator; that of rlwatch lies in its repository only."""
    yield from _of_rldoctor(seed)
    yield from _of_rlprobe(seed)
    if clones and (clones / "varun1724/rlwatch").exists():
        yield from _of_rlwatch(clones / "varun1724/rlwatch", seed)


def _of_rldoctor(seed: int) -> Iterator[Scenario]:
    from rl_doctor.simulate import EXPECTED_DETECTIONS, simulate

    for name, expected in EXPECTED_DETECTIONS.items():
        lines, config = simulate(name, seed=seed)
        known = {"rewards": ("correctness", "format"), "completions": config["train_batch_size"]}
        known |= {key: value for key, value in config.items() if key in CONFIG}
        yield Scenario("rldoctor", name, lines, known, set(expected), rldoctor(lines, **config))


def _of_rlprobe(seed: int) -> Iterator[Scenario]:
    """Yield recordings, with the fields that TRL logs under TRL's names, others under theirs."""
    from rlprobe.doctor.runview import RunView
    from rlprobe.integrations.trl import _SCALAR_MAP
    from rlprobe.testing.synth import PATHOLOGIES, generate_run

    names = {field: key for key, field in _SCALAR_MAP.items()}
    known = {"rewards": ("correctness", "format"), "num_generations": 8, "completions": 64}
    for name in (None, *PATHOLOGIES):
        with tempfile.TemporaryDirectory() as folder:
            view = RunView.load(generate_run(Path(folder) / "run", name, seed=seed))
            native = _of_probe(view)
        lines = []
        for record in view._records:
            values = record.model_dump(exclude_none=True, exclude={"timestamp", "rank", "extra"})
            parts = values.pop("reward_components")
            line = {names.get(k, k): v for k, v in values.items() if not isinstance(v, list)}
            lines.append(line | {f"rewards/{part}/mean": v for part, v in parts.items()})
        expected = {name.upper()} if name else set()
        yield Scenario("rlprobe", name or "healthy", lines, known, expected, native)


RLWATCH = {
    "healthy_run": set(),
    "entropy_collapse": {"entropy_collapse"},
    "kl_spike": {"kl_explosion"},
    "reward_variance_explosion": {"reward_hacking"},
    "loss_nan_at": {"loss_nan"},
    "gradient_norm_spike": {"gradient_norm_spike"},
}


def _of_rlwatch(clone: Path, seed: int) -> Iterator[Scenario]:
    """Yield the traces of its tests; those without a reward get one that does not move."""
    import subprocess

    command = ["git", "-C", str(clone), "show", "HEAD:tests/simulations/generators.py"]
    text = subprocess.run(command, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generators.py"
        path.write_bytes(text)
        made = runpy.run_path(str(path))
    names = {"kl_divergence": "kl", "reward_mean": "reward"}
    for name, expected in RLWATCH.items():
        rows = made[name](seed=seed)

        def feed(monitor: Any, rows: Lines = rows) -> None:
            for row in rows:
                monitor.log_step(**row)

        lines = [{"reward": 0.5} | {names.get(k, k): v for k, v in row.items()} for row in rows]
        yield Scenario("rlwatch", name, lines, {"rewards": ()}, expected, _watched(feed))


# -- the three comparisons


def told(found: Found) -> Found:
    """Return the findings that are more than a note."""
    return {name: state for name, state in found.items() if state != "note"}


def on_scenarios(clones: Path | None) -> Iterator[str]:
    """Yield the table of the synthetic runs: named in every seed, by an alert or in a note."""
    made = [list(scenarios(clones, seed)) for seed in SEEDS]
    faulty = [group for group in zip(*made, strict=True) if "healthy" not in group[0].name]
    healthy = [one for group in made for one in group if "healthy" in one.name]
    yield f"| | healthy accused ({len(healthy)}) | named ({len(faulty)}) | with notes | missed |"
    yield "|---|---|---|---|---|"
    for judge, function in JUDGES.items():

        def found(one: Scenario, judge: str = judge, function: Any = function) -> Found:
            return one.native if one.family == judge else function(one.lines, **one.known)

        wanted = OURS if judge == "ours" else THEIRS
        results = {
            group[0].name + " " + group[0].family: [found(one) for one in group] for group in faulty
        }
        named = {
            key: all(wanted[key.split()[0]] & set(told(one)) for one in each)
            for key, each in results.items()
        }
        noted = {
            key: all(wanted[key.split()[0]] & set(one) for one in each)
            for key, each in results.items()
        }
        missed = ", ".join(key.split()[0] for key, is_noted in noted.items() if not is_noted)
        accused = sum(bool(told(found(one))) for one in healthy)
        yield f"| {judge} | {accused} | {sum(named.values())} | {sum(noted.values())} | {missed} |"


def on_corpus(corpus: Mapping[str, Any], judged: Sequence[Any]) -> Iterator[str]:
    """Yield the table of the recorded tiny runs; peers are shown every evaluation."""
    runs = {one.recipe.name: one for one in judged if one.recipe.kind != "varied"}
    clean = [name for name, one in runs.items() if one.recipe.kind == "clean"]
    hacked = [name for name, one in runs.items() if one.recipe.kind == "hacked"]
    yield f"| | clean accused ({len(clean)}) | hacked found ({len(hacked)}) | named |"
    yield "|---|---|---|---|"
    first = [bool(runs[name].first) for name in clean], [bool(runs[name].first) for name in hacked]
    named = sum("reward hacking" in runs[name].alarms for name in hacked)
    yield f"| ours | {sum(first[0])} | {sum(first[1])} | {named} |"
    for judge in PACKAGES:
        known = {name: corpus[name]["about"] for name in runs}
        found = {name: told(JUDGES[judge](corpus[name]["lines"], **known[name])) for name in runs}
        named = sum(bool(set(found[name]) & HACKING) for name in hacked)
        counts = [sum(bool(found[name]) for name in names) for names in (clean, hacked)]
        yield f"| {judge} | {counts[0]} | {counts[1]} | {named} |"


def on_public(clones: Path) -> Iterator[str]:
    """Yield the table of the public logs; peers are handed the lines that our reader finds."""
    import public_logs

    from grpo_nb import autopsy

    rows: dict[tuple[str, bool], list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for entry in public_logs.logs_named():
            path = public_logs.taken(entry, clones, Path(folder))
            with contextlib.suppress(ValueError):
                result = autopsy(path) if path else None
                for judge in JUDGES if result else ():
                    named = public_logs.NAMES if judge == "ours" else PUBLIC
                    states = {check.name: check.state for check in reversed(result.findings)}
                    if judge != "ours":
                        states = JUDGES[judge](result.log.lines, **result.log.facts)
                    key = judge, bool(entry.get("unseen"))
                    one = public_logs.Judged(entry, told(states), "", named)
                    rows.setdefault(key, []).append(one)
    yield "| | logs | sound | with any alert | accused | faulty | found | named |"
    yield "|---|---|---|---|---|---|---|---|"
    for (judge, is_unseen), logs in sorted(rows.items(), key=lambda item: item[0][1]):
        sound = [log for log in logs if log.entry["verdict"] == "sound"]
        faulty = [log.outcome for log in logs if log.entry["verdict"] == "faulty"]
        accused = sum(log.outcome == "accused" for log in sound)
        counts = (len(sound), sum(bool(log.alerts) for log in sound), accused, len(faulty))
        counts += (len(faulty) - faulty.count("missed"), faulty.count("named"))
        where = "left aside" if is_unseen else "in view"
        yield f"| {judge} | {where} | {' | '.join(map(str, counts))} |"
