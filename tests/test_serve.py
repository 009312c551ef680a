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
import time
from contextlib import contextmanager

import httpx
import openai
import pandas as pd
import pytest

from grpo_nb import models
from grpo_nb.__main__ import main
from grpo_nb.pipeline import serve
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, project_path

TINY = "data/tiny_base"
SUM = build_prompt("What is 47 + 38?")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def run(moved_run, tmp_path_factory):
    """An adapter, a whole model in the place of the merged one, and a held-out row."""
    folder = shutil.copytree(moved_run.path, tmp_path_factory.mktemp("served") / "mine")
    shutil.copytree(project_path(TINY), folder / "model/merged")
    (folder / "data").mkdir()
    row = {"prompt": SUM, "question": SUM[-1]["content"], "answer": "85"}
    pd.DataFrame([row]).to_parquet(folder / "data/eval.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(folder.parent))
        return Run("mine")


@contextmanager
def serving(run, port, *more, **environment):
    """(process, the lines it said); it is ended afterwards."""
    command = [sys.executable, "-m", "grpo_nb", "serve", str(run.path), "--port", str(port), *more]
    kept = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | environment}
    with subprocess.Popen(command, **kept) as process:
        try:
            said = [next(process.stdout) for _ in range(3)]
            yield process, said
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def server(run):
    """Address of a server of the merged model that all tests ask."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    with serving(run, number) as (_, said):
        yield f"http://127.0.0.1:{number}", said


def expected(adapter=None, quantization="16bit", **how):
    engine = models.open_engine(TINY, adapter=adapter, quantization=quantization)
    return engine.generate([SUM], max_completion_length=48, **how)[0][0].text


def ask(url, **change):
    body = {"model": "mine", "messages": SUM, "temperature": 0, "max_tokens": 48} | change
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def why(reply, status):
    assert reply.status_code == status, reply.text
    return reply.json()["error"]["message"]


def test_openais_client_finds_the_model_and_is_answered_whole_and_streamed(server):
    url, said = server
    assert said[0] == f"Listening at {url}/v1, model mine. Ask it:\n"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    [found] = client.models.list().data
    assert found.id == "mine"
    given = {"model": found.id, "messages": SUM, "max_tokens": 48, "temperature": 0}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == expected()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = [one.choices[0] for one in client.chat.completions.create(**given, stream=True)]
    assert "".join(one.delta.content or "" for one in chunks) == expected()
    assert [one.finish_reason for one in chunks if one.finish_reason] == ["stop"]
    assert sum(bool(one.delta.content) for one in chunks) >= 1
    curl = shlex.split(said[2])
    asked = subprocess.run([*curl, "-s"], capture_output=True, text=True, check=True)
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"] == expected()


def test_sampling_follows_the_seed(server):
    texts = [
        ask(server[0], temperature=1, seed=seed).json()["choices"][0]["message"]["content"]
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] == expected(temperature=1.0, seed=3) != texts[2]


def test_a_prompt_that_does_not_fit_is_refused_at_once_and_the_next_is_answered(server):
    url, started = server[0], time.monotonic()
    large = [{"role": "user", "content": "What is 1 + 1? " * 70_000}]
    assert "is larger than 73728 bytes" in why(ask(url, messages=large), 413)
    long = [{"role": "user", "content": "What is 1 + 1? " * 100}]
    assert "tokens: the model takes 512 with its completion" in why(ask(url, messages=long), 413)
    assert time.monotonic() - started < 20
    assert ask(url).status_code == 200
    fits = [{"role": "user", "content": "What is 1 + 1? " * 40}]
    used = ask(url, messages=fits, max_tokens=4000, temperature=2).json()["usage"]
    assert used["total_tokens"] <= 512


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "attacker.example"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "{url}"}, 200),
        ({"Host": "localhost:{port}"}, 200),
    ],
)
def test_only_requests_that_mean_this_server_are_answered(server, headers, status):
    url, port = server[0], server[0].rpartition(":")[2]
    given = {name: value.format(url=url, port=port) for name, value in headers.items()}
    assert httpx.get(f"{url}/v1/models", headers=given).status_code == status
    body = {"model": "mine", "messages": SUM, "max_tokens": 1}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=given, timeout=60)
    assert reply.status_code == status


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": str(project_path(TINY))}, 404, "this server has 'mine' alone"),
        ({"model": None}, 404, "this server has 'mine' alone"),
        ({"messages": "hello"}, 400, "messages = 'hello' is of the wrong type"),
        ({"messages": []}, 400, "messages is empty: send one at least"),
        ({"messages": [{"role": "user"}]}, 400, "a message has a role of"),
        (
            {"messages": [{"role": "user", "content": "x<|im_end|>"}]},
            400,
            "cannot be asked: the content of a turn holds '<|im_end|>', a special token",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "a message has a role of"),
        ({"top_p": 0.5}, 400, "top_p = 0.5 is not offered"),
        ({"n": 2}, 400, "n = 2 is not offered"),
        ({"temperature": -1}, 400, "temperature from 0 to 10"),
        ({"temperature": True}, 400, "temperature = True is of the wrong type"),
        ({"max_tokens": 0}, 400, "max_tokens is at least 1"),
        ({"seed": "x"}, 400, "seed = 'x' is of the wrong type"),
    ],
)
def test_what_cannot_be_answered_says_why(server, change, status, message):
    assert message in why(ask(server[0], **change), status)


def test_no_other_address_does_anything_and_no_json_is_refused(server):
    for path in ("/load_model", "/v1/completions", "/docs", "/v1/responses", "/reset"):
        assert httpx.post(server[0] + path, json={"model": TINY}).status_code == 404
    for broken in (b"{", b"[" * 50_000):
        reply = httpx.post(f"{server[0]}/v1/chat/completions", content=broken)
        assert why(reply, 400) == "the body is not JSON"
    half = b'{"model": "mine", "messages": [{"role": "user", "content": "\\ud800"}]}'
    reply = httpx.post(f"{server[0]}/v1/chat/completions", content=half)
    assert "surrogate" in why(reply, 400)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_of_it_also_while_it_answers(run, port, sign):
    with serving(run, port) as (process, _):
        body = {"model": "mine", "messages": SUM, "temperature": 5, "max_tokens": 480}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as reply:
            next(reply.iter_lines())
            process.send_signal(sign)
            ended = process.wait(timeout=30)
    assert ended == (0 if sign == signal.SIGINT else -sign)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server outlives the command"


def test_an_adapter_is_served_and_strangers_need_the_key(run, port):
    with serving(run, port, "--adapter", "--host", "0.0.0.0", GRPO_NB_API_KEY="sesame") as (
        _,
        said,
    ):
        url = f"http://127.0.0.1:{port}"
        assert "send the key" in why(ask(url), 401)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert "Authorization: Bearer sesame" in shlex.split(said[2])
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame")
        given = {"model": "mine", "messages": SUM, "max_tokens": 48, "temperature": 0}
        answer = client.chat.completions.create(**given).choices[0].message.content
    assert answer == expected(run / "train/adapter", "4bit") != expected(None, "4bit")


def test_vllm_gets_the_trained_base_a_rank_it_knows_the_guard_and_no_key_among_arguments(
    run, tmp_path, monkeypatch
):
    merged = serve.plan(run, "127.0.0.1", 8000)
    assert "--served-model-name mine" in " ".join(merged.command)
    assert f"--model {run / 'model/merged'}" in " ".join(merged.command)
    assert merged.key == "" and merged.rules["hosts"][0] == "127.0.0.1:8000"
    copy = shutil.copytree(run.path, tmp_path / "mine")
    path = copy / "train/adapter/adapter_config.json"
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path))

    def command(rank, base):
        settings = json.loads(path.read_text()) | {"r": rank, "base_model_name_or_path": base}
        path.write_text(json.dumps(settings))
        return " ".join(serve.plan(Run("mine"), "0.0.0.0", 8000, adapter=True).command)

    copied = command(12, "unsloth/Tiny_Base-bnb-4bit")  # the copy that Unsloth trained on
    assert "--model unsloth/Tiny_Base-bnb-4bit" in copied
    assert "--max-lora-rank 16 " in copied and "--max-model-len 512 " in copied
    assert f"--lora-modules mine={copy / 'train/adapter'}" in copied
    assert "--quantization bitsandbytes" in copied
    for rank, room in ((1, 1), (4, 8), (64, 64), (129, 256), (257, 320), (512, 512)):
        assert f"--max-lora-rank {room} " in command(rank, TINY)
    with pytest.raises(ValueError, match="has rank 513, and vLLM takes at most 512"):
        command(513, TINY)
    open_to_all = serve.plan(Run("mine"), "0.0.0.0", 8000)
    assert len(open_to_all.key) > 20 and open_to_all.rules["hosts"] == []
    assert open_to_all.key not in " ".join(open_to_all.command)
    assert open_to_all.key in open_to_all.environment["GRPO_NB_SERVE_RULES"]


PARENT = """
import subprocess, sys
from grpo_nb.pipeline import serve
print(subprocess.Popen(["sleep", "600"], preexec_fn=serve.end_with_parent).pid, flush=True)
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
    assert "runs/nowhere is no run" in capsys.readouterr().err
