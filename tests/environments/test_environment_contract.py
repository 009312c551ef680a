"""The contract of environments: what the guard adds to an author's class, and whom it refuses."""

import copy
import random
import threading
import time
import typing

import numpy as np
import pytest
from flawed_environments import Hunt, hunt_rows

from grpo_nb.environments import Environment, check_rows, load, tool
from grpo_nb.environments.contract import FINISHED
from grpo_nb.environments.play import Episode, run_call

WAYS = "'raise', 'exit', 'hang', 'end' or 'draw'"
ROW = hunt_rows()[0]  # low 10, secret 13
Way = typing.Literal["raise", "exit", "hang", "end", "draw"]


class Odd:
    """Tools that misbehave."""

    tool_seconds = 0.05
    done = False
    wait = threading.Event()

    def reset(self, **row) -> str:
        self.row, self.done = row, False
        self.drawn = random.random(), np.random.rand()
        return f" Drawn {self.drawn}."

    @tool
    def act(self, how: Way, often: int = 1) -> str:
        """Act.

        Args:
            how: Which way.
            often: How often.
        """
        if how == "raise":
            raise KeyError("lost")
        if how == "exit":
            raise SystemExit(3)
        if how == "hang":
            self.wait.wait()
            return ""  # and draws nothing, which another test would see
        self.done = how == "end"
        return [random.random(), float(np.random.rand())]

    def helper(self):
        return "no tool: another method is marked"

    def get_reward(self):
        return 0.5


def asked(played, name, **arguments):
    """What the model reads."""
    return run_call(played, {"function": {"name": name, "arguments": arguments}})["content"]


@pytest.fixture
def odd():
    return Episode(Environment(Odd), ROW).played


@pytest.mark.parametrize(
    ("name", "arguments", "read"),
    [
        ("act", {"how": "fly"}, f"act: how: input should be {WAYS}"),
        ("act", {"how": "draw", "often": "2"}, "act: often: input should be a valid integer"),
        ("act", {}, "act: how: missing required argument"),
        ("act", {"how": "raise"}, "KeyError: 'lost'"),
        ("act", {"how": "exit"}, "SystemExit: 3"),
    ],
)
def test_the_model_reads_of_errors_and_the_episode_goes_on(odd, name, arguments, read):
    assert asked(odd, name, **arguments) == str({"error": read})
    assert odd.get_reward() == 0.5
    assert asked(odd, "act", how="draw").startswith("[0.")


@pytest.mark.parametrize(
    ("name", "arguments", "read"),
    [
        ("get_reward", {}, "Tool get_reward not found."),
        ("act", "raise", "argument after ** must be a mapping, not str"),
    ],
)
def test_calls_that_are_none_are_answered_as_trl_does(odd, name, arguments, read):
    said = run_call(odd, {"function": {"name": name, "arguments": arguments}})
    assert (said["role"], said["name"]) == ("tool", name)
    assert said["content"].startswith("{'error': ") and read in said["content"]


def test_results_are_texts_that_a_tokenizer_takes():
    class Echoes(Hunt):
        @tool
        def say(self, text: str) -> str:
            """Say it.

            Args:
                text: What.
            """
            return text

    assert asked(Episode(Environment(Echoes), ROW).played, "say", text="half \ud800") == "half ?"


def test_calls_after_the_end_are_told_so_and_change_nothing(odd):
    asked(odd, "act", how="end")
    assert asked(odd, "act", how="raise") == FINISHED
    odd.reset(**ROW)
    assert asked(odd, "act", how="draw") != FINISHED


def test_a_call_that_hangs_is_over_at_its_limit_and_the_instance_is_used_again(odd):
    started = time.perf_counter()
    assert "act took more than 0.05 seconds: the episode is over" in asked(odd, "act", how="hang")
    assert time.perf_counter() - started < 5
    assert asked(odd, "act", how="draw") == FINISHED
    assert odd.get_reward() == 0.0, "a failure, whatever the class would say"
    odd.reset(**ROW)
    assert odd.get_reward() == 0.5
    assert asked(odd, "act", how="draw") != FINISHED


def test_a_group_starts_alike_and_the_caller_keeps_its_randomness():
    environment = Environment(Odd)
    random.seed(1)
    np.random.seed(1)
    kept = random.getstate(), np.random.get_state()[1].tolist()
    group = [Episode(environment, ROW) for _ in range(3)]
    assert len({one.prompt[-1]["content"] for one in group}) == 1
    first, second, third = (one.played for one in group)
    said = [asked(first, "act", how="draw") for _ in range(2)]
    assert said[0] != said[1]
    assert [asked(second, "act", how="draw") for _ in range(2)] == said, "calls may be in between"
    assert [asked(copy.deepcopy(third), "act", how="draw") for _ in range(2)] == said[:1] * 2
    other = Episode(environment, {**ROW, "secret": 14}).played
    assert other.drawn != first.drawn
    filled = Episode(environment, {**ROW, "absent": None}).played  # as a dataset fills it in
    assert filled.drawn == first.drawn
    assert (random.getstate(), np.random.get_state()[1].tolist()) == kept


MINE = """
class NoTool:
    def reset(self, **row): ...

class NoReset:
    def act(self) -> str:
        'Act.'
"""


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gues", ValueError, r"environment 'gues'.*guess"),
        ("no_package:Guess", ImportError, "no_package"),
        ("mine.py:Guess", AttributeError, "has no attribute 'Guess'"),
        ("mine.py:NoTool", ValueError, "NoTool has no tool: mark a method with @tool"),
        ("mine.py:NoReset", ValueError, "environment NoReset has no method reset"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path, name, error, message):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(error, match=message):
        load(name.replace("mine.py", f"{tmp_path}/mine.py"))


def test_rows_begin_before_anything_is_sampled_with_the_columns_that_reset_takes():
    raises = type("Raises", (Hunt,), {"reset": lambda self, secret: 1 / (secret - 13)})
    with pytest.raises(ZeroDivisionError):
        check_rows(Environment(raises), hunt_rows())
    environment = Environment(Hunt)
    lacks = r"Hunt\.reset: missing a required argument: .secret.; the data has"
    with pytest.raises(ValueError, match=lacks):
        check_rows(environment, [{"prompt": [], "low": 1}])
    [check] = check_rows(environment, hunt_rows())
    assert check.state == "ok"
    assert check_rows(None, hunt_rows()) == []
    assert environment.columns(ROW) == {"low": 10, "secret": 13}
    assert Environment(Odd).columns(ROW) == ROW, "it takes **row"
