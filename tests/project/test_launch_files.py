"""What docs/launch/ ships is read by what will read it: accelerate, bash and a YAML parser."""

import os
import subprocess

import pytest
import yaml

from grpo_nb import models
from grpo_nb.machine import PROJECT_ROOT

FOLDER = PROJECT_ROOT / "docs/launch"
# distributed type, environment of the processes, whether their weights are sharded
ACCELERATE = {
    "ddp": ("MULTI_GPU", {}, False),
    "fsdp": ("FSDP", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, True),
    "zero2": ("DEEPSPEED", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, False),
    "zero3": ("DEEPSPEED", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, True),
}


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate_reads_its_configurations(name, monkeypatch):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    kind, expected, sharded = ACCELERATE[name]
    path = str(FOLDER / f"{name}.yaml")
    config = load_config_from_file(path)
    assert config.distributed_type == kind
    assert (config.num_processes, config.mixed_precision) == (8, "bf16")
    given = ["--config_file", path, "--num_processes", "4", "-m", "grpo_nb", "train", "runs/x"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert arguments.num_processes == 4
    if kind == "DEEPSPEED":
        arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        environment = prepare_multi_gpu_env(arguments)
    assert expected.items() <= environment.items()
    for variable in environment.keys() - os.environ.keys():
        monkeypatch.setenv(variable, environment[variable])
    assert models.sharded() is sharded


def commands():
    """The shell text of each cluster file, and how many processes it asks for."""
    sky = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    job = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))[1]
    container = job["spec"]["template"]["spec"]["containers"][0]
    yield sky["setup"] + sky["run"], None
    yield container["args"][0], job["spec"]["completions"] * 8
    yield (FOLDER / "slurm.sh").read_text(), None


@pytest.mark.parametrize("text, processes", commands(), ids=["skypilot", "kubernetes", "slurm"])
def test_cluster_files_hold_commands_that_bash_and_grpo_nb_can_read(text, processes):
    from grpo_nb.__main__ import parse_arguments

    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    words = text.replace("\\\n", " ").split("-m grpo_nb ")[1].splitlines()[0].split(" --processes ")
    parsed = parse_arguments([*words[0].split(), "--processes", str(processes or 8)])
    assert parsed.do == "grpo_nb.pipeline.notebooks:train"
    if processes:
        assert words[1].split()[0] == str(processes)
