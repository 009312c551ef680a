"""The recipe for an OpenEnv server: with a stand-in for the package, which needs other versions."""

import json
import sys
import types

import pytest
from pages import blocks
from pydantic import BaseModel

from grpo_nb.environments import check_environment, check_rows, load
from grpo_nb.environments.play import replay, script
from grpo_nb.machine import PROJECT_ROOT

LINES = (PROJECT_ROOT / "data/tasks/guess.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [{**json.loads(line), "prompt": [{"role": "user", "content": "?"}]} for line in LINES[:12]]


@pytest.fixture
def files(tmp_path):
    """The recipe's two files."""
    for block in blocks(PROJECT_ROOT / "docs/recipes.md", "py"):
        name = block.text.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def remote(files, monkeypatch):
    """The class of the recipe, and its game behind a stand-in for OpenEnv."""
    stand_in(files, monkeypatch)
    return load(f"{files / 'remote.py'}:Remote")


def stand_in(files, monkeypatch):
    """OpenEnv's names as far as the recipe uses them, the server in the same process."""

    class Observation(BaseModel):
        done: bool = False
        reward: float | None = None

    class Client:
        def __init__(self, base_url):
            self.game = None

        def sync(self):
            return self

        def connect(self):
            self.game = server["Game"]()

        def reset(self, **given):
            return self.result(self.game.reset(**given))

        def step(self, action):
            return self.result(self.game.step(server["Guess"](**action)))

        def result(self, seen):
            fields = seen.model_dump(exclude={"done", "reward"})
            return types.SimpleNamespace(observation=fields, done=seen.done, reward=seen.reward)

        def close(self):
            self.game = None

    names = {"Action": BaseModel, "Environment": object, "Observation": Observation}
    names |= {"State": BaseModel, "create_fastapi_app": lambda *given, **options: None}
    modules = {"openenv": {}, "openenv.core": {"GenericEnvClient": Client}}
    for name, held in {**modules, "openenv.core.env_server": names}.items():
        module = types.ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    server = {"__name__": "server"}
    exec((files / "server.py").read_text(encoding="utf-8"), server)


def test_the_game_behind_a_server_is_the_shipped_one(remote):
    shipped = load("guess")
    check_rows(remote, ROWS)
    for row in ROWS:
        for turns in (shipped.solution(row), [[call(row["low"])] * 5]):  # five calls in a turn
            ends = [replay(one, row, script(turns)) for one in (remote, shipped)]
            said, wanted = ([made.result for made in end.calls] for end in ends)
            assert said == wanted
            assert len({end.get_reward() for end in ends}) == 1


def call(n):
    return {"name": "guess", "arguments": {"n": n}}


def test_the_game_behind_a_server_passes_the_check(remote):
    assert [one.state for one in check_environment(remote, ROWS)] == ["ok"]
