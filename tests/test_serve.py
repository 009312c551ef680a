"""The OpenAI-compatible server, started as a user does, asked by OpenAI's client and by others."""

import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import cache

import httpx
import openai
import pandas as pd
import pytest
from conftest import free_port

from grpo_nb import models
from grpo_nb.__main__ import main
from grpo_nb.evaluation.answers import weights_of
from grpo_nb.pipeline import serve
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, project_path

TINY = "data/tiny_base"
KEY = "sesame"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
SUM = build_prompt("What is 47 + 38?")


@pytest.fixture(scope="module")
def run(moved_run, tmp_path_factory):
    """An adapter, a whole model in the place of the merged one, and a held-out row."""
    folder = shutil.copytree(moved_run.path, tmp_path_factory.mktemp("served") / "mine")
    shutil.copytree(project_path(TINY), folder / "model/merged")
    (folder / "data").mkdir(exist_ok=True)
    row = {"prompt": SUM, "question": SUM[-1]["content"], "answer": "85"}
    pd.DataFrame([row]).to_parquet(folder / "data/eval.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(folder.parent))
        return Run("mine")


@contextmanager
def serving(run, port, *more, **environment):
    """(process, the lines it said); it is ended afterwards."""
    command = [sys.executable, "-m", "grpo_nb", "serve", str(run.path), "--port", str(port), *more]
    known = os.environ | {"GRPO_NB_API_KEY": KEY} | environment
    kept = {"stdout": subprocess.PIPE, "text": True, "env": known}
    with subprocess.Popen(command, **kept) as process:
        try:
            said = [next(process.stdout) for _ in range(3)]
            yield process, said
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def server(run):
    """Address of a server of the merged model that all tests ask."""
    number = free_port()
    with serving(run, number) as (process, said):
        yield f"http://127.0.0.1:{number}", said
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0, "Ctrl-C is how it is ended"


@pytest.fixture(scope="module")
def of_adapter(run):
    """(run, process, what it said, address) of a server of base and adapter, without a key set."""
    number = free_port()
    more = ("--adapter", "--host", "0.0.0.0")
    with serving(run, number, *more, GRPO_NB_API_KEY="") as (process, said):
        yield run, process, said, f"http://127.0.0.1:{number}"


@cache
def expected(adapter=None, quantization="16bit"):
    engine = models.open_engine(TINY, adapter=adapter, quantization=quantization)
    return engine.generate([SUM], max_completion_length=48)[0][0].text


def ask(url, **change):
    body = {"model": "mine", "messages": SUM, "temperature": 0, "max_tokens": 48} | change
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=WITH_KEY, timeout=60)


def test_openais_client_finds_the_model_and_is_answered_whole_and_streamed(server):
    url, said = server
    assert said[0] == f"Listening at {url}/v1, model mine. Ask it:\n"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    [found] = client.models.list().data
    assert found.id == "mine"
    given = {"model": found.id, "messages": SUM, "max_tokens": 48, "temperature": 0}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == expected()
    assert answer.choices[0].finish_reason == "stop"
    chunks = [one.choices[0] for one in client.chat.completions.create(**given, stream=True)]
    assert "".join(one.delta.content or "" for one in chunks) == expected()
    curl = shlex.split(said[2])
    asked = subprocess.run([*curl, "-s"], capture_output=True, text=True, check=True)
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"] == expected()


def test_sampling_follows_the_seed_and_differs_from_greedy(server):
    texts = [
        ask(server[0], temperature=2, seed=seed).json()["choices"][0]["message"]["content"]
        for seed in (3, 3)
    ]
    assert texts[0] == texts[1] != expected()


@pytest.mark.parametrize("key", [{}, {"Authorization": "Bearer open"}, {"Authorization": KEY}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/load_model", "/docs"])
def test_only_who_has_the_key_is_answered(server, key, path):
    for refused in (httpx.get(server[0] + path, headers=key), httpx.post(server[0] + path)):
        assert refused.status_code == 401
        assert "send the key" in refused.text


def test_no_other_address_and_no_other_model(server):
    url = server[0]
    for path in ("/load_model", "/v1/completions", "/docs", "/v1/responses", "/reset"):
        assert httpx.post(url + path, json={"model": TINY}, headers=WITH_KEY).status_code == 404
    assert "pinned to 'mine'" in ask(url, model=str(project_path(TINY))).text
    assert ask(url).status_code == 200


def test_an_adapter_is_served_and_a_key_is_made_where_none_is_set(of_adapter):
    run, _, said, url = of_adapter
    key = shlex.split(said[2])[-1].removeprefix("Authorization: Bearer ")
    assert len(key) == 32
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    given = {"model": "mine", "messages": SUM, "max_tokens": 48, "temperature": 0}
    answer = client.chat.completions.create(**given).choices[0].message.content
    tuned = expected(run / "train/adapter", "4bit")
    assert answer == tuned.strip() != expected(None, "4bit").strip()


def test_a_signal_ends_all_of_it_also_while_it_answers(of_adapter):
    _, process, said, url = of_adapter
    body = {"model": "mine", "messages": SUM, "temperature": 5, "max_tokens": 480, "stream": True}
    given = {"headers": dict([shlex.split(said[2])[-1].split(": ")]), "timeout": 60}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, **given) as reply:
        next(reply.iter_lines())
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGTERM
    with pytest.raises(httpx.ConnectError):  # else the server outlives the command
        httpx.get(url)


def test_vllm_gets_the_base_a_rank_it_knows_and_the_guard_but_no_key(run, monkeypatch):
    monkeypatch.setenv(serve.KEY, KEY)
    merged = " ".join(serve.vllm_command("mine", "::1", 8000, weights_of(run, "merged"), 512))
    assert "--served-model-name mine" in merged and f"--model {run / 'model/merged'}" in merged
    adapter = " ".join(serve.vllm_command("mine", "::1", 8000, weights_of(run, "adapter"), 512))
    assert "tiny_base" in adapter and "--quantization bitsandbytes" in adapter
    assert "--served-model-name mine-base --enable-lora" in adapter
    assert f"--lora-modules mine={run / 'train/adapter'}" in adapter
    for command in (merged, adapter):
        assert "--middleware grpo_nb.pipeline.serve.guard" in command
        assert "--max-model-len 512" in command and KEY not in command
    path = run / "train/adapter/adapter_config.json"
    before = path.read_text()
    for rank, room in ((1, 1), (12, 16), (64, 64), (257, 320), (512, 512), (513, None)):
        path.write_text(json.dumps(json.loads(before) | {"r": rank}))
        if room:
            assert models.lora_rank(run / "train/adapter") == room
    with pytest.raises(ValueError, match="has rank 513, and vLLM takes at most 512"):
        models.lora_rank(run / "train/adapter")
    path.write_text(before)


PARENT = """
import subprocess
from grpo_nb.pipeline.sweep import ending_with_us
print(subprocess.Popen(ending_with_us(["sleep", "600"])).pid, flush=True)
input()
"""


def test_a_child_ends_with_its_parent_however_that_ends():
    kept = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PARENT], **kept) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert select.select([child], [], [], 10)[0], "it lives on"


def test_a_port_in_use_and_a_run_that_is_none_are_named(run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(run.path), "--port", str(port)]) == 1
    assert f"port {port} is taken" in capsys.readouterr().err
    assert main(["serve", "runs/nowhere"]) == 2
    assert "runs/nowhere is not a run" in capsys.readouterr().err
