"""What SECURITY.md promises: each names a test that exists, and what no other test shows."""

import ast
import json
import re
import shutil

import pytest
import yaml

from grpo_nb import models
from grpo_nb.files import project_path
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import hub
from grpo_nb.runs import Run

TEXT = (PROJECT_ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_promise_names_a_test_that_exists(path, name):
    tree = ast.parse((PROJECT_ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def with_code(tmp_path):
    """A model whose repository brings Python of its own, which would leave a mark."""
    folder, mark = tmp_path / "model", tmp_path / "was_run"
    shutil.copytree(project_path("data/tiny_base"), folder)
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\nclass Theirs: pass\n")
    for name, key, what in (
        ("config.json", "AutoModelForCausalLM", "theirs.Theirs"),
        ("tokenizer_config.json", "AutoTokenizer", ["theirs.Theirs", None]),
    ):
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": {"AutoConfig": "theirs.Theirs", key: what}, "model_type": "theirs"}
        content.pop("tokenizer_class", None)
        (folder / name).write_text(json.dumps(content))
    return str(folder), mark


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: models.load_checkpoint(folder, adapter=None, quantization="16bit"),
        hub.load_tokenizer,
    ],
    ids=["model", "tokenizer"],
)
def test_code_that_comes_with_a_model_is_not_run(with_code, load):
    folder, mark = with_code
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder)
    assert not mark.exists()


def test_yaml_makes_no_objects(runs_dir):
    mark = runs_dir / "was_run"
    evil = f"!!python/object/apply:builtins.open ['{mark}', 'w']\n"
    run = Run("evil")
    run.path.mkdir()
    (run / "config.yaml").write_text(f"profile: {evil}")
    with pytest.raises((yaml.constructor.ConstructorError, ValueError), match="not determine"):
        run.config()
    assert not mark.exists()
