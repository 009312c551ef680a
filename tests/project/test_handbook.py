"""The handbook builds, and what it shows runs: Python, commands, settings, YAML, links."""

import doctest
import linecache
import re
import shlex
import shutil
import subprocess
import sys
import types
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from pages import COMMAND, blocks, tokens_of, write_files
from pymdownx.slugs import slugify
from trainings import arguments_of

from grpo_nb.__main__ import parse_arguments
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.notebooks import planned_run, resolve_run
from grpo_nb.pipeline.sweep import read_sweep
from grpo_nb.runs import Run, config
from grpo_nb.runs.settings import GrpoConfig
from grpo_nb.stages import refuse_arguments

PAGES = [PROJECT_ROOT / "README.md", *sorted((PROJECT_ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
SETTING = re.compile(r"([a-z]+)\.([a-z_]+)(?:\s*=\s*(\S+))?")
ENDINGS = ("safetensors", "json", "jsonl", "csv", "py", "yaml", "parquet", "md", "txt")


def inline(page: Path, kind: str):
    """The page's inline tokens of a kind: "code_inline", "link_open" or "image"."""
    children = [token.children or [] for token in tokens_of(page)]
    return [token for line in children for token in line if token.type == kind]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where a page's blocks run: a folder of its own, with runs in it."""
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_handbook_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?https?:[^" >]+', text)
        assert not loaded, path


WITH_PYTHON = [page for page in PAGES if blocks(page, "python", "pycon")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_in_order(page, place, request, monkeypatch):
    write_files(page, place)
    if "demo" in page.read_text(encoding="utf-8"):
        shutil.copytree(request.getfixturevalue("demo_run").path, place / "runs/demo")
    module = types.ModuleType(f"handbook_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page, "python", "pycon"):
        where = f"{page.name}:{block.line}"
        if ">>>" in block.text:
            parsed = doctest.DocTestParser().get_examples(block.text, where)
            examples = doctest.DocTest(parsed, {}, where, str(page), block.line, block.text)
            examples.globs = module.__dict__  # given above, it would be copied
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
            report = []
            runner.run(examples, out=report.append, clear_globs=False)
            assert not runner.failures, "".join(report)
            continue
        lines = block.text.splitlines(keepends=True)
        linecache.cache[where] = (len(block.text), None, lines, where)  # tracebacks, inspect
        exec(compile(block.text, where, "exec"), module.__dict__)


def commands(page: Path):
    for block in blocks(page, "", "sh", "bash", "console", "shell"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if COMMAND.match(line):
                yield line.removeprefix("$ ")
    yield from (t.content for t in inline(page, "code_inline") if COMMAND.match(t.content))


def words_of(command: str) -> list[str]:
    """Its words up to the first `|`, `&&`, `;` or `>`."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    ends = [i for i, word in enumerate(words) if set(word) <= set("|&;<>()")]
    return words[: min(ends, default=len(words))]


def check_setting(name: str, value: str | None = None) -> None:
    config.refuse_unknown_setting(name)
    section, _, key = name.rpartition(".")
    if section == "grpo" and value is not None:
        refuse_arguments(config.RunConfig(grpo={key: value}).grpo.model_extra)
    elif section and value is not None:
        type(getattr(config.RunConfig(), section))(**{key: value})


@every_page
def test_a_command_is_one_that_there_is(page, capsys):
    targets = re.search(r"^\.PHONY:(.*)", (PROJECT_ROOT / "Makefile").read_text(), re.M)[1].split()
    for command in commands(page):
        words = words_of(command)
        if words[0] == "make":
            asked = [word for word in words[1:] if "=" not in word]
            assert set(asked) <= set(targets), command
        elif "grpo_nb" in words or words[0] == "grpo-nb":
            start = words.index("grpo_nb" if "grpo_nb" in words else "grpo-nb")
            try:
                parsed = parse_arguments(words[start + 1 :])
            except SystemExit as end:
                said = f"{command}: {capsys.readouterr().err}"
                assert end.code == 0 or len(words) == start + 1, said
                continue
            for assignment in getattr(parsed, "assignments", []):
                check_setting(*map(str.strip, assignment.split("=", 1)))
        elif words[1] == "-m":
            assert find_spec(words[2]), command
        elif words[1].endswith(".py"):
            assert (PROJECT_ROOT / words[1]).is_file(), command


@every_page
def test_a_setting_or_file_that_is_named_is_there(page):
    for code in (token.content for token in inline(page, "code_inline")):
        match = SETTING.fullmatch(code)
        if match and match[1] in config.SECTIONS and match[2] not in ENDINGS:
            check_setting(f"{match[1]}.{match[2]}", match[3] and match[3].strip("\"'"))
        if re.fullmatch(r"(grpo_nb|tests|docs|benchmarks)/[\w./-]+", code):
            assert (PROJECT_ROOT / code).exists(), f"{page.name}: {code}"


@every_page
def test_yaml_is_read_by_what_reads_it_in_a_run(page, place):
    for path in [path for path in write_files(page, place) if path.suffix == ".yaml"]:
        if {"grid", "list"} & yaml.safe_load(path.read_text(encoding="utf-8")).keys():
            assert read_sweep(path).trials
        else:
            name, *planned = planned_run(str(path), None, None, [])
            resolve_run(Run(name), *planned)


def anchors(page: Path) -> set[str]:
    tokens, to_slug = tokens_of(page), slugify(case="lower")
    heads = [after.content for head, after in pairwise(tokens) if head.type == "heading_open"]
    explicit = re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text(encoding="utf-8"))
    return {to_slug(re.sub(r"[`*]", "", head), "-") for head in heads} | set(explicit)


@pytest.mark.parametrize("name", ["README", "CONTRIBUTING", "CHANGELOG", "SECURITY"])
def test_links_outside_of_the_handbook_lead_somewhere(name):
    page = PROJECT_ROOT / f"{name}.md"
    links = [token.attrs["href"] for token in inline(page, "link_open")]
    links += [token.attrs["src"] for token in inline(page, "image")]
    for link in links:
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = PROJECT_ROOT / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_table_of_settings_is_whole_and_its_defaults_are_true():
    rows = {}
    for line in (PROJECT_ROOT / "docs/settings.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            rows[cells[0]] = "" if cells[1] == "empty" else cells[1]
    defaults = config.flatten(config.RunConfig())
    sections = ("train.", "model.", "lora.", "grpo.", "policy.")
    wanted = {n: str(v) for n, v in defaults.items() if n in rows or n.startswith(sections)}
    assert rows == wanted


@pytest.mark.parametrize("name", ["small.yaml", "large.yaml"])
def test_the_configurations_for_gpus_are_taken_by_the_installed_trl(name, place):
    from trl import GRPOConfig

    write_files(PROJECT_ROOT / "docs/settings.md", place)
    run_name, *planned = planned_run(str(place / name), None, None, [])
    resolved, typed = resolve_run(Run(run_name), *planned)
    built = GRPOConfig(**arguments_of(resolved, vllm=True))
    assert built.generation_batch_size == resolved.step_completions
    for setting in typed.keys() & {f"grpo.{key}" for key in GrpoConfig.model_fields}:
        assert getattr(built, setting.removeprefix("grpo.")) == typed[setting], setting
