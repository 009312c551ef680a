"""The OpenAI-compatible server."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pandas as pd
import pytest

from grpo_nb import data, serve
from grpo_nb.__main__ import main


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_chat_question_through_the_openai_client_and_the_printed_curl(demo_run, port):
    """transformers' own server on a machine without vLLM; on a GPU, vLLM's."""
    from openai import OpenAI

    command = [sys.executable, "-m", "grpo_nb", "serve", str(demo_run.path), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            printed = next(line for line in process.stdout if line.startswith("Listening"))
            curl = next(line for line in process.stdout if line.startswith("curl"))
            model = re.search(r"model (\S+)\. Ask it", printed)[1]
            samples = pd.read_parquet(demo_run / "eval/samples.parquet")
            row = data.load(demo_run, "eval")[0]
            known = samples.query("model == 'merged' and decoding == 'greedy'").iloc[0]
            assert known["question"] == row["question"]
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            given = {"model": model, "messages": row["prompt"], "max_tokens": 48}
            answer = client.chat.completions.create(**given, temperature=0)
            assert answer.choices[0].message.content == known["completion"]
            asked = subprocess.run(
                [*shlex.split(curl), "-s"], capture_output=True, text=True, check=True
            )
            message = json.loads(asked.stdout)["choices"][0]["message"]
            assert message["content"] == known["completion"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server outlives the command"


def test_vllm_serves_merged_or_base_with_adapter_and_asks_strangers_for_a_key(
    demo_run, monkeypatch
):
    merged = serve.plan(demo_run, "127.0.0.1", 8000, vllm=True)
    assert (merged.model, merged.key, merged.environment) == ("demo", "", {})
    assert str(demo_run / "model/merged") in merged.command
    tuned = serve.plan(demo_run, "0.0.0.0", 8000, adapter=True, vllm=True)
    assert f"demo={demo_run / 'train/adapter'}" in tuned.command
    assert "--quantization bitsandbytes" in " ".join(tuned.command)
    assert len(tuned.key) > 20
    assert tuned.environment == {"VLLM_API_KEY": tuned.key}
    assert tuned.key not in " ".join(tuned.command)
    assert f"Bearer {tuned.key}" in serve.curl(tuned, "127.0.0.1", 8000, [], 8)
    monkeypatch.setenv("GRPO_NB_API_KEY", "mine")
    assert serve.plan(demo_run, "0.0.0.0", 8000, vllm=True).key == "mine"


def test_transformers_server_is_refused_what_it_cannot_do(demo_run):
    with pytest.raises(ValueError, match=r"knows no API key: stay on 127.0.0.1"):
        serve.plan(demo_run, "0.0.0.0", 8000)
    with pytest.raises(ValueError, match="takes no adapter"):
        serve.plan(demo_run, "127.0.0.1", 8000, adapter=True)


def test_a_port_in_use_and_a_run_that_is_none_are_named(demo_run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(demo_run.path), "--port", str(port)]) == 1
    assert f"port {port} is taken" in capsys.readouterr().err
    assert main(["serve", "runs/nowhere"]) == 2
    assert "runs/nowhere is no run" in capsys.readouterr().err
