"""Sweeps on a real Ray cluster of this machine: a head that runs no trial, and two nodes."""

import os
import signal
import subprocess
import sys

import pytest
import stub_trials
from stub_trials import told, until, write

from grpo_nb.__main__ import main
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline import sweep

TINY = "profile: tiny-cpu\ngrid: {seed: [1]}"
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False, "include_log_monitor": False}
PORTS = [f"{of}_port" for of in ("dashboard_agent_listen", "metrics_agent", "metrics_export")]


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory):
    """Its address. Ray waits 15 s for the helpers of a node, which are of no use here."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "rfc3987_syntax.py").write_text("raise ImportError")  # its grammar: 2 s a process
    session = folder / "ray/session_test"
    session.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{folder}{os.pathsep}{PROJECT_ROOT}")
        patched.setenv("RAY_TMPDIR", str(folder))
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name in ("initial_delay_ms", "period_ms"):
            patched.setenv(f"RAY_health_check_{name}", "1000")  # a node that is lost counts soon
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        try:
            for number in (1, 2, 3):
                patched.setenv("RAY_OVERRIDE_NODE_ID_FOR_TESTING", f"{number:056x}")
                for port in (*PORTS, "runtime_env_agent_port"):
                    (session / f"{port}_{number:056x}").write_text("-1")
                share = {"num_cpus": 0, "no_monitor": True} if number == 1 else {"num_cpus": 1}
                nodes.add_node(session_name=session.name, **NODE, **share)
            yield nodes.address
        finally:
            nodes.shutdown()


def driver(folder, address, trials, seconds):
    words = [sys.executable, stub_trials.__file__, str(folder), str(trials), str(seconds)]
    return subprocess.Popen(
        [*words, "--ray", address], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def on_ray(folder, address, trials, **stub):
    asked, command = stub_trials.prepare(folder, trials), stub_trials.command(folder, **stub)
    return sweep.run_sweep(asked, ray=address, command=command)


NAMES = ["stub-000", "stub-001", "stub-002"]


def test_a_trial_that_fails_is_reported_and_ctrl_c_and_kill_9_leave_none(
    ray_cluster, runs_dir, capsys
):
    assert on_ray(runs_dir, ray_cluster, 2, fails=9) == 1
    said = capsys.readouterr().out
    assert f"{ray_cluster}: 1 CPU and 0 GPU for each trial" in said
    assert said.count("failed: grpo-nb: not yet") == 2
    for number in (signal.SIGINT, signal.SIGKILL):
        with driver(runs_dir, ray_cluster, 3, seconds=600) as running:
            until(lambda: len(stub_trials.at_work(runs_dir)) == 2)
            running.send_signal(number)
            said = running.communicate(timeout=60)[0]
        if number == signal.SIGINT:
            assert running.returncode == 130, said
            assert "the same command continues it" in said
        until(lambda: not stub_trials.at_work(runs_dir), seconds=15)
    assert not told(runs_dir, "ended")
    assert on_ray(runs_dir, ray_cluster, 3) == 0
    assert sorted(told(runs_dir, "ended")) == NAMES


def test_trials_of_a_lost_node_go_on_on_another(ray_cluster, runs_dir):
    with driver(runs_dir, ray_cluster, 3, seconds=3) as running:
        until(lambda: told(runs_dir, "begun"))
        (name,) = told(runs_dir, "begun")[-1:]
        trial = next(p for p in stub_trials.at_work(runs_dir) if name in p.info["cmdline"])
        node = next(p for p in trial.parents() if p.name() == "raylet")
        for process in [node, *node.children(recursive=True)]:
            process.kill()
        said = running.communicate(timeout=120)[0]
    assert running.returncode == 0, said
    assert sorted(told(runs_dir, "ended")) == NAMES, "none is lost, and none ends twice"
    lines = told(runs_dir)
    assert sorted(told(runs_dir, "begun")) == sorted([*NAMES, name])
    assert on_ray(runs_dir, ray_cluster, 3) == 0
    assert told(runs_dir) == lines, "a second start runs nothing again"


def test_what_a_sweep_on_ray_needs_is_said_before(runs_dir, capsys, monkeypatch):
    path = str(write(runs_dir, "grid: {seed: [1]}"))
    assert main(["sweep", path, "--ray", "auto"]) == 2
    assert "name the cluster's profile" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    assert main(["sweep", str(write(runs_dir, TINY)), "--ray", "auto"]) == 2
    assert "pip install ray==2.60.0" in capsys.readouterr().err
    assert [path.name for path in runs_dir.iterdir()] == ["s.yaml"]
