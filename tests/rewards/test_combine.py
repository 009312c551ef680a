"""Rewards made of rewards, weights that move, and sets from a Python file."""

from types import SimpleNamespace

import pytest

from grpo_nb import rewards
from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import Adaptive, gated, reward, reward_set
from grpo_nb.rewards.load import load_preset


@reward()
def length_reward(response: str) -> float:
    return min(1.0, len(response) / 10)


@reward(low=-1.0)
def sign_reward(response: str) -> float | None:
    return {"+": 1.0, "-": -1.0}.get(response)


async def slow_judge(completions, **_):
    return [0.5] * len(completions)


def called(func, step, *completions):
    func(completions=completions, trainer_state=SimpleNamespace(global_step=step))


def test_a_gate_pays_where_it_is_open_else_the_least_score_and_none_where_a_part_does():
    func = gated(rewards.numeric_correctness_reward, by=rewards.soft_format_reward)
    right, wrong = (f"<reasoning>1+1</reasoning><answer>{n}</answer>" for n in (2, 3))
    assert func(completions=[right, wrong, "2"], answer=["2"] * 3) == [1.0, 0.0, 0.0]
    assert func.columns == ["answer"]
    assert gated(sign_reward, by=length_reward)(completions=["+", "-"]) == [-1.0, -1.0]
    assert gated(length_reward, by=sign_reward)(completions=["+", "-", "?"]) == [0.1, 0.0, None]
    with pytest.raises(ValueError, match=r"gated\(\) takes no async reward"):
        gated(length_reward, by=slow_judge, mark=0.4)


def test_an_adaptive_weight_rises_while_success_is_rare_and_falls_when_it_is_common():
    func = Adaptive(length_reward, change=2.0, least=0.25, greatest=4.0)
    for step in range(5):
        called(func, step, "", "")
    assert func.value == 4.0
    for step in range(5, 20):
        called(func, step, "x" * 10, "x" * 10)
    assert func.value == 0.25
    called(func, 20, "x" * 10, "", "")
    assert func.value == 0.25  # a third: between the marks


def test_an_adaptive_weight_survives_a_checkpoint_and_moves_once_a_step_of_the_training():
    func = Adaptive(length_reward, change=2.0)
    for _ in range(3):
        called(func, 1, "")
    fresh = Adaptive(length_reward, change=2.0)
    fresh.value, fresh.step = func.value, func.step
    called(fresh, 1, "")
    assert (fresh.value, fresh.step) == (2.0, 1), "the step was counted before the checkpoint"
    # Of several processes only the first validates; it would wait for the others' scores.
    fresh.step, fresh.gather_scores = -1, lambda scores: pytest.fail("the others validate nothing")
    outside = Bench(reward_set([(fresh, 1.0)]))
    assert outside.score([{"prompt": []}] * 2, ["", "x" * 10]).tolist() == [[0.0], [2.0]]


POLITE = """from grpo_nb import rewards
from trl.rewards import think_format_reward

@rewards.reward()
def polite_reward(response: str, *, word: str = "please") -> float:
    return float(word in response)

close = rewards.numeric_correctness_reward.configured("close", relative=0.1)
thankful = polite_reward.configured("thankful_reward", word="thanks")
reward_funcs, reward_weights = [thankful, close, think_format_reward], [1, 2, 0.25]
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        (tmp_path / "rewards.py").write_text(text)
        return load_preset(str(tmp_path / "rewards.py"))

    return load


def test_a_set_from_a_file_has_ours_trls_and_ones_own_in_their_order(load):
    chosen = load(POLITE)
    assert chosen.names == ["thankful_reward", "close", "think_format_reward"]
    assert chosen.reward_weights == [1.0, 2.0, 0.25]
    assert chosen.correct_func.__name__ == "close", "the one that reads the answer"
    chat = [[{"role": "assistant", "content": "95"}]]
    scores = [func(completions=chat, answer=["100"]) for func in chosen.reward_funcs]
    assert scores == [[0.0], [1.0], [0.0]]


ONE = "from grpo_nb import rewards\nreward_funcs = [rewards.exact_match_reward]\n"
FAULTY = {
    "rewards.form 'hsh': did you mean 'hash'": ONE + "form = 'hsh'",
    "exact_match_reward has no option 'a'; it has form": ONE + "reward_funcs[0].configured(a=1)",
    "two rewards are named 'exact_match_reward'": ONE + "reward_funcs *= 2",
    r"\[\] is not a list of rewards to train with": ONE + "reward_funcs = []",
    r"cannot be loaded: line 1 \(import no_such_module\): ModuleNotFound": "import no_such_module",
    r"cannot be loaded: line 1 \(raise SystemExit\(0\)\): SystemExit": "raise SystemExit(0)",
    r"rewards.py cannot be loaded: line 1 \(def f\(:\): SyntaxError": "def f(:",
}


@pytest.mark.parametrize("error", FAULTY)
def test_what_is_wrong_in_a_file_is_named(load, error):
    with pytest.raises(ValueError, match=error):
        load(FAULTY[error])


def test_a_set_takes_a_presets_form_without_its_rewards(load):
    chosen = load(f"{ONE}form = 'json_extraction'")
    assert chosen.form == load_preset("json_extraction").form
    assert chosen.names == ["exact_match_reward"]
    named_form = "form = rewards.Adaptive(rewards.soft_format_reward)\nreward_funcs = [form]"
    assert isinstance(load(named_form).reward_funcs[0], Adaptive)
