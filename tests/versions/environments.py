"""Try the tools beside other versions of TRL and transformers, each in an environment of its own.

    make test-versions                             # all of `VERSIONS`
    make test-versions VERSIONS="0.22.2 1.16.0"    # these

uv installs TRL with what it asks for, then pip the wheel of this package, which may change no
version that is there. `five_steps.py` then trains in it. The environments share the torch of this
one, and nothing else.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = Path(sys.prefix) / "versions"
JOBS = int(os.environ.get("JOBS", 2))  # environments at a time
# Colab in August 2026 (googlecolab/backend-info): what the wheel asks for, and what this needs.
COLAB = ["numpy==2.1.3", "pandas==2.2.3", "pyarrow==18.1.0", "PyYAML==6.0.3", "pydantic==2.13.4"]
COLAB += ["filelock==3.32.3", "tqdm==4.67.3", "psutil==5.9.5", "matplotlib==3.10.0"]
COLAB += ["ipywidgets==7.7.1", "ipython==7.34.0", "datasets==4.0.0"]
# What each version of TRL is installed with. Public notebooks install the first beside Colab's.
VERSIONS = {
    "0.22.2": ["transformers==4.56.2", *COLAB],
    "0.24.0": ["transformers==4.57.6"],
    "1.0.0": ["transformers==5.4.0", "requests"],  # which it imports and does not ask for
    "1.15.0": ["transformers==5.17.0"],
    "1.16.0": ["transformers==5.24.0"],
}
HEAVY = {"torch", "trl", "transformers", "peft", "accelerate", "unsloth", "vllm"}
OF_TORCH = r"torch|triton|(nvidia|cuda)-.*"  # with what its CUDA build needs


def pip(environment: Path, *arguments: str) -> str:
    """Run pip for an environment, and return what it prints."""
    where = ["--python", str(environment / "bin/python")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *where, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def install_wheel(environment: Path, wheel: Path) -> None:
    """Install this package as anybody would."""
    pip(environment, "install", "-qq", "--no-compile", str(wheel))


def installed(environment: Path) -> dict[str, str]:
    """Return {package: version} of an environment."""
    listed = json.loads(pip(environment, "list", "--format=json"))
    return {package["name"]: package["version"] for package in listed}


def new_environment(name: str) -> Path:
    """Make an empty environment in place of an earlier one, and return its folder."""
    folder = ENVIRONMENTS / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def link_torch() -> None:
    """Link this environment's torch into a folder in which nothing else is found."""
    links = ENVIRONMENTS / "torch"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True)
    for package in metadata.distributions():
        if re.fullmatch(OF_TORCH, package.metadata["Name"]):
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                (links / top).unlink(missing_ok=True)  # packages share a folder
                (links / top).symlink_to(package.locate_file(top))


def besides_torch() -> list[str]:
    """Return what torch needs besides what `link_torch` links."""
    needs = map(Requirement, metadata.requires("torch") or ())
    needs = [need for need in needs if not re.fullmatch(OF_TORCH, need.name)]
    return [str(n) for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]


def install_trl(environment: Path, version: str) -> None:
    """Install a version of TRL, what it asks for but torch, and what `five_steps.py` needs."""
    [site] = environment.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(str(ENVIRONMENTS / "torch"))
    overrides = environment / "overrides.txt"
    overrides.write_text("torch; sys_platform == 'never'")
    what = [f"trl=={version}", *VERSIONS[version], *besides_torch(), "peft", "pytest"]
    where = ["--python", environment / "bin/python", "--overrides", overrides]
    command = [Path(sys.prefix) / "bin/uv", "pip", "install", "-q", *where, *what]
    subprocess.run(command, check=True)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this package from a copy, which holds no file of an earlier build."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "grpo_nb", folder / "grpo_nb")
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", folder, folder]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def run(environment: Path, *command: str) -> str:
    """Run the environment's python where this package is not beside it; return its last line."""
    alone = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "MPLBACKEND": "agg"}
    alone |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        command = (environment / "bin/python", *command)
        done = subprocess.run(command, cwd=folder, env=os.environ | alone, **options)
    if done.returncode:
        raise SystemExit(f"{environment.name}:\n{done.stdout}")
    return done.stdout.rstrip().rpartition("\n")[-1]


def try_alone(wheel: Path) -> str:
    """Install the wheel alone, and use what needs no trainer."""
    environment = new_environment("alone")
    install_wheel(environment, wheel)
    brought = HEAVY & installed(environment).keys()
    assert not brought, f"the wheel brings {brought}"
    return run(environment, str(FOLDER / "without_a_trainer.py"))


def try_beside_trl(version: str, wheel: Path) -> str:
    """Install a version of TRL and then the wheel, and train."""
    environment = new_environment(version)
    install_trl(environment, version)
    before = installed(environment)
    install_wheel(environment, wheel)
    after = installed(environment)
    changed = {name: after.get(name) for name in before if after.get(name) != before[name]}
    brought = after.keys() - before.keys()
    assert not changed, f"beside TRL {version} the wheel changes {changed}"
    assert not brought & HEAVY, f"beside TRL {version} the wheel brings {brought & HEAVY}"
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={environment}"]
    options += [f"--confcutdir={FOLDER}", "--tb=short", "-W", "ignore"]
    last = run(environment, "-m", "pytest", *options, str(FOLDER / "five_steps.py"))
    return f"transformers {after['transformers']}, {len(brought)} packages came along; {last}"


def tried(version: str, wheel: Path) -> str:
    """Try a version, or the wheel alone ("alone"), and say what came of it."""
    begun = time.monotonic()
    told = try_alone(wheel) if version == "alone" else try_beside_trl(version, wheel)
    return f"{version}: {told}; {time.monotonic() - begun:.0f} s in all"


def main() -> None:
    """Try the versions that are named, or all; and the tools alone."""
    link_torch()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        wheel = build_wheel(Path(folder))
        versions = [*(sys.argv[1:] or VERSIONS), "alone"]
        for told in pool.map(tried, versions, [wheel] * len(versions)):
            print(told, flush=True)


if __name__ == "__main__":
    main()
