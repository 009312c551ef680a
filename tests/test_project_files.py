"""The files beside the package agree with it."""

import re
import tomllib

import pytest
import yaml

import grpo_nb
from grpo_nb.__main__ import main
from grpo_nb.checklist import CHECKS
from grpo_nb.runs import PROJECT_ROOT


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


def test_links_between_the_projects_files_lead_somewhere():
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/checklist.md"):
        folder = (PROJECT_ROOT / name).parent
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text(name)):
            assert (folder / target).exists(), f"{name} links to {target}"


def test_the_checklists_page_explains_each_line_and_no_other():
    lines = re.findall(r"^\| ([\w ]+?) \| .+? \| .+? \|$", text("docs/checklist.md"), re.M)
    assert [line for line in lines if line != "check"] == [name for _, name, _ in CHECKS]


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
@pytest.mark.parametrize("command", [["reward-lab"], ["serve", "demo"]])
def test_what_is_no_port_is_refused(command, port, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, f"--port={port}"])
    assert f"{port!r} is no port: give a number from 1 to 65535" in capsys.readouterr().err
