"""The files beside the package agree with it."""

import importlib.util
import re
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import grpo_nb
from grpo_nb.machine import PROJECT_ROOT


def text(name):
    return (PROJECT_ROOT / name).read_text(encoding="utf-8")


def test_the_citation_is_of_this_version_and_address():
    cited, project = yaml.safe_load(text("CITATION.cff")), tomllib.loads(text("pyproject.toml"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == grpo_nb.__version__
    assert cited["repository-code"] == project["project"]["urls"]["Repository"]
    assert cited["license"] == project["project"]["license"]
    assert "arXiv:2402.03300" in str(cited["references"])


def test_the_changelog_knows_this_version():
    assert f"## [Unreleased] ({grpo_nb.__version__})" in text("CHANGELOG.md")


def test_profiles_and_tasks_are_installed_with_the_package():
    package, found = PROJECT_ROOT / "grpo_nb", set()
    declared = tomllib.loads(text("pyproject.toml"))["tool"]["setuptools"]["package-data"]
    for name, patterns in declared.items():
        folder = PROJECT_ROOT / name.replace(".", "/")
        found |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert found == files and len(found) > 10


def test_links_between_the_projects_files_lead_somewhere():
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/checklist.md"):
        folder = (PROJECT_ROOT / name).parent
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text(name)):
            assert (folder / target).exists(), f"{name} links to {target}"


LISTS = {
    "requirements.txt": ("gpu", []),
    "requirements-cpu.txt": ("cpu", ["requirements-cpu.overrides.txt"]),
}
REPLACED = tomllib.loads(text("pyproject.toml"))["tool"]["uv"]["override-dependencies"]


def requirements(*names):
    """{package: requirement} of files; the name as indexes spell it, comments left out."""
    lines = [line.partition("#")[0].strip() for name in names for line in text(name).splitlines()]
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): one for one in found}


def applies(requirement, extra=""):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def asked_of(group):
    """The requirements of a group in pyproject.toml, and of those that it includes."""
    groups = tomllib.loads(text("pyproject.toml"))["dependency-groups"]
    for line in groups[group]:
        yield from asked_of(line["include-group"]) if isinstance(line, dict) else [line]


def read_needs(pins):
    """({(package, extra): its requirements}, packages that are not installed as pinned)."""
    unread = {name for name, pin in pins.items() if not installed_as(pin)}
    found = {}
    waiting = [(name, "") for name in pins.keys() - unread]
    while waiting:
        name, extra = key = waiting.pop()
        lines = [Requirement(line) for line in metadata.requires(name) or []]
        found[key] = [line for line in lines if applies(line, extra)]
        more = [(canonicalize_name(n.name), e) for n in found[key] for e in n.extras]
        waiting += [key for key in more if key[0] in pins.keys() - unread and key not in found]
    return found, unread


def installed_as(pin):
    try:
        return pin.specifier.contains(metadata.version(pin.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def lacking(pins, needs, overrides):
    """Each requirement that a list does not meet; an override stands in for what it names."""
    for name, lines in needs.items():
        for line in lines:
            needed = canonicalize_name(line.name)
            line = overrides.get(needed, line)
            if not applies(line):
                continue
            version = str(pins[needed].specifier)[2:] if needed in pins else "nothing"
            if version == "nothing" or not line.specifier.contains(version, prereleases=True):
                yield f"{name[0] or 'pyproject.toml'} asks for {line}, the list holds {version}"


def faults_of(name, pins):
    group, files = LISTS[name]
    overrides = {canonicalize_name(one.name): one for one in map(Requirement, REPLACED)}
    found, unread = read_needs(pins)
    found["", group] = [Requirement(line) for line in asked_of(group)]
    return sorted(lacking(pins, found, overrides | requirements(*files))), unread


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_requirements_is_exact_and_closed(name):
    pins = requirements(name)
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins.values())
    pins = {package: pin for package, pin in pins.items() if applies(pin)}
    faults, unread = faults_of(name, pins)
    assert faults == []
    # What this environment is made of is read whole; of the other list `make pins` reads the rest.
    here = "requirements.txt" if importlib.util.find_spec("vllm") else "requirements-cpu.txt"
    assert name != here or not unread, "installed otherwise than the list says: make install"


def test_what_tests_need_besides_is_closed_with_either_list():
    for name in LISTS:
        pins = requirements(name, "requirements-test.txt")
        faults, _ = faults_of(name, {k: pin for k, pin in pins.items() if applies(pin)})
        assert faults == []


def test_a_closed_list_is_installed_as_one():
    """Resolved, it would fail: what the overrides leave out is asked for."""
    for name in ("Makefile", "docs/launch/skypilot.yaml", "docs/running.md", "grpo_nb/colab.py"):
        lines = [line for line in text(name).splitlines() if re.search(r"install.*-r\b", line)]
        assert all("--no-deps" in line for line in lines), name
