"""The files beside the package agree with it."""

import importlib.util
import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_nb.machine import PROJECT_ROOT


def text(name):
    return (PROJECT_ROOT / name).read_text(encoding="utf-8")


def test_profiles_and_tasks_are_installed_with_the_package():
    package, found = PROJECT_ROOT / "grpo_nb", set()
    declared = tomllib.loads(text("pyproject.toml"))["tool"]["setuptools"]["package-data"]
    for name, patterns in declared.items():
        folder = PROJECT_ROOT / name.replace(".", "/")
        found |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert found == files and len(found) > 10


LISTS = {"requirements.txt": "gpu", "requirements-cpu.txt": "cpu"}


def requirements(*names):
    """{package: requirement} of files; the name as indexes spell it, comments left out."""
    lines = [line.partition("#")[0].strip() for name in names for line in text(name).splitlines()]
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): one for one in found}


def asked_of(group):
    """The requirements of a group in pyproject.toml, and of those that it includes."""
    groups = tomllib.loads(text("pyproject.toml"))["dependency-groups"]
    for line in groups[group]:
        yield from asked_of(line["include-group"]) if isinstance(line, dict) else [line]


def installed_as(pin):
    try:
        return pin.specifier.contains(metadata.version(pin.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_requirements_is_exact_and_has_what_is_asked_for(name):
    """`make pins` resolves it; this environment is installed as one of them says."""
    pins = requirements(name)
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins.values())
    for line in map(Requirement, asked_of(LISTS[name])):
        version = str(pins[canonicalize_name(line.name)].specifier)[2:]
        assert line.specifier.contains(version, prereleases=True), line
    here = "requirements.txt" if importlib.util.find_spec("vllm") else "requirements-cpu.txt"
    others = [pin for pin in pins.values() if not pin.marker or pin.marker.evaluate()]
    assert name != here or all(map(installed_as, others)), "make install"


def test_a_closed_list_is_installed_as_one():
    """Resolved, it would fail: what the overrides leave out is asked for."""
    for name in ("Makefile", "docs/launch/skypilot.yaml", "docs/running.md", "grpo_nb/colab.py"):
        lines = [line for line in text(name).splitlines() if re.search(r"install.*-r\b", line)]
        assert all("--no-deps" in line for line in lines), name
