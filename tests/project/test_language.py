"""The package's language: docstrings begin with a verb, locals are nouns, a word is one thing."""

import ast
import re

from grpo_nb.machine import PROJECT_ROOT

PACKAGE = PROJECT_ROOT / "grpo_nb"
# The docstrings of the example environments are prompts, which a model was trained with.
EXAMPLES = PACKAGE / "environments/examples.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != EXAMPLES)
# What a function or class may be described by. A verb that is missing here may be added.
VERBS = """
Add Adopt Advise Allow Answer Append Ask Begin Bind Build Call Carry Cast Change Check Choose Clear
Climb Close Collect Combine Compare Complete Compute Configure Connect Continue Convert Copy Correct
Count Create Cut Cycle Decide Declare Decode Define Delete Dequantise Describe Display
Distribute Divide Do Download Draw Drop Encode End Ensure Enter Estimate Evaluate Examine
Exclude Execute Exit Explain Export Extract Fill Find Finish Fit Follow Forbid Force Forget
Format Free Gather Generate Get Give Grade Group Guard Guess Hand Handle Hash Have Hide Hold
Import Insert Install Join Judge Keep Leave Let Lift Limit Lint List Load Locate Look Lower Make Map
Mark Mask Match Measure Merge Move Multiply Name Normalise Normalize Note Open Order Overwrite
Pack Pair Parse Pass Pay Perform Pick Place Play Point Prepare Print Propose Publish Put Queue
Quote Raise Read Rebuild Receive Recommend Recompute Record Reduce Refuse Register Release
Reload Remember Remove Render Repeat Replace Report Represent Reset Resolve Restore Resume
Return Reward Run Sample Save Say Score Seed Select Send Serve Set Share Shorten Show Shuffle
Skip Sort Split Stand Start State Stop Store Stream Strip Suggest Sum Summarize Tabulate Take
Tell Test Train Translate Try Turn Unite Unpack Update Use Validate Verify Wait Wake Walk Warn
Watch Weigh Wrap Write Yield
"""
PARTICIPLES = """
asked changed chosen counted done drawn drifted fallen found given gone handed held kept known
made meant measured merged missed named needed paid read said seen sent shown taken told
tried used wanted weighed written
"""


def trees():
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in FILES]


def verb_of(docstring):
    """Return the first word without an ending: "Returns" is as good as "Return"."""
    word = re.match(r"[A-Za-z]+", docstring)
    word = word[0] if word else ""
    return next((form for form in (word, word[:-1], word[:-2]) if form in VERBS.split()), "")


def test_docstrings_of_functions_and_classes_begin_with_a_verb():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    described = [
        (path.relative_to(PROJECT_ROOT), node.name, docstring.splitlines()[0])
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node))
    ]
    assert len(described) > 800
    assert not [f"{path} {name}: {line}" for path, name, line in described if not verb_of(line)]


def test_local_variables_are_nouns():
    stored = [
        (path.relative_to(PROJECT_ROOT), node.lineno, node.id)
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    assert len(stored) > 3000
    assert not [
        f"{path}:{line} {name}" for path, line, name in stored if name in PARTICIPLES.split()
    ]


CHECKS = {"Check", "Checks", "list[Check]", "RewardVerdict"}


def no_checks(tree):
    """Yield the functions of a tree that are called check…, and return something else."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not re.match("_?checks?(_|$)", node.name):
            continue
        if not node.returns or ast.unparse(node.returns) not in CHECKS:
            yield node.name


def test_a_function_that_is_called_check_returns_checks():
    faults = [f"{path.name}: {name}" for path, tree in trees() for name in no_checks(tree)]
    assert not faults, "another verb says what these do: refuse, resolve, validate, compare"
