"""The rules every notebook keeps, nbval over them, and the Colab cell."""

import ast
import ensurepip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import forked
import nbformat
import pandas as pd
import papermill
import pytest
import refresh
from conftest import TINY_SETTINGS

from grpo_nb import data, export, runs
from grpo_nb.colab import RUNS_ON_DRIVE, wanted
from grpo_nb.files import project_path, read_json
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.elsewhere import scorer, write_task
from grpo_nb.pipeline.notebooks import QUIET, resolve_run
from grpo_nb.runs import NOTEBOOKS, Run, config
from grpo_nb.training import read_lines

FOLDER = project_path("notebooks")
ALL = {"00": refresh.QUICKSTART, **NOTEBOOKS, "05": refresh.COMPARE}
every_notebook = pytest.mark.parametrize("stage", ALL)
PARAMETER = re.compile(r'(\w+): (str|bool|dict) = ("\w*"|False|{})  # \S.*')


def path_of(stage):
    return FOLDER / f"{ALL[stage]}.ipynb"


def read(stage):
    return nbformat.read(path_of(stage), as_version=4)


def code_cells(stage):
    return [cell for cell in read(stage).cells if cell.cell_type == "code"]


def has_tag(cell, tag):
    return tag in cell.metadata.get("tags", [])


def tagged(stage, tag):
    (cell,) = [cell for cell in code_cells(stage) if has_tag(cell, tag)]
    return cell


@pytest.mark.parametrize("stage", ["00", *NOTEBOOKS])
def test_the_parameters_are_the_run_and_a_dict_of_settings(stage):
    lines = [PARAMETER.fullmatch(line) for line in tagged(stage, "parameters").source.splitlines()]
    own = {"00": ["profile", "task", "force"], "01": ["profile", "task"]}.get(stage, ["force"])
    assert [match[1] for match in lines] == ["run_name", *own, "settings"]
    example = ast.literal_eval(lines[-1][0].rpartition("  # ")[2])
    assert stage == "00" or config.of_stage(stage, example) == example
    config.resolve("tiny-cpu", example)
    found = papermill.inspect_notebook(str(path_of(stage)))
    assert list(found) == [match[1] for match in lines], "papermill does not see all of them"


@every_notebook
def test_cells_are_few_short_and_thin(stage):
    cells = code_cells(stage)
    assert len(cells) <= 25
    for cell in cells:
        assert len(cell.source.splitlines()) <= 15
        marked = has_tag(cell, "your-reward-here")
        source = cell.source.removeprefix("%%rewards\n")
        assert marked == (source != cell.source), "the reader's rewards have the cell magic"
        nodes = list(ast.walk(ast.parse(source)))
        assert not [node for node in nodes if isinstance(node, ast.Global | ast.Try)]
        logic = ast.FunctionDef | ast.ClassDef | ast.Lambda
        if not marked:
            assert not [node for node in nodes if isinstance(node, logic)]


def test_the_quickstart_has_cells_of_the_four_notebooks_as_they_are():
    quickstart = read("00")
    before = [(cell.source, dict(cell.metadata)) for cell in quickstart.cells]
    training = ["03-grpo", "03-args", "03-10", "03-12", "03-14", "03-15"]
    assert {"01-01", "02-15", *training, "04-20"} <= set(refresh.join(quickstart))
    assert before == [(cell.source, dict(cell.metadata)) for cell in quickstart.cells]


@every_notebook
def test_they_are_committed_executed_without_machine_paths_or_widget_state(stage):
    notebook, text = read(stage), path_of(stage).read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert "widgets" not in notebook.metadata
    stored = notebook.metadata["grpo_nb"]["source_sha256"]
    assert stored == refresh.source_digest(notebook), "run `make notebooks`"
    for place in (str(PROJECT_ROOT), "/home/", "/root/", "/tmp/", "/Users/"):
        assert place not in text
    counts = [cell.execution_count for cell in code_cells(stage)]
    assert counts == list(range(1, len(counts) + 1))
    errors = [o for cell in code_cells(stage) for o in cell.outputs if o.output_type == "error"]
    assert not errors


@every_notebook
def test_address_and_badge_follow_from_pyproject(stage):
    notebook, url = read(stage), refresh.project_url()
    assert "![" not in notebook.cells[0].source, "a picture from elsewhere is missing offline"
    assert f'PROJECT_URL = "{url}"' in tagged(stage, "setup").source
    assert refresh.badge(url, ALL[stage]) in notebook.cells[0].source
    assert f"[glossary]({url}/blob/main/docs/glossary.md)" in notebook.cells[-1].source
    refresh.set_url(notebook, "https://github.com/someone/else", ALL[stage])
    assert 'PROJECT_URL = "https://github.com/someone/else"' in notebook.cells[1].source
    assert "/github/someone/else/blob/main/notebooks/" in notebook.cells[0].source
    assert "(https://github.com/someone/else/blob/main/docs/" in notebook.cells[-1].source
    assert not [cell for cell in notebook.cells if url in cell.source]


def test_the_setup_cell_does_nothing_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(tagged("01", "setup").source, {})
    assert not list(tmp_path.iterdir())


def wheel(folder, name, version):
    """A package of one module, as pip installs it."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", head)
        about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", about)
        archive.writestr(f"{info}/RECORD", "")


KERNEL = """import os, sys, types
colab = sys.modules["google.colab"] = types.ModuleType("google.colab")
colab.drive = types.SimpleNamespace(mount=lambda place: print("mounted at", place))
import old
{}
print("goes on", old.version, os.environ.get("GRPO_NB_RUNS", ""))
"""


def colab(folder, driver="", drive=False):
    """A stand-in of Colab: a venv whose pip finds wheels on disk, and git a copy of the project.

    Returns what the set-up cell of a fresh kernel printed, and its exit code.
    """
    nvidia_smi = folder / "bin/nvidia-smi"
    if driver:
        answers = f"*driver*) echo {driver};; *cap*) echo 7.5;; *) echo Tesla T4, 15360 MiB;;"
        nvidia_smi.write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
        nvidia_smi.chmod(0o755)
    cell = tagged("01", "setup").source.replace("drive=False", f"drive={drive}")
    (folder / "kernel.py").write_text(KERNEL.format(cell))
    url = f"url.file://{folder / 'origin'}.insteadOf"
    environment = {
        "PATH": f"{nvidia_smi.parent}:{os.environ['PATH']}",
        **{"PYTHONPATH": str(folder / "pip"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        **{"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels"), "GIT_CONFIG_COUNT": "1"},
        **{"GIT_CONFIG_KEY_0": url, "GIT_CONFIG_VALUE_0": refresh.project_url()},
    }
    done = subprocess.run(
        [folder / "venv/bin/python", folder / "kernel.py"],
        **{"capture_output": True, "text": True, "cwd": folder / "content", "env": environment},
    )
    return done.stdout + done.stderr, done.returncode


@pytest.fixture
def runtime(tmp_path):
    """Its Python has the first versions of two packages, and pip beside it, which is quicker."""
    for name in ("origin/grpo_nb", "content", "wheels", "bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("__init__", "colab", "lazy", "machine"):
        shutil.copy(PROJECT_ROOT / f"grpo_nb/{name}.py", tmp_path / "origin/grpo_nb")
    pins = "# compiled\nipython==2\nold==2  # via grpo-nb\ntorch==2.13.0  # via grpo-nb\n"
    for name, text in (("requirements-cpu", pins), ("requirements", f"{pins}cuda==1\n")):
        (tmp_path / f"origin/{name}.txt").write_text(text)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path / "origin")]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    for name in ("old", "ipython"):
        for version in "12":
            wheel(tmp_path / "wheels", name, version)
        shutil.unpack_archive(tmp_path / f"wheels/{name}-1-py3-none-any.whl", packages, "zip")
    wheel(tmp_path / "wheels", "torch", "2.13.0")
    wheel(tmp_path / "wheels", "cuda", "1")
    (bundled,) = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")
    shutil.unpack_archive(bundled, tmp_path / "pip", "zip")
    return tmp_path


def test_on_colab_the_setup_cell_installs_once_and_stops_with_a_sentence(runtime):
    """pip and git are real, wheels and project lie on disk; nothing else is installed there."""
    said, code = colab(runtime, driver="550.54.15")
    assert code == 1 and said.startswith("the NVIDIA driver 550.54 is too old: CUDA 13 needs 580")
    assert "CPU: every notebook runs there with the tiny model" in said
    restart = "Installed. Runtime → Restart session, then Runtime → Run all again.\n"
    minutes = "The first time takes minutes and ends by asking for a restart.\n"
    installing = f"Installing requirements-cpu.txt. {minutes}"
    (runtime / "bin/nvidia-smi").unlink()
    assert colab(runtime) == (installing + restart, 1)
    said = f"mounted at /content/drive\n{installing}goes on 2 {RUNS_ON_DRIVE}\n"
    assert colab(runtime, drive=True) == (said, 0)
    said = f"Installing requirements.txt. {minutes}"
    assert colab(runtime, driver="580.65.06") == (said + restart, 1)
    (runtime / "wheels/cuda-1-py3-none-any.whl").unlink()
    (packages,) = (runtime / "venv/lib").glob("python*/site-packages")
    assert (packages / "ipython-1.dist-info").is_dir(), "the kernel's own stack stays as it is"
    shutil.rmtree(packages / "cuda-1.dist-info")
    said, code = colab(runtime, driver="580.65.06")
    failed = "pip could not install requirements.txt; its message is above.\n"
    assert code == 1 and said.endswith(failed)
    for name in ("origin", "content/project"):
        shutil.rmtree(runtime / name)
    said, code = colab(runtime)
    assert code == 1 and said.endswith("cannot be fetched: set PROJECT_URL to a copy of it\n")


def test_what_colabs_kernel_is_made_of_stays_and_the_rest_has_what_it_imports():
    """colab_imports.txt holds the imports of google.colab itself; see list_colab_imports.py."""
    text = (PROJECT_ROOT / "requirements-cpu.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    replaced = {pin.partition("==")[0] for pin in wanted(text, pinned)}
    packages = metadata.packages_distributions()
    imported = (PROJECT_ROOT / "tests/colab_imports.txt").read_text(encoding="utf-8").split()
    kernels = {"IPython", "ipykernel", "jupyter_server", "pexpect", "tornado", "traitlets", "zmq"}
    for target in imported:
        module, _, name = target.partition(":")
        top = module.partition(".")[0]
        ours = replaced & set(packages.get(top, ()))
        assert not (ours and top in kernels), f"{ours} would be replaced under google.colab"
        if ours:
            package = importlib.import_module(module)
            submodule = name and importlib.util.find_spec(f"{module}.{name}")
            assert not name or submodule or hasattr(package, name), target
    assert kernels <= {target.partition(":")[0].partition(".")[0] for target in imported}


def test_nbval_finds_the_stored_outputs_of_the_marked_cells_again(tmp_path, forks):
    """Those that neither the machine nor the size of a run changes; in notebooks 1 and 2."""
    marked = [s for s in ALL for cell in code_cells(s) if has_tag(cell, "nbval-check-output")]
    assert marked == ["01", "01", "01", "02"]
    prepared = [str(tmp_path / path_of(stage).name) for stage in ("01", "02")]
    for stage, target in zip(("01", "02"), prepared, strict=True):
        settings = {"rewards.baseline_prompts": 4} if stage == "02" else {}
        papermill.execute_notebook(
            path_of(stage),
            target,
            parameters={"run_name": "nbval", "settings": settings},
            **{"prepare_only": True, "progress_bar": False},
        )
    environment = os.environ | QUIET | {"GRPO_NB_RUNS": str(tmp_path / "runs")}
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [*forked.python(), "-m", "pytest", "--nbval-lax", "-q", *prepared]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def kernels(forks, runs_dir, monkeypatch):
    """An empty place for runs, in which notebooks are executed quickly and quietly."""
    for name, value in (QUIET | {"PYTHONPATH": str(PROJECT_ROOT)}).items():
        monkeypatch.setenv(name, value)
    return runs_dir


def execute(stage, folder, cells, **parameters):
    """The run that a notebook leaves; cells of these ids have another source."""
    notebook, target = read(stage), folder / f"{stage}.ipynb"
    for cell in notebook.cells:
        cell.source = cells.get(cell.id, cell.source)
    nbformat.write(notebook, target)
    papermill.execute_notebook(target, target, parameters, cwd=folder, progress_bar=False)
    return Run(parameters["run_name"])


def uncommented(stage, *names):
    """Cells as a reader makes them their own: the first comment says what the code does."""
    found = {cell.id: cell.source.splitlines() for cell in code_cells(stage) if cell.id in names}
    for lines in found.values():
        lines.remove(next(line for line in lines if line.startswith("#")))
    assert len(found) == len(names)
    return {name: re.sub("^# ?", "", "\n".join(lines), flags=re.M) for name, lines in found.items()}


WEIGHTS = {"correct": 1, "soft_format_reward": 0.25}


def test_the_quickstart_leaves_a_run_that_the_stages_go_on_from(kernels):
    """With the rewards of its cell, settings of every stage, and 80 rows beside the notebook.

    They are as a spreadsheet saves them, with a byte-order mark.
    """
    rows = [f"{i},What is {i} + {i + 3}?,{2 * i + 3}" for i in range(10, 90)]
    text = "\n".join(["Nr,Problem,Solution", *rows])
    (kernels / "mine.csv").write_text(text, encoding="utf-8-sig")
    own = uncommented("00", "02-15")
    settings = TINY_SETTINGS | {"data.source": "mine.csv", "evaluate.samples": 2}
    settings |= {"data.question_column": "Problem", "data.answer_column": "Solution"}
    settings["evaluate.adapter"] = True
    run = execute("00", kernels, own, run_name="quick", settings=settings)
    assert run.undone() == ""
    assert settings.items() <= config.flatten(run.config()).items()
    assert read_json(run / "rewards/report.json")["weights"] == WEIGHTS
    assert read_json(run / "model/parity.json")["passed"]
    said = {check["name"]: check["evidence"] for check in run.manifest()["01"]["checks"]}
    assert "'Problem', reference answers in 'Solution'" in said["columns"]
    assert "80 rows read: 64 to train on, 16 held out" in said["dataset"]
    report = read_json(run / "eval/report.json")
    assert report["prompts"] == 16 and list(report["models"]) == ["base", "adapter", "merged"]
    for first in ("02", "03", "04"):
        resolve_run(run, first=first)
    with pytest.raises(ValueError, match="unknown setting"):
        runs.start("01", "other", {"grpo.max_step": 1}, all_stages=True)


OWN_MODEL = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(model_arguments["model_name"], dtype="auto")
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
"""


def test_a_model_an_argument_and_a_callback_of_the_readers_own_are_trained(kernels, demo_run):
    shutil.copytree(demo_run.path, kernels / "demo")
    cells = uncommented("03", "03-args", "own-callback") | {"03-unsloth": "", "03-07": OWN_MODEL}
    cells["own-callback"] = cells["own-callback"].replace("1.6", "-1")  # solved at once
    settings = {"grpo.max_steps": 3, "grpo.per_device_train_batch_size": 16}
    run = execute("03", kernels, cells, run_name="demo", settings=settings)
    adapter = read_json(run / "train/adapter/adapter_config.json")
    assert (sorted(adapter["target_modules"]), adapter["r"]) == (["q_proj", "v_proj"], 8)
    assert read_json(run / "train/state.json")["settings"]["grpo.epsilon_high"] == "0.28"
    assert read_lines(run / "train/metrics.jsonl")[-1]["step"] == 1


ARGUMENTS = """
from datasets import Dataset
from grpo_nb import models
by_unsloth, environment_factory = True, None
model_arguments = {"model_name": PATH, "max_seq_length": 128, "load_in_4bit": True}
lora_arguments = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
"""
PLAIN = """
processing_class = tokenizer
def length(completions, **kwargs):
    return [-abs(len(completion[0]["content"]) - 30) / 30 for completion in completions]
reward_funcs = [length]
prompts = [[{"role": "user", "content": f"What is {a} + 7?"}] for a in range(12)]
train_dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
grpo_arguments = {"output_dir": "out", "max_steps": 2, "per_device_train_batch_size": 8}
grpo_arguments |= {"max_completion_length": 16, "report_to": "none", "use_cpu": True}
grpo_arguments |= {"gradient_checkpointing": False, "bf16": False}
"""
CLASSES = "print([kind.__module__.partition('.')[0] for kind in type(trainer).__mro__][0])"


def test_the_calls_of_notebook_3_train_in_an_empty_notebook_with_plain_rewards(tmp_path, forks):
    """With the names for arguments that they take, and no run."""
    load, model, *rest = [cell.source for cell in code_cells("03") if has_tag(cell, "stock")]
    path = f"PATH = {str(PROJECT_ROOT / 'data/tiny_base')!r}"
    parts = [path, ARGUMENTS, load, model, PLAIN, *rest, "import sys", CLASSES]
    parts += ["print(trainer.state.global_step, 'grpo_nb.runs' in sys.modules)"]
    (tmp_path / "notebook.py").write_text("\n".join(parts))
    environment = os.environ | QUIET | {"PYTHONPATH": str(PROJECT_ROOT)}
    done = subprocess.run(
        [*forked.python(), str(tmp_path / "notebook.py")],
        **{"capture_output": True, "text": True, "env": environment, "cwd": tmp_path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-3:-1] == ["trl", "2 False"], done.stdout


def test_what_was_trained_is_taken_elsewhere(demo_run, kernels, monkeypatch):
    """The hub is a stand-in that keeps what it is given."""
    shutil.copytree(demo_run.path, kernels / "demo")
    monkeypatch.chdir(kernels)
    run, sent = Run("demo"), []
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(f"huggingface_hub.{name}", lambda *a, **to: sent.append((a, to)))
    names = {"stage": SimpleNamespace(run=run), "export": export}
    names |= {"adapter": run / "train/adapter", "merged_path": run / "model/merged"}
    names["config"] = run.config()
    for source in uncommented("04", "copy-it", "gguf", "lm-eval", "push").values():
        exec(source, names)
    files = {path.name for path in (run / "model/merged/gguf").iterdir()}
    assert files == {"Modelfile", "merged-q8_0.gguf"}
    names["question"] = data.load(run, "eval")[0]["prompt"]
    *imports, asked = uncommented("04", "ask-later")["ask-later"].strip().splitlines()
    exec("\n".join(imports), names)
    assert eval(asked, names).strip()
    assert (kernels / "my-adapter/adapter_model.safetensors").is_file()
    assert (kernels / "my-model/model.safetensors").is_file()
    assert sent[0] == (("me/adder",), {"private": True, "exist_ok": True})
    assert sent[1][1] == {"repo_id": "me/adder", "folder_path": names["merged_path"]}
    score, lines = scorer(run / "eval_task"), read_lines(run / "eval_task/rows.jsonl")
    samples = pd.read_parquet(run / "eval/samples.parquet")
    for sample in samples[samples["decoding"] == "greedy"].to_dict("records"):
        scores = score(lines[sample["row"]], sample["completion"])
        assert scores == {name: sample[name] for name in ("correct", "reward")}
    rows = data.load(run, "eval")[:2]
    for row in rows:
        row["prompt"][-1:-1] = [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "{2}"},
        ]
    monkeypatch.setattr(data, "load", lambda *_: rows)
    task = (write_task(run) / "lm_eval.yaml").read_text()
    assert 'samples: [{"question": "1 + 1?", "answer": "{2}"}]' in task
    assert "num_fewshot: 1\n" in task and "doc_to_target: '{{answer}}'}" in task
