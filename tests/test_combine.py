"""Rewards made of rewards, weights that move, and sets from YAML."""

import pickle
from types import SimpleNamespace

import pytest

from grpo_nb import rewards
from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import (
    Adaptive,
    Scheduled,
    call,
    clipped,
    ensemble,
    gated,
    reward,
    reward_set,
    weighted,
)
from grpo_nb.rewards.presets import find_reward, load_preset, load_yaml

RIGHT = "<reasoning>1+1=2</reasoning><answer>2</answer>"
WRONG = RIGHT.replace(">2<", ">3<")


@reward()
def length_reward(response: str) -> float:
    return min(1.0, len(response) / 10)


@reward(low=-1.0)
def sign_reward(response: str) -> float | None:
    return {"+": 1.0, "-": -1.0}.get(response)


@reward()
async def slow_judge(response: str) -> float:
    return 0.5


def at(step):
    return SimpleNamespace(global_step=step)


def test_a_gate_pays_only_where_it_is_open():
    func = rewards.math_problem_reward
    completions = [RIGHT, WRONG, "2", RIGHT + RIGHT]
    assert func(completions=completions, answer=["2"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert func.columns == ["answer"]


def test_a_gate_falls_to_the_least_score_not_to_zero():
    func = gated(sign_reward, by=length_reward)
    assert func(completions=["+", "-"]) == [-1.0, -1.0]


def test_weighted_clipped_and_none():
    both = weighted([(sign_reward, 2.0), (length_reward, 0.5)])
    assert both.range == (-2.0, 2.5)
    assert both(completions=["+", "-", "?"]) == [2.05, -1.95, None]
    assert clipped(sign_reward, 0.0, 0.5)(completions=["+", "-"]) == [0.5, 0.0]


@pytest.mark.parametrize(("how", "score"), [("mean", 0.4), ("median", 0.1), ("min", 0.1)])
def test_ensembles(how, score):
    func = ensemble([sign_reward, length_reward, length_reward], how)
    assert func(completions=["+"]) == [pytest.approx(score)]


def test_an_unknown_ensemble_is_refused():
    with pytest.raises(ValueError, match="ensemble 'mode': take 'mean', 'median' or 'min'"):
        ensemble([length_reward], "mode")


def test_a_combination_with_an_async_part_is_async():
    func = ensemble([slow_judge, length_reward], "mean", name="judges")
    assert rewards.combine.is_async(func)
    assert call(func, completions=["x" * 10]) == [0.75]


def test_combinations_pickle():
    func = pickle.loads(pickle.dumps(rewards.math_problem_reward))
    assert func(completions=[RIGHT], answer=["2"]) == [1.0]


def test_foreign_rewards_combine_too():
    def has_digit(completions, **kwargs):
        return [float(any(c.isdigit() for c in text)) for text in completions]

    func = gated(has_digit, by=length_reward, mark=0.5)
    assert func(completions=["1", "12345"]) == [0.0, 1.0]


def test_a_schedule_is_drawn_through_its_points():
    func = Scheduled(length_reward, {10: 1.0, 0: 0.0, 20: 0.5})
    full = ["x" * 10]
    steps = (0, 5, 10, 15, 20, 99)
    factors = [func(completions=full, trainer_state=at(step))[0] for step in steps]
    assert factors == [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]
    with pytest.raises(ValueError, match="at least one point"):
        Scheduled(length_reward, {})


def test_an_adaptive_weight_rises_while_success_is_rare_and_falls_when_it_is_common():
    func = Adaptive(length_reward, change=2.0, least=0.25, greatest=4.0)
    for step in range(5):
        func(completions=[""] * 4, trainer_state=at(step))
    assert func.value == 4.0
    for step in range(5, 20):
        func(completions=["x" * 10] * 4, trainer_state=at(step))
    assert func.value == 0.25
    func(completions=["x" * 10, "", ""], trainer_state=at(20))
    assert func.value == 0.25  # a third: between the marks


def test_an_adaptive_weight_moves_once_a_step():
    func = Adaptive(length_reward, change=2.0)
    for _ in range(5):
        func(completions=[""], trainer_state=at(1))
    assert func.value == 2.0


def test_an_adaptive_weight_does_not_move_in_a_validation_nor_ask_other_processes():
    """Of several processes only the first validates; it would wait for the others' scores."""
    func = Adaptive(length_reward, change=2.0)
    func.everyones = lambda scores: pytest.fail("the others validate nothing")
    outside = Bench(reward_set([(func, 1.0)]))
    assert outside.score([{"prompt": []}] * 2, ["", "x" * 10]).tolist() == [[0.0], [1.0]]
    assert (func.value, func.step) == (1.0, -1)


def test_an_adaptive_weight_survives_a_checkpoint(tmp_path):
    func = Adaptive(length_reward, change=2.0)
    func(completions=[""], trainer_state=at(1))
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    rewards.keep_adaptive_weights([func, sign_reward]).on_save(arguments, at(1), None)
    fresh = Adaptive(length_reward, change=2.0)
    callback = rewards.keep_adaptive_weights([fresh])
    callback.on_train_begin(arguments, at(0), None)
    assert fresh.value == 1.0
    callback.on_train_begin(arguments, at(1), None)
    assert (fresh.value, fresh.step) == (2.0, 1)
    fresh(completions=[""], trainer_state=at(1))
    assert fresh.value == 2.0, "the step was counted before the checkpoint"


def test_a_set_from_yaml(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from grpo_nb.rewards import reward\n\n"
        "@reward()\ndef polite_reward(response: str, *, word: str = 'please') -> float:\n"
        "    return float(word in response)\n"
    )
    path = tmp_path / "rewards.yaml"
    path.write_text(
        "- reward: numeric_correctness_reward\n  weight: 2\n  arguments: {relative: 0.1}\n"
        "- reward: mine.py:polite_reward\n  name: thankful_reward\n"
        "  arguments: {word: thanks}\n"
        "- reward: trl.rewards:think_format_reward\n  weight: 0.25\n"
    )
    chosen = load_yaml(path)
    assert chosen.names[1:] == ["thankful_reward", "think_format_reward"]
    assert chosen.reward_weights == [2.0, 1.0, 0.25]
    chat = [[{"role": "assistant", "content": "95"}]]
    scores = [func(completions=chat, answer=["100"]) for func in chosen.reward_funcs]
    assert scores == [[1.0], [0.0], [0.0]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- reward: numeric_correctnes", "did you mean 'numeric_correctness_reward'"),
        ("- rewards: x", "names no reward"),
        ("- reward: json_format_reward\n  wight: 2", "'wight': did you mean 'weight'"),
        ("- reward: json_format_reward\n  arguments: {a: 1}", "has no option 'a'; it has none"),
        ("- reward: json:nothing", "json has no 'nothing'"),
        ("- reward: json_format_reward\n- reward: json_format_reward", "two rewards are named"),
        ("reward: x", "holds no list"),
        ("- reward: 3", "rewards.yaml: reward: 3 is no text"),
        ("- reward: json_format_reward\n  name: 2024", "name: 2024 is no text"),
        ("- reward: json_format_reward\n  arguments: 4", "arguments: 4 is no `.option: value.`"),
        ("- reward: no_such_module:f", "no_such_module cannot be imported: ModuleNotFound"),
        ("- reward: json_format_reward\n  weight:", "weight of json_format_reward is None"),
        ("- reward: json_format_reward\n  weight: .nan", "weight of json_format_reward is '.nan'"),
        ("- reward: json_format_reward\n  weight: .inf", "weight of json_format_reward is '.inf'"),
        ("- reward: json_format_reward\n  weight: yes", "weight of json_format_reward is 'yes'"),
        ("- reward: x\n  reward: y", "line 2: the key 'reward' stands twice"),
        ("- reward: [x", "rewards.yaml, line 1: "),
        ("{extends: math, rewards: [{reward: x, weight: .nan}]}", "reward 'x'"),
        ("{form: 3, rewards: [{reward: json_format_reward}]}", "rewards.preset '3'"),
        ("- reward: leaving.py:f", "leaving.py, line 1 cannot be loaded: SystemExit"),
        ("[]", "at least one reward"),
        ("rewards: [{reward: json_format_reward}]", "`form: PRESET` .its prompt and reference"),
        ("{form: jsn, rewards: []}", "rewards.preset 'jsn'"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, text, error):
    path = tmp_path / "rewards.yaml"
    path.write_text(text)
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ValueError, match=error):
        load_yaml(path)


def test_a_set_takes_a_presets_form_with_or_without_its_rewards(tmp_path):
    path, json_set = tmp_path / "rewards.yaml", load_preset("json_extraction")
    names = {}
    for key in ("form", "extends"):
        path.write_text(f"{{{key}: json_extraction, rewards: [{{reward: exact_match_reward}}]}}")
        chosen = load_yaml(path)
        assert (chosen.reference, chosen.extract) == (json_set.reference, json_set.extract)
        assert chosen.system_prompt == json_set.system_prompt
        names[key] = chosen.names
    assert names["form"] == ["exact_match_reward"]
    assert names["extends"] == [*json_set.names, "exact_match_reward"]


def test_a_file_that_raises_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"broken.py cannot be loaded: SyntaxError"):
        find_reward("broken.py:f", tmp_path)


def test_files_that_do_not_exist_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.yaml does not exist"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(FileNotFoundError, match=r"none.py does not exist"):
        find_reward("none.py:f", tmp_path)
