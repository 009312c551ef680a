"""The package's language: docstrings begin with a verb, locals are nouns, a word is one thing."""

import ast
import re
from functools import cache

from grpo_nb.machine import PROJECT_ROOT

PACKAGE = PROJECT_ROOT / "grpo_nb"
# The docstrings of the example environments are prompts, which a model was trained with.
EXAMPLES = PACKAGE / "environments/examples.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != EXAMPLES)
# What a function or class may be described by. A verb that is missing here may be added.
VERBS = """
Add Answer Append Ask Begin Build Call Change Check Choose Collect Combine Compare Compute Continue
Convert Copy Count Create Decide Decode Define Delete Dequantise Describe Discard Display Distribute
Divide
Do Draw Drop Encode End Estimate Evaluate Examine Execute Explain Export Extract Fill Find Fit
Follow Forget Format Free Gather Generate Get Give Grade Group Guard Handle Hide Hold Import Install
Join Judge Keep Let Limit Lint List Load Make Map Mark Match Measure Merge Move Multiply Name
Normalize Note Open Order Overwrite Pack Parse Pass Pay Perform Place Play Prepare Print Publish Put
Quote Raise Read Recommend Record Refuse Register Reload Remember Remove Render Replace Report
Represent Reset Resolve Restore Return Run Sample Save Say Score Seed Select Send Serve Set Share
Shorten Show Skip Sort Split Start Stop Store Stream Sum Tabulate Take Tell Test Train Translate Try
Turn Unpack Update Use Validate Verify Wait Watch Wrap Write Yield
"""
PARTICIPLES = """
asked changed chosen counted done drawn drifted fallen found given gone handed held kept known
made meant measured merged missed named needed paid read said seen sent shown taken told
tried used wanted weighed written
"""


@cache
def trees():
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in FILES]


def has_verb(docstring):
    """Whether the first word is one, or one with an ending: "Returns" is as good as "Return"."""
    word = re.match(r"[A-Za-z]*", docstring)[0]
    return not {word, word[:-1], word[:-2]}.isdisjoint(VERBS.split())


def test_docstrings_of_functions_and_classes_begin_with_a_verb():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    described = [
        (path.relative_to(PROJECT_ROOT), node.name, docstring.splitlines()[0])
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node))
    ]
    assert len(described) > 800
    assert not [place for place in described if not has_verb(place[-1])]


def test_local_variables_are_nouns():
    stored = [
        (path.relative_to(PROJECT_ROOT), node.lineno, node.id)
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    assert len(stored) > 3000
    assert not [place for place in stored if place[-1] in PARTICIPLES.split()]


CHECKS = {"Check", "Checks", "list[Check]", "RewardVerdict"}


def test_a_function_that_is_called_check_returns_checks():
    faults = [
        f"{path.name}: {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and re.match("_?checks?(_|$)", node.name)
        if not node.returns or ast.unparse(node.returns) not in CHECKS
    ]
    assert not faults, "another verb says what these do: refuse, resolve, validate, compare"
