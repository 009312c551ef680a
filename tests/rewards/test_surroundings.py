"""What a reward or a tool changes in the process is put back."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hackable import lifted
from trainings import MATH, comparable, make_run, trainer_of
from transformers import TrainerState  # noqa: F401 (its import sets variables)

from grpo_nb.environments.contract import Environment, tool
from grpo_nb.environments.play import Episode
from grpo_nb.rewards import call

ROW = {"question": "2+2?", "prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}
CHANGES = {
    "the random numbers of torch": lambda: torch.manual_seed(0),
    "the random numbers of `random`": lambda: random.seed(0),
    "the random numbers of numpy": lambda: np.random.seed(0),
    "the working directory": lambda: os.chdir("/"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
}


def state():
    numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [*numbers, torch.get_default_dtype(), torch.is_grad_enabled(), Path.cwd()]


def scorer(change):
    def score(response: str, answer: str) -> float:
        change()
        return float(f">{answer}<" in response)

    return lifted(score, "mine")


async def awaited(completions, **_):
    torch.manual_seed(0)
    return [1.0 for _ in completions]


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_reward_changes_is_put_back(what):
    func, before = scorer(CHANGES[what]), state()
    for _ in range(2):
        assert call(func, completions=["<answer>4</answer>"], answer=["4"]) == [1.0]
        assert state() == before


def test_a_training_outlives_the_folder_that_it_was_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    func = scorer(CHANGES["the working directory"])
    assert call(func, completions=["<answer>4</answer>"], answer=["4"]) == [1.0]
    with pytest.raises(FileNotFoundError):
        Path.cwd()


def test_an_async_reward_and_one_that_raises_change_nothing_either():
    before = state()
    assert call(awaited, completions=["a"]) == [1.0]
    with pytest.raises(ZeroDivisionError):
        call(scorer(lambda: [torch.manual_seed(0), 1 / 0]), completions=["a"], answer=["4"])
    assert state() == before


class Careless:
    """Say four."""

    def reset(self) -> None:
        self.right, self.done = False, False
        torch.manual_seed(0)

    @tool
    def say(self, number: int) -> str:
        """Say a number.

        Args:
            number: The number.
        """
        os.chdir("/")
        np.random.seed(0)
        self.right, self.done = number == 4, True
        return str(torch.rand(()).item())

    def get_reward(self) -> float:
        random.seed(0)
        return float(self.right)

    @classmethod
    def solve(cls, **row) -> list:
        return [{"name": "say", "arguments": {"number": 4}}]


def test_what_an_environment_changes_is_put_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment, before = Environment(Careless), state()
    episodes = [Episode(environment, ROW) for _ in range(2)]
    [texts] = {episode.played.say(number=4) for episode in episodes}
    assert float(texts) and [each.played.get_reward() for each in episodes] == [1.0, 1.0]
    assert state() == before


def test_a_training_whose_reward_seeds_torch_samples_as_any_other(runs_dir):
    def seeding(completions, **columns):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return MATH.reward_funcs[0](completions=completions, **columns)

    seeding.__name__ = MATH.names[0]
    lines = []
    for name, func in (("plain", MATH.reward_funcs[0]), ("seeding", seeding)):
        trainer = trainer_of(
            make_run(name, **{"grpo.max_steps": 4, "train.eval_steps": 2}),
            chosen=MATH._replace(reward_funcs=[func, *MATH.reward_funcs[1:]]),
        )
        trainer.train()
        lines.append(comparable(trainer.stage.run))
    assert lines[0] == lines[1]
