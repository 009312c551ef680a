"""Compare checkers of reward functions on files whose truth is known (reward_files).

pip install --target PEERS --no-deps reward-doctor==0.2.0 rewardprobe==0.1.0 gradecheck==0.1.0
python benchmarks/reward_checkers.py --peers PEERS [--half dev] [--details]

Each checker sees each file in a process of its own, without the docstring and the `_truth_`
functions. grpo_nb gets the functions and the rows. The peers test one function of one
completion and a reference, so they get the file's weighted total as that function, scaled so
that a right completion of the row earns 1, with the plain reference beside each row. What they
write between <answer> tags is put into the form that the row's prompt asks for.
"""

import argparse
import ast
import asyncio
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILES = Path(__file__).parent / "reward_files"
sys.path.insert(0, str(FILES))
LIMIT = 60  # seconds for a file

# A checker's names of findings -> the kinds of reward_files that they stand for
KINDS = {  # grpo_nb's
    "nothing earns": "nothing_earns constant none pays_any_answer",
    "reads no answer": "self_judged missing_column pays_any_answer",
    "reference loses": "nothing_earns harsh",
    "form not read": "nothing_earns",
    "empty reference": "empty_reference",
    "any answer": "pays_any_answer hides_error",
    "nothing written": "pays_empty constant pays_any_answer",
    "empty form": "pays_empty_form format_outweighs",
    "form outweighs": "format_outweighs pays_empty_form",
    "not a number": "pays_nan",
    "malformed answer": "hides_error",
    "plea": "self_judged pays_keywords",
    "several answers": "pays_hedging",
    "negated": "pays_negated",
    "mentioned": "pays_mention",
    "equation": "pays_hedging",
    "every number": "pays_hedging pays_mention",
    "stuffing": "pays_keywords",
    "repetition": "pays_length pays_keywords",
    "length": "pays_length",
    "length pays": "pays_length",
    "copied from the prompt": "pays_echo",
    "near miss": "pays_near",
    "part of a number": "pays_partial",
    "cut off": "pays_partial",
    "unfinished": "pays_partial",
    "program": "self_judged pays_any_answer",
    "spelling": "harsh",
    "line breaks": "harsh",
    "constant": "constant nothing_earns",
    "None": "none",
    "not finite": "not_finite",
    "wrong type": "wrong_type",
    "missing column": "missing_column",
    "wrong length": "wrong_length",
    "no number": "raises",
    "side effects": "side_effect",
    "hangs": "slow",
}  # random, state, clock, order, raises, slow and sign are the kinds of the same name
REWARD_DOCTOR = {
    "shotgun": "pays_hedging pays_mention",
    "negation": "pays_negated pays_mention",
    "empty": "pays_empty pays_empty_form constant",
    "echo": "pays_echo pays_any_answer",
    "contradiction": "pays_mention pays_hedging",
    "padding": "pays_length sign",
    "format_farming": "pays_empty_form format_outweighs pays_any_answer pays_keywords",
    "judge_bias": "pays_keywords self_judged pays_length",
    "judge_injection": "self_judged pays_any_answer",
    "distinction": "pays_near pays_any_answer pays_partial",
    "crash": "raises wrong_type missing_column wrong_length",
    "false negative": "harsh nothing_earns",
}
REWARDPROBE = {
    "empty": "pays_empty constant",
    "whitespace": "pays_empty constant",
    "random_tokens": "pays_any_answer pays_length constant hides_error",
    "reward_range": "not_finite pays_length",
    "determinism": "random state clock",
    "ground_truth": "nothing_earns harsh none missing_column wrong_type",
    "signal_variance": "constant nothing_earns none missing_column",
    "wrong_sign": "sign",
    "none_handling": "none",
    "weight_dominance": "format_outweighs",
    "single_fn_failure": "raises",
    "answer_in_reasoning": "pays_mention",
    "multiple_tags": "pays_hedging",
    "regex_greediness": "pays_hedging",
    "malformed_xml": "pays_partial",
    "duplicate_answers": "pays_hedging pays_mention",
    "format_variation": "harsh",
    "missing_column": "missing_column",
    "wrong_argument": "missing_column",
    "message_vs_string": "wrong_type",
    "completion_structure": "raises wrong_type",
    "batch_ordering": "order",
    "state_leak": "state",
    "stale_state": "state",
    "early_termination": "pays_partial",
    "echo_prompt": "pays_echo",
    "constant_output": "pays_any_answer constant",
    "format_only": "pays_empty_form pays_any_answer format_outweighs",
    "common_prefix": "pays_keywords pays_mention",
}
GRADECHECK = {
    "empty-completion": "pays_empty constant",
    "prompt-echo": "pays_echo pays_any_answer",
    "garbage": "pays_any_answer pays_length constant hides_error",
    "flattery": "self_judged pays_keywords",
    "format-only": "pays_empty_form pays_any_answer pays_empty format_outweighs",
}


def stripped(path):
    """The source of a file without its docstring and its `_truth_` functions."""
    tree = ast.parse(path.read_text())
    lines = path.read_text().splitlines()
    kept = [
        node
        for node in tree.body[1:]
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("_truth_"))
    ]
    first = [min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]) for n in kept]
    return "\n\n".join(
        "\n".join(lines[a - 1 : n.end_lineno]) for a, n in zip(first, kept, strict=True)
    )


class Graded:
    """A file's weighted total as a function of one completion and a reference."""

    columns = ("answer", "ground_truth", "label", "reference", "solution")

    def __init__(self, functions, weights, rows):
        self.functions, self.weights, self.rows = functions, weights, rows
        import truths

        self.truths = truths
        self.plain = truths.name_of(rows[0]) not in (
            "choice",
            "code_tests",
            "countdown",
            "json_extract",
            "kernel",
            "summaries",
        )
        self.best = {}

    def total(self, row, text):
        """The weighted sum for one completion; None counts as nothing."""
        import verify

        made = 0.0
        for function, weight in zip(self.functions, self.weights, strict=True):
            rewards = function(**verify.arguments([row], [text]))
            if inspect.iscoroutine(rewards):
                rewards = asyncio.run(rewards)
            (reward,) = rewards
            made += weight * (0.0 if reward is None else float(reward))
        return made

    def with_reference(self, row, reference):
        """The row with another reference, where it has one that is plain text."""
        if not self.plain or reference is None or str(reference) == self.truths.answer(row):
            return row
        column = next(c for c in self.columns if c in row)
        shape = {"gsm8k_raw": "I work it out.\n#### {}", "math_boxed": "\\boxed{{{}}}"}
        shape = shape.get(self.truths.name_of(row), "{}")
        return row | {column: shape.format(reference)}

    def score(self, row, text, reference=None):
        """The total of a completion, 1 for a right one."""
        key = str(row)
        if key not in self.best:
            try:
                best = self.total(row, self.truths.right(row))
            except Exception:
                best = 1.0
            self.best[key] = best if best > 0 else 1.0
        if "<answer>" in text and "</answer>" in text:
            why, _, rest = text.partition("<answer>")
            inner, _, after = rest.partition("</answer>")
            why = why.replace("<think>", "").replace("</think>", "").strip()
            text = self.truths.form(row, inner, why or self.truths.WHY) + after
        return self.total(self.with_reference(row, reference), text) / self.best[key]


def fits(graded, row, case):
    """Whether a case of reward-doctor's corpus, which is of sums, is fair for a row.

    Rows of whole numbers take the cases of whole numbers, rows of mathematics all cases, and
    the others those of exploits, which no reward should pay.
    """
    name = graded.truths.name_of(row)
    if name == "math_boxed":
        return " " not in case.reference  # "5 meters": no row has a unit
    if graded.truths.number(row) is not None:
        return case.reference.lstrip("-").isdecimal() and case.reference != "0"
    return case.category == "exploit"


def reward_doctor(functions, weights, rows):
    """Findings of reward-doctor: its corpus as it is, and put into the row's form."""
    from reward_doctor import audit, load

    graded = Graded(functions, weights, rows)
    row = rows[0]
    findings = {}

    def plain(completion, reference):
        return graded.score(row, completion, reference)

    def formed(completion, reference):
        return graded.score(row, f"<answer>{completion}</answer>", reference)

    for function in (plain, formed):
        cases = [c for c in load() if fits(graded, row, c)]
        made = audit(function, name="reward", cases=cases, threshold=0.5)
        for o in made.false_positives:
            name = o.case.attack if o.case.category == "exploit" else "distinction"
            findings[name] = "stop"
        if made.errors:
            findings["crash"] = "stop"
        if function is plain and made.false_negatives and made.profile != "format_strict":
            findings["false negative"] = "warning"
    return list(findings.items())


def rewardprobe(functions, weights, rows):
    """Findings of rewardprobe."""
    from rewardprobe import Probe

    graded = Graded(functions, weights, rows)
    tasks = [
        {
            "prompt": graded.truths.text_of(r["prompt"]),
            "question": graded.truths.text_of(r["prompt"]),
            "answer": graded.truths.answer(r),
            "number": i,
        }
        for i, r in enumerate(rows)
        if graded.truths.answer(r)
    ]

    def reward(completion, answer, number):
        text = completion if isinstance(completion, str) else graded.truths.text_of(completion)
        return graded.score(rows[number if isinstance(number, int) else 0], text, answer)

    report = Probe(num_tasks=10).test_fn(reward, tasks)
    level = {"critical": "stop", "warning": "warning"}
    return [(f.attack, level.get(f.severity.value, "note")) for f in report.findings]


def gradecheck(functions, weights, rows):
    """Findings of gradecheck, which attacks an environment of the verifiers library."""
    from gradecheck.completion_attacks import run_all
    from gradecheck.verifiers_env import VerifiersEnv

    graded = Graded(functions, weights, rows)
    some = [r for r in rows if graded.truths.answer(r)]

    def reward(completion, info, **_):
        return graded.score(some[info["i"]], completion[0]["content"])

    class Parser:
        answer_field = "answer"

        def format(self, answer):
            return f"<answer>{answer}</answer>"

    data = [
        {"prompt": r["prompt"], "answer": graded.truths.answer(r), "info": {"i": i}}
        for i, r in enumerate(some)
    ]
    env = types.SimpleNamespace(
        rubric=types.SimpleNamespace(funcs=[reward], weights=[1.0]),
        parser=Parser(),
        pass_threshold=0.5,
        get_dataset=lambda: data,
    )
    level = {"fooled": "stop", "warn": "warning"}
    return [
        (f.attack, level[f.verdict])
        for f in run_all(VerifiersEnv(env, sample=10))
        if f.verdict in level
    ]


def grpo_nb(functions, weights, rows):
    """Findings of this project's check_rewards."""
    from datasets import Dataset

    from grpo_nb import check_rewards

    made = check_rewards(functions, Dataset.from_list(rows), reward_weights=weights)
    return [(check.name.rpartition(": ")[2], check.state) for check in made.findings]


CHECKERS = {
    "grpo_nb": (grpo_nb, KINDS),
    "reward-doctor": (reward_doctor, REWARD_DOCTOR),
    "rewardprobe": (rewardprobe, REWARDPROBE),
    "gradecheck": (gradecheck, GRADECHECK),
}


def one(checker, path):
    """Print as JSON what a checker finds in a file and how long it took."""
    import verify

    rows = verify.rows_of(verify.header(path)["rows"])
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(stripped(path))
        _, functions, weights = verify.load(copy)
        start = time.perf_counter()
        found = CHECKERS[checker][0](functions, weights, rows)
        took = time.perf_counter() - start
    print("\n" + json.dumps({"found": found, "seconds": took}))


def run(checker, path, peers):
    """What a checker finds in a file, from a process with a time limit."""
    root = str(FILES.parent.parent)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([root, *([str(peers)] if peers else [])])
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", checker, str(path)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"found": [], "seconds": float(LIMIT), "error": "time limit"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "nothing printed").splitlines()[-1]
        return {"found": [], "seconds": 0.0, "error": last}


def judged(checker, path, made):
    """Whether the finding is right, and whether its name is."""
    import verify

    head = verify.header(path)
    found = [(name, level) for name, level in made["found"] if level in ("stop", "warning")]
    stops = [name for name, level in found if level == "stop"]
    if head["truth"] == "sound":
        return bool(stops), None
    counted = [name for name, _ in found] if head["severity"] == "warning" else stops
    kinds = set(head["kind"].split(", "))
    mapping = CHECKERS[checker][1]
    named = any(kinds & set(mapping.get(name, name).split()) for name in counted)
    return bool(counted), named


def main():
    """Run the checkers over the files and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with the peers, from pip --target")
    parser.add_argument("--half", choices=("dev", "held_out"), help="only this half")
    parser.add_argument("--checkers", nargs="+", choices=CHECKERS, default=list(CHECKERS))
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--details", action="store_true", help="print a line for each file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return one(given.one[0], Path(given.one[1]))
    import verify

    halves = [given.half] if given.half else ["dev", "held_out"]
    table = []
    for checker in given.checkers:
        for half in halves:
            paths = sorted(p for t in ("flawed", "sound") for p in (FILES / half / t).glob("*.py"))
            with ThreadPoolExecutor(given.jobs) as pool:
                made = list(pool.map(lambda p, c=checker: run(c, p, given.peers), paths))
            sums = dict.fromkeys(("flawed", "found", "named", "sound", "accused", "failed"), 0)
            for path, m in zip(paths, made, strict=True):
                hit, named = judged(checker, path, m)
                truth = path.parent.name
                sums[truth] += 1
                sums["found" if truth == "flawed" else "accused"] += hit
                sums["named"] += bool(named)
                sums["failed"] += "error" in m
                if given.details:
                    kind = verify.header(path).get("kind", "sound")
                    said = m.get("error") or ", ".join(f"{n} ({lv})" for n, lv in m["found"])
                    mark = "named" if named else "found" if hit else "-"
                    print(f"{checker:13} {path.stem:22} {kind:45} {mark:6} {said}", flush=True)
            seconds = statistics.median(m["seconds"] for m in made)
            table.append((checker, half, sums, seconds))
    print(
        f"{'checker':14}{'half':10}{'found':>10}{'named':>10}{'accused':>10}{'failed':>8}{'s':>8}"
    )
    for checker, half, s, seconds in table:
        print(
            f"{checker:14}{half:10}{s['found']:>5}/{s['flawed']:<4}{s['named']:>5}/{s['flawed']:<4}"
            f"{s['accused']:>5}/{s['sound']:<4}{s['failed']:>8}{seconds:>8.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
