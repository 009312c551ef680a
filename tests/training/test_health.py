import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb import training
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import Sample
from grpo_nb.rewards import reward, reward_set
from grpo_nb.runs import config
from grpo_nb.stages.validation import Validation
from grpo_nb.training import health

REWARDS = {"right": (1.0, 0.0, 1.0), "soft_format_reward": (0.5, 0.0, 1.0)}
FORM = "soft_format_reward"
EXPECTED = health.Expected(REWARDS, completions=64, eval_rows=128, max_steps=300)


def run(seed=0, steps=100, groups=8, first=0.25, last=0.97, speed=15, **faults):
    """Metrics of sampled completions, success rising from `first`; `faults` replace curves."""
    rng = np.random.default_rng(seed)
    rise = 1 - np.exp(-((np.arange(steps) / speed) ** 1.5))
    success = first + (last - first) * rise
    odds = np.log(success / (1 - success))[:, None] + rng.normal(0, 1, (steps, groups))
    right = rng.random((steps, groups, 8)) < 1 / (1 + np.exp(-odds[..., None]))
    form = rng.random((steps, groups, 8)) < (0.5 + 0.49 * rise)[:, None, None]
    total = right + 0.5 * form
    signal = total.std(2) > 0
    noise = rng.lognormal(0, 0.3, (6, steps))
    curves = {
        "loss": rng.normal(0, 1e-3, steps),
        "grad_norm": 0.4 * np.sqrt(signal.mean(1)) * noise[0],
        "step_time": np.where(rng.random(steps) < 0.03, 4, 1) * noise[1] ** 0.3,
        "entropy": (0.05 + 0.6 * (success * (1 - success) * 4)) * noise[2] ** 0.5,
        "frac_reward_zero_std": 1 - signal.mean(1),
        "reward": total.mean((1, 2)),
        "reward_std": total.std((1, 2)),
        "rewards/right/mean": right.mean((1, 2)),
        "rewards/right/std": right.std((1, 2)),
        f"rewards/{FORM}/mean": form.mean((1, 2)),
        f"rewards/{FORM}/std": form.std((1, 2)),
        "right/skipped": (rng.random(steps) < 0.02) * 8.0,
        "completions/mean_length": 30 + 5 * rise + rng.normal(0, 1.5, steps),
        "completions/clipped_ratio": rng.binomial(64, 0.25 - 0.23 * rise) / 64,
        "kl": 0.05 * rise**2 * noise[3],
        "eval/accuracy": np.where(np.arange(steps) % 10 == 9, rng.binomial(128, success) / 128, -1),
    }
    curves |= {key: np.broadcast_to(value, steps) for key, value in faults.items()}
    lines = [{"step": i + 1} | {k: float(v[i]) for k, v in curves.items()} for i in range(steps)]
    return [{k: None if v != v else v for k, v in line.items() if v != -1} for line in lines]


def examine(lines, expected=EXPECTED, **limits):
    """The alerts of a whole history."""
    watch = health.Watch(expected)
    watch.limits = SimpleNamespace(**vars(health.LIMITS) | limits)
    return [alert for line in lines for alert in watch.feed(line)]


def rules(lines, expected=EXPECTED, **limits):
    return [alert.name for alert in examine(lines, expected, **limits)]


def after(step, then, before=0.0, steps=100):
    return np.where(np.arange(steps) < step, before, then)


NOISE = np.random.default_rng(1).normal(0, 1, 100)
RAMP = np.linspace(0, 1, 100)
ONCE, TWICE = (np.isin(np.arange(100), steps).astype(float) for steps in ([60], [60, 61]))
RIGHT, SILENT, LENGTH = "rewards/right/mean", "frac_reward_zero_std", "completions/mean_length"
CUT = "completions/clipped_ratio"
OFF, OFF_NOISE = health.DIFFERENCE, 0.01 * np.abs(NOISE)
FLAT = {RIGHT: 0.3 + 0.03 * NOISE, "reward": 0.8 + 0.03 * NOISE}
LEARNT = {f"rewards/{FORM}/mean": 0.97}
COLLAPSED = {"entropy": after(40, 0.05, 1), SILENT: after(40, 0.9, 0.2)}
# Unsloth's trainer on a GPU logs no entropy.
ALIKE = {"entropy": np.nan, "groups/distinct": after(40, 0.05, 0.9), SILENT: COLLAPSED[SILENT]}
HELD_OUT = np.where(np.arange(100) % 10 == 9, 0.9 - 0.5 * RAMP, -1)
CASES = [
    # rule, the curves that are wrong, what the fix names, the curves made healthy again
    ("not a number", {"loss": after(50, np.nan)}, "learning_rate", {}),
    ("not a number", {"reward": after(50, np.nan, 1.0)}, "None, NaN or inf", {"reward": 1.4}),
    ("not a number", {RIGHT: after(50, np.nan, 0.9)}, "None, NaN or inf", {}),
    ("spike", {"grad_norm": 0.3 + TWICE}, "learning_rate", {"grad_norm": 0.3 + ONCE}),
    ("spike", {"kl": 0.01 + TWICE}, "learning_rate", {"kl": 0.01 + RAMP / 20}),
    ("truncation", {CUT: 0.5 + 0.02 * NOISE}, "max_completion_length", {CUT: 0.9 - 0.8 * RAMP}),
    ("length creep", {LENGTH: 40 + 90 * RAMP + NOISE, **FLAT}, "loss_type", {}),
    ("nothing left to learn", {SILENT: 0.99}, "harder rows", {}),
    ("nothing learnt", {SILENT: 0.99, RIGHT: 0.02, "reward": 0.02}, "easier rows", {}),
    ("collapse", COLLAPSED | {RIGHT: FLAT[RIGHT]}, "temperature", COLLAPSED),
    ("collapse", ALIKE | {RIGHT: FLAT[RIGHT]}, "temperature", ALIKE),
    ("reward hacking", {"eval/accuracy": HELD_OUT}, "pays for the trick", {}),
    ("format learnt, correctness flat", FLAT | LEARNT, f"{FORM} in reward_weights", LEARNT),
    ("reward stuck", FLAT | {f"rewards/{FORM}/mean": 0.5}, "learning_rate", {}),
    ("one reward dominates", {"rewards/right/std": 0.02, RIGHT: 0.1}, FORM, {RIGHT: 0.1}),
    ("samples differ", {OFF: after(50, 0.2, 0.01)}, "without vLLM", {OFF: 0.02 + OFF_NOISE}),
    ("samples differ", {OFF: RAMP / 20 + 0.001}, "without vLLM", {OFF: 0.001 + RAMP / 999}),
]


@pytest.mark.parametrize(("rule", "faults", "fix", "healthy"), CASES)
def test_each_fault_is_found_once_and_gone_once_fixed(rule, faults, fix, healthy):
    alerts = [a for a in examine(run(**faults)) if a.name == rule]
    assert len(alerts) == 1 and fix in alerts[0].fix
    assert re.search(r"\d|None", alerts[0].evidence)
    assert rule not in rules(run(**healthy))


@pytest.mark.parametrize("completions", [16, 64])
def test_a_reward_that_is_lost_in_the_first_steps_is_a_collapse(completions):
    lost = {name: after(2, 0.0, top, 30) for name, top in ((RIGHT, 0.8), ("reward", 1.2))}
    lost |= {SILENT: after(2, 1.0, 0.2, 30), "reward_std": after(2, 0.0, 0.6, 30)}
    lost |= {"entropy": after(2, 0.4, 0.1, 30)}
    names = rules(run(steps=30, **lost), EXPECTED._replace(completions=completions))
    assert "collapse" in names and "nothing learnt" not in names


def test_a_lucky_first_step_of_a_task_that_is_too_hard_is_no_collapse():
    """A prompt that the base always solves may come first."""
    lucky = {name: after(1, 0.0, 0.5, 30) for name in (RIGHT, "reward")} | {SILENT: 1.0}
    lucky |= {"entropy": 0.3, LENGTH: 30.0, "reward_std": 0.0, f"rewards/{FORM}/mean": 0.0}
    assert "collapse" not in rules(run(steps=30, **lucky), EXPECTED._replace(completions=16))


def test_groups_without_signal_are_told_before_it_is_said_that_nothing_is_learnt():
    dead = {RIGHT: 0.0, f"rewards/{FORM}/mean": 0.0, "reward": 0.0, SILENT: 1.0, "reward_std": 0.0}
    few = rules(run(steps=30, **dead), EXPECTED._replace(completions=16))
    assert "little signal" in few and "nothing learnt" not in few
    assert "nothing learnt" in rules(run(steps=60, **dead), EXPECTED._replace(completions=16))


@pytest.mark.parametrize(("correct", "payer"), [("right", "`right`"), ("", "the rewards")])
def test_a_share_in_the_evidence_says_of_what_it_is(correct, payer):
    lines = run(**{SILENT: 0.99, RIGHT: 0.02, "reward": 0.02})
    alert = examine(lines, EXPECTED._replace(correct=correct))[0]
    share = rf"in \d+% of the groups all .* earns \d+% of what {payer} can pay"
    assert re.search(share, alert.evidence)


def test_a_real_training_raises_nothing():
    lines = training.read_lines(PROJECT_ROOT / "tests/healthy_metrics.jsonl")
    weights = {"exact_match_reward": 1, "fuzzy_match_reward": 0.25, FORM: 0.25}
    assert not rules(lines, health.Expected({n: (w, 0, 1) for n, w in weights.items()}))


def test_a_policy_that_falls_to_pieces_at_once_has_collapsed_and_does_not_hack():
    """Recorded at a hundred times the learning rate: garbage from the fourth step on."""
    lines = training.read_lines(PROJECT_ROOT / "tests/collapsed_metrics.jsonl")
    weights = {"numeric_correctness_reward": 1, FORM: 0.25, "incremental_format_reward": 0.25}
    weights["reasoning_quality_reward"] = 0.125
    found = rules(lines, health.Expected({n: (w, 0, 1) for n, w in weights.items()}))
    assert sorted(found) == ["collapse", "truncation"]


@pytest.mark.parametrize("beginning", [0.05, 0.25, 0.6])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), groups=st.sampled_from([4, 8, 16]), speed=st.integers(8, 40))
def test_a_healthy_training_raises_nothing(beginning, seed, groups, speed):
    found = examine(run(seed, 120, groups, beginning, 0.96, speed))
    assert not [a for a in found if a.name != "nothing left to learn"]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_stationary_noise_near_the_top_raises_nothing(seed):
    assert not rules(run(seed, 200, first=0.95, last=0.95, **{"completions/clipped_ratio": 0.1}))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_missing_and_null_values_never_crash(data):
    lines = run(3, 70)
    keys = sorted(lines[9])
    for line in lines:
        for key in data.draw(st.lists(st.sampled_from(keys), max_size=4)):
            line.pop(key, None) if data.draw(st.booleans()) else line.update({key: None})
    examine([{}, {"eval/accuracy": 0.5}, *lines], EXPECTED)


def test_alerts_come_in_order_and_again_after_a_quiet_window():
    at = np.isin(np.arange(100), [20, 23, 60])
    found = examine(run(loss=np.where(at, np.nan, 0), grad_norm=after(70, 9, 1)))
    told = [f"{a.evidence.partition(':')[0]} {a.name}" for a in found]
    assert told == ["step 21 not a number", "step 61 not a number", "step 72 spike"]


def test_a_line_at_a_time_gives_the_same_and_a_held_out_line_of_its_own_counts():
    lines = []
    for line in run(**{"eval/accuracy": np.where(HELD_OUT < 0, np.nan, HELD_OUT)}):
        lines += [line, {"step": line["step"], "eval/accuracy": line.pop("eval/accuracy", None)}]
    watch = health.Watch(EXPECTED)
    live = [alert for line in lines for alert in watch.feed(line)]
    assert live == examine(lines)
    assert [a.name for a in live] == ["held-out accuracy does not follow", "reward hacking"]


def test_an_answer_that_only_the_rewards_take_for_right_is_not_exact():
    texts = ["<answer>oslo.</answer>", "<answer>Oslo or Rome</answer>", "Rome is right", ""]
    said = [[Sample(text, 3, False)] for text in texts]
    engine = SimpleNamespace(generate=lambda prompts, **sampling: said)
    pleased = reward_set([(reward()(lambda response: 1.0), 1.0)])
    rows = [{"prompt": [], "question": "?", "answer": "Oslo"}] * len(texts)
    policy = SimpleNamespace(engine=engine, tokenizer=None)
    figures = Validation(policy, rows, pleased, config.resolve("tiny-cpu", {}, {}))()
    assert (figures["eval/accuracy"], figures["eval/exact"]) == (1.0, 0.25)


def test_rewards_that_are_pleased_with_other_answers_are_found_by_the_exact_ones():
    fewer = np.where(np.arange(100) % 10 == 9, 0.9 - 0.5 * RAMP, -1)
    (alert,) = examine(run(**{"eval/exact": fewer}))
    assert alert.name == "reward hacking" and "fewer answers are the reference" in alert.evidence
    never = np.where(fewer < 0, -1, 0.02)  # right in other words, all the time
    assert rules(run(**{"eval/exact": never})) == []


def test_a_scheduled_factor_is_no_fall_of_the_reward():
    factor = 1 - 0.75 * RAMP
    lines = run(**{"right/factor": factor, RIGHT: 0.95 * factor, "reward": 0.95 * factor})
    assert rules(lines) == []


def test_summary():
    assert health.summary([]) == "no alerts"
    text = health.summary(examine(run(loss=after(50, np.nan))))
    assert text.startswith("stop: not a number, step 51: loss is NaN or infinite (loss is None) ")
    assert text.endswith("; see docs/troubleshooting.md#not-a-number")
