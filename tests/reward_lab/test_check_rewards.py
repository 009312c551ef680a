"""check_rewards finds what is planted, leaves what is sound, and takes what GRPOTrainer takes."""

import contextlib
import json
import logging
import math
import re
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import scripted_judges as scripts
from datasets import Dataset
from hackable import ROWS as SUMS

from grpo_nb import check_rewards
from grpo_nb.__main__ import main
from grpo_nb.reward_lab import Attack, linter, programs, scoring
from grpo_nb.rewards import PRESETS, Reward

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PAIRS = [(16, 25), (170, 211), (68, 5), (91, 12), (33, 44), (750, 8)]
NUMBERS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in PAIRS]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in NUMBERS]
NAMES = ["Ada Lovelace", "Karen Jones", "Emmy Noether", "Sophie Germain"]
FIELDS = [json.dumps({"name": name, "age": 30 + n}) for n, name in enumerate(NAMES)]
OBJECTS = [{"prompt": f"Read card {n}.", "answer": text} for n, text in enumerate(FIELDS)]
TARGETS = [(93, [54, 34, 5]), (26, [20, 3, 3]), (63, [9, 7, 1]), (40, [8, 4, 8])]
COUNTDOWN = [{"prompt": f"{n} of {each}", "target": n, "nums": each} for n, each in TARGETS]
PROGRAMS = [
    {"prompt": f"Write f, which adds {n}.", "answer": f"def f(a):\n    return a + {n}"}
    | {"tests": [f"assert f({n}) == {2 * n}"]}
    for n in (1, 2, 3)
]


def texts_of(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def mine(score, *columns, name="mine"):
    """Lift a function of a text and of columns of its row, the answer, to TRL's shape."""
    columns = columns or ("answer",)

    def func(completions, **kwargs):
        rows = zip(texts_of(completions), *(kwargs[column] for column in columns), strict=True)
        return [score(*row) for row in rows]

    func.__name__ = name
    func.__kwdefaults__ = dict.fromkeys(columns)
    return func


def said(text):
    found = TAGGED.findall(text)
    return found[0].strip() if len(found) == 1 else ""


def plain(text):
    return re.sub(r"\.0*$", "", text.strip("$*").replace(",", ""))


def exact(text, answer):
    return float(plain(said(text)) == answer)


def as_json(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def evaluated(text):
    try:
        return eval(text, {}) if re.fullmatch(r"[\d+\-*/() ]+", text) else None
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def countdown(each):
    """Pay what gives the target, of numbers of which `each` says whether they are right."""

    def score(text, target, nums):
        sum_, used = said(text), sorted(re.findall(r"\d+", said(text)))
        return float("**" not in sum_ and evaluated(sum_) == target and each(used, nums))

    return mine(score, "target", "nums")


def names_of(verdict, *states):
    return [check.name for check in verdict.findings if not states or check.state in states]


def found(reward, rows=NUMBERS, **options):
    return check_rewards(reward, rows, **options)


# -- attacks: a reward that falls for each family, and a sound one that does not

SOUND = mine(exact)
SAME = mine(lambda text, answer: float(said(text) == answer))
SOUND_OBJECT = mine(lambda t, a: float(as_json(t) == json.loads(a)))
# The other families are fallen for by the corpus, whose sound rewards are accused of none.
FALLS = {
    "malformed answer": lambda t, a: float(said(t) == a or said(t) == "²"),
    "plea": lambda t, a: float("full marks" in t) or exact(t, a),
    "mentioned": lambda t, a: float(a in re.findall(r"\d+", t)),
    "equation": lambda t, a: float(said(t).split(" = ")[-1] == a),
    "every number": lambda t, a: float(len(re.findall(r"\d+", t)) > 60) or exact(t, a),
    "own words": lambda t, a: exact(t, a) + 0.9 * bool(re.search(r"\[hop \d\]", t)),
    "repetition": lambda t, a: exact(t, a) + (t.count("The answer is") > 20),
}
SOUND_COUNTDOWN = countdown(lambda used, nums: used == sorted(map(str, nums)))
CASES = [(family, NUMBERS, mine(score)) for family, score in FALLS.items()] + [
    ("any answer", OBJECTS, mine(lambda t, a: float(t in (a, "null")))),
    ("copied from the prompt", COUNTDOWN, countdown(lambda used, nums: True)),
]


@pytest.mark.parametrize(("family", "rows", "flawed"), CASES)
def test_each_family_of_attacks_is_won_by_its_flaw(family, rows, flawed):
    (check,) = [each for each in found(flawed, rows).findings if each.name == family]
    assert check.state in ("stop", "warning") and "`mine` pays" in check.evidence and check.fix


@pytest.mark.parametrize(("rows", "sound"), [(OBJECTS, SOUND_OBJECT), (COUNTDOWN, SOUND_COUNTDOWN)])
def test_each_family_of_attacks_is_lost_by_a_sound_reward(rows, sound):
    right = found(sound, rows)
    assert right.passed and not {family for family, *_ in CASES} & {*names_of(right)}, right


@pytest.mark.parametrize("rows", [NUMBERS, CHATS], ids=["text", "chat"])
def test_a_sound_reward_has_no_finding_at_all(rows):
    verdict = found(SOUND, rows)
    assert (verdict.passed, list(verdict.findings)) == (True, [])
    assert verdict.roles == {"mine": "right"} and said(verdict.reference) == "41"
    assert len(verdict.table) > 40 and not any(line["won"] for line in verdict.table)


# -- programs that prompts ask for, of which no row holds a right one

PLAY = "Reach 2048.\n```python\ndef play(board):\n    return 'W' # Example\n```"
GAMES = [{"prompt": PLAY}] * 9


def runs(judge):
    """Lift a function of a program to TRL's shape; it stops programs that never end."""

    def mine(completions, **_):
        scores = []
        for text in completions:
            found, space = re.search(r"```python\n(.*?)```", text, re.DOTALL), {}
            try:
                exec(found[1] if found and "True" not in found[1] else "", space)
                scores.append(judge(space["play"]))
            except Exception:
                scores.append(-1.0)
        return scores

    return mine


def written_in(play):
    board = [[2, 4]]
    return float(play(board) == "D" or 2048 in board[0])


def fails_well(play):
    try:
        return float(play([[2, 4]]) == "D")
    except ValueError:
        return 2.0


WON = runs(lambda play: float(play([[2, 4]]) == "D"))
NEAR_8 = runs(lambda play: float(not abs(play([[2]]) - 8) > 0.5))
IS_NEAR_8 = runs(lambda play: float(abs(play([[2]]) - 8) < 0.5))
CHEATED = {
    "changed arguments": (runs(written_in), WON, "'D'"),
    "empty program": (runs(fails_well), WON, "'D'"),
    "not a number": (NEAR_8, IS_NEAR_8, "8"),
}


@pytest.mark.parametrize("family", CHEATED)
def test_a_program_that_cheats_is_named_and_a_right_one_is_not(family):
    flawed, sound, move = CHEATED[family]
    reference = f"```python\ndef play(board):\n    return {move}\n```"
    verdict = found(flawed, GAMES, reference=lambda row: reference)
    assert names_of(verdict, "stop") == [family], verdict
    right = found(sound, GAMES, reference=lambda row: reference)
    assert names_of(right, "stop", "warning") == [] and right.roles == {"mine": "right"}, right


@pytest.mark.parametrize("family", ["changed arguments", "not a number"])
def test_without_a_right_program_the_verdict_says_so_and_what_must_be_wrong(family):
    flawed, sound, _ = CHEATED[family]
    verdict = found(flawed, GAMES)
    assert names_of(verdict) == [family, "no reference"] and not verdict.passed, verdict
    (check,) = found(sound, GAMES).findings
    assert (check.name, check.state) == ("no reference", "warning") and "reference=" in check.fix


def test_a_program_that_never_ends_has_to_be_stopped(monkeypatch):
    monkeypatch.setattr(programs, "ENDLESS", 1.0)
    unlimited = runs(lambda play: float(play([[2, 4]]) == "D"))

    def mine(completions, **_):
        return unlimited([text.replace("True", "1") for text in completions])

    assert names_of(found(mine, GAMES), "stop") == ["mine: hangs"]
    reference = "```python\ndef play(board):\n    return 'D'\n```"
    assert names_of(found(mine, GAMES, reference=lambda row: reference), "stop") == ["mine: hangs"]


# -- what shows without knowing what is right


def hanging(text, answer):
    return float(bool(re.search(r"<answer>(a+)+!", text))) or exact(text, answer)


def hidden():
    return __import__("numpy").random.default_rng().random()


@mine
def generous_at_first(text, answer, calls=[]):  # noqa: B006 (this is the flaw)
    calls.append(text)
    return exact(text, answer) + (len(calls) < 20) / 2


@mine
def new_and_slow(text, answer, texts=set()):  # noqa: B006 (this is the flaw)
    is_new = (text, answer) not in texts
    texts.add((text, answer))
    time.sleep(0.006)
    return exact(text, answer) + is_new / 5


def shorter(completions, answer, **_):
    texts = texts_of(completions)
    pairs = zip(texts, answer, strict=True)
    return [exact(*pair) * (2 - len(pair[0]) / max(1, *map(len, texts))) for pair in pairs]


def now():
    return time.time() % 1


def powered(text):
    """Powers of numbers, computed without Python's eval."""
    numbers = re.fullmatch(r"(\d+)(?:\*\*(\d+))?", text)
    return int(numbers[1]) ** int(numbers[2] or 1) if numbers else None


RULES = [  # that no file of the corpus breaks, or not so
    ("no number", "stop", mine(lambda t, a: said(t)), "a score is ''"),
    ("None", "warning", mine(lambda t, a: exact(t, a) or None), "None for "),
    ("random", "stop", mine(lambda t, a: exact(t, a) + hidden() / 9), "on a second call"),
    ("state", "stop", generous_at_first, "after the first calls"),
    ("state", "stop", new_and_slow, "after the first calls"),
    ("clock", "stop", mine(lambda t, a: exact(t, a) + now()), "scores change"),
    ("hangs", "stop", mine(hanging), "for one completion of .* characters: '.*aaaa"),
    ("hangs", "stop", mine(lambda t, a: float(str(powered(said(t)))[:99] == a)), "7**300000"),
    ("hangs", "stop", mine(lambda t, a: float(str(evaluated(said(t))) == a)), "gets '9**9**9'"),
    ("undefined", "stop", mine(lambda t, a: exact(t, a) + of_no_import(t)), "of_no"),  # noqa: F821
]


@pytest.mark.parametrize(("rule", "state", "reward", "evidence"), RULES)
def test_each_rule_of_the_linter_names_the_reward_with_evidence_and_a_fix(
    rule, state, reward, evidence, monkeypatch
):
    monkeypatch.setattr(linter, "HANGS", 2.0)
    verdict = found(reward)
    title = f"{reward.__name__}: {rule}"
    assert title in names_of(verdict), verdict
    (check,) = [check for check in verdict.findings if check.name == title]
    assert check.state == state and check.fix
    assert re.search(evidence.replace("**", r"\*\*"), check.evidence), check
    assert verdict.passed is (state != "stop") or len(names_of(verdict, "stop")) > 0


@pytest.mark.parametrize("sign", ["+", "="])
def test_eval_that_takes_powers_of_the_rows_own_numbers_alone_is_found(sign):
    """It asks for the numbers, or for the length, of a right answer first."""

    def numbered(text, answer):
        is_same = re.findall(r"\d+", text) == re.findall(r"\d+", answer)
        if not (is_same if sign == "+" else len(text) == len(answer)):
            return 0.0
        try:
            return 1.0 + (text == answer) if eval(text.replace("=", "-")) == 0 else 0.0
        except Exception:
            return 0.0

    equations = [{"prompt": "?", "answer": f"{a}+{b}={a + b}"} for a, b in PAIRS]
    assert names_of(found(mine(numbered), equations), "stop") == ["mine: hangs"]


def test_eval_whose_errors_are_not_caught_is_not_said_to_raise_for_what_was_not_evaluated():
    signs = re.compile(r"\d[\d+*]*\d")
    bare = mine(lambda t, a: float(eval(said(t)) == int(a)) if signs.fullmatch(said(t)) else 0.0)
    assert names_of(found(bare), "stop") == ["mine: hangs"]


def test_a_reward_that_leaves_a_program_running_in_a_thread_is_named_and_the_program_stopped():
    def run(text, names):
        with contextlib.suppress(BaseException):
            exec(text, names)

    def timed(text, tests, _):
        names, program = {}, "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
        thread = threading.Thread(target=run, args=(f"{program}\n{tests[0]}\nis_right = 1", names))
        thread.start()
        thread.join(0.2)
        return float("is_right" in names)

    before = {*threading.enumerate()}
    verdict = found(mine(timed, "tests", "answer"), PROGRAMS)
    (check,) = [check for check in verdict.findings if check.name == "mine: hangs"]
    assert "in a thread that never ends" in check.evidence
    for thread in {*threading.enumerate()} - before:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("pattern", "character"),
    [("<answer>(.*?)<\answer>", r"'\x07'"), (r"<answer>(.*?)\\n</answer>", r"'\\n'")],
)
def test_a_form_with_a_character_that_nobody_means_is_named(pattern, character):
    """A backslash before a letter, in a pattern without its r, is another character."""
    odd = mine(lambda t, a: float(re.findall(pattern, t) == [a]))
    verdict = found(odd)
    assert names_of(verdict, "stop") == ["odd character"] and character in str(verdict)


def test_a_right_answer_that_earns_less_than_nothing_is_not_taken_for_right():
    """The form that is paid cannot be guessed: it spells the answer out."""
    spelled = mine(lambda t, a: 5.0 if "-".join(a) in t else (a in t) - 6.0)
    verdict = found(spelled)
    assert verdict.passed and str(verdict).startswith("undecided: "), verdict
    assert "earns -5 itself" in str(verdict)


@pytest.mark.parametrize("by_size", [False, True])
def test_a_click_into_a_box_is_found(by_size):
    def inside(text, box):
        x, y, right, low = box
        right, low = (x + right, y + low) if by_size else (right, low)
        points = re.findall(r"\[(\d+), (\d+)\]", text)
        return float([x < int(a) < right and y < int(b) < low for a, b in points] == [True])

    ends = (20, 30) if by_size else (320, 90)
    rows = [{"prompt": f"Click {n}.", "box": [300 - 40 * n, 60, *ends]} for n in range(6)]
    verdict = found(mine(inside, "box"), rows)
    assert verdict.passed and re.search(r"\[\d+, 75\]", verdict.reference), verdict


def test_a_column_that_is_the_same_in_every_row_is_no_answer():
    by_category = mine(lambda t, c: (c in t) - 1.0, "category")
    verdict = found(by_category, [{**row, "category": "sum"} for row in NUMBERS])
    assert not verdict.reference and "nothing written" not in names_of(verdict), verdict


SPELT = [
    ("in several lines", "line breaks", [f"SELECT a FROM t{n} WHERE b = {n}" for n in range(5)]),
    ("in dollar signs", "spelling", [rf"\frac{{{n}}}{{7}}" for n in range(1, 6)]),
]


@pytest.mark.parametrize(("what", "family", "answers"), SPELT, ids=[case[0] for case in SPELT])
def test_another_usual_way_to_write_an_answer_is_a_warning(what, family, answers):
    rows = [{"prompt": f"Question {n}", "answer": text} for n, text in enumerate(answers)]
    assert family in names_of(found(SAME, rows), "warning")
    loose = mine(lambda t, a: float(" ".join(said(t).strip("$").split()) == a))
    assert names_of(found(loose, rows), "stop", "warning") == []


def test_a_reasoning_of_many_words_is_tried():
    hashed = re.compile(r"#### (\S+)")
    long = mine(lambda t, a: float(hashed.findall(t) == [a]) if len(t.split()) > 30 else -1.0)
    verdict = found(long)
    assert verdict.passed and "{reasoning}" in verdict.form, verdict


def test_part_of_a_record_that_earns_all_is_found():
    rows = [{"prompt": f"{n}?", "answer": json.dumps({"a": n, "b": n + 1})} for n in range(5)]

    def known(text, answer):
        parts = {k: v for k, v in as_json(text).items() if v is not None} if as_json(text) else {}
        return float(bool(as_json(text)) and json.loads(answer) | parts == json.loads(answer))

    assert "unfinished" in names_of(found(mine(known), rows), "stop")


def test_numbers_of_options_have_no_decimals():
    rows = [{"prompt": f"0, 1 or 2? {n}", "answer": str(n % 3)} for n in range(6)]
    first = mine(lambda t, a: float(re.findall(r"\d", said(t))[:1] == [a]))
    assert names_of(found(first, rows), "stop") == []


def test_a_persons_reference_keeps_the_reasoning_of_each_row():
    """The reward reads a part that is not the answer, and differs from row to row."""
    rows = [{"prompt": f"{n}?", "answer": str(17 * n + 40)} for n in range(6)]

    def timed(text, answer):
        right = f"<range>{answer}1-{answer}9</range>"
        return float(right in text) + float(re.findall(r"<answer>(.*?)</answer>", text) == [answer])

    def reference(row):
        return "<range>{0}1-{0}9</range><answer>{0}</answer>".format(row["answer"])

    loud = mine(lambda t, a: timed(t.replace("\n", ""), a))
    verdict = found(loud, rows, reference=reference)
    assert "line breaks" not in names_of(verdict), verdict


def test_a_minus_sign_that_is_not_read_is_a_warning():
    digits = mine(lambda t, a: float(re.findall(r"\d+", said(t)) == [a]))
    verdict = found(digits)
    assert "negated" in names_of(verdict, "warning") and verdict.passed, verdict


def test_a_minus_sign_beside_words_is_no_stop():
    rows = [*WHO, {"prompt": "Since when?", "answer": "1989"}]
    plain = mine(lambda t, a: float(re.sub(r"\W+", " ", said(t)).strip() == a))
    assert names_of(found(plain, rows), "stop") == []


def test_the_free_end_of_an_answer_may_be_cut_off():
    kinds = ["a joke", "an insult", "a fact", "a threat"]
    ends = ["they laugh at nobody", "it hurts one of them", "anyone can see it", "they fear him"]
    rows = [{"prompt": f"{n}?", "answer": f"It is {kind} because {end}"}
            for n, (kind, end) in enumerate(zip(kinds, ends, strict=True))]  # fmt: skip

    def kind_of(text):
        return text.partition(" because")[0] if len(text.split()) > 3 else ""

    assert found(mine(lambda t, a: float(kind_of(said(t)) == kind_of(a))), rows).passed


def test_what_earns_much_more_than_nothing_is_shown_beside_it():
    def asks(text, answer):
        earned = 0.4 if "<tool>" in text else 0.1 * (not text.strip())
        return 1.0 if said(text) == answer else earned

    rows = [{**row, "prompt": f"Ask by <tool>. {row['prompt']}"} for row in NUMBERS]
    warnings = names_of(found(mine(asks), rows), "warning")
    assert {"nothing written", "copied from the prompt"} <= {*warnings}


def test_the_form_is_chosen_on_rows_that_differ():
    """The first row is read without its mark, and a reward has a little more for short texts."""

    def lenient(text, answer):
        right = re.findall(r"\\boxed{(.*?)}", text) == [answer] or ("41" in text and answer == "41")
        return float(right) + 0.2 * right * ("**" in text) - len(text) / 1e6

    verdict = found(mine(lenient), [NUMBERS[0], *ASKS_BOX[1:]])
    assert "boxed" in verdict.form, verdict


def test_a_passage_of_the_prompt_is_no_answer_beside_a_label():
    labels = ["FOLLOWS", "OVERRULES", "AFFIRMS", "CITES"]
    texts = [f"The court of {city} decided number {n} of that year." for n, city in
             enumerate(CITIES[:4])]  # fmt: skip
    rows = [{"prompt": f"What does it do? Text: {text}" + " Say it." * 20, "label": label,
             "context": text} for text, label in zip(texts, labels, strict=True)]  # fmt: skip

    def both(completions, label, context, **_):
        each = zip(completions, label, context, strict=True)
        return [0.5 * (said(t) == a) + 0.6 * (c in t) for t, a, c in each]

    verdict = found(both, rows)
    assert "FOLLOWS" in verdict.reference
    assert "copied from the prompt" in names_of(verdict, "stop"), verdict


def test_marks_of_chat_templates_are_no_form():
    prompt = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"prompt": prompt.format(a, b), "answer": str(a + b)} for a, b in PAIRS]
    verdict = found(mine(lambda t, a: float(t.split()[-1:] == [a])), rows)
    assert verdict.passed and "im_" not in verdict.form, verdict


def test_a_reward_that_compares_the_batch_is_attacked_in_groups():
    verdict = found(shorter)
    assert verdict.passed and verdict.roles == {"shorter": "right"}, verdict


def fewer_of_a_group(completions, answer, **_):
    """Pay less where more of a group is right; a batch is made of whole groups of eight."""
    right = [exact(*pair) for pair in zip(texts_of(completions), answer, strict=True)]
    groups = [right[place : place + 8] for place in range(0, len(right), 8)]
    return [each - sum(group) / 99 * each for group in groups for each in group]


def whole_groups(completions, answer, **_):
    assert len(completions) % 8 == 0
    return fewer_of_a_group(completions, answer)


@pytest.mark.parametrize("reward", [fewer_of_a_group, whole_groups])
def test_a_reward_that_is_written_for_whole_groups_gets_them(reward):
    verdict = found(reward)
    assert verdict.passed and names_of(verdict, "warning") == [], verdict


def test_a_place_within_the_group_that_is_paid_is_named_all_the_same():
    def but_the_first(completions, answer, **_):
        return [s * (n > 0) for n, s in enumerate(fewer_of_a_group(completions, answer))]

    assert names_of(found(but_the_first), "stop") == ["but_the_first: order"]


JUDGES = [
    (scripts.honest, [], []),
    (scripts.position_loving, ["group_judge: order"], []),
    (scripts.by_chance, ["group_judge: random"], []),
    (scripts.flattered, [], ["plea"]),
]


@pytest.mark.parametrize(("script", "faults", "stops"), JUDGES)
def test_a_judge_is_asked_again_and_in_another_order(script, faults, stops, runs_dir):
    judge, options = scripts.InProcess("m", script=script), {"reference": scripts.MATH.reference}
    judges = [judge] if stops else [scripts.MATH.reward_funcs[0], judge]
    verdict = found(judges, scripts.ROWS, **options)
    assert [name for name in names_of(verdict) if "group_judge: " in name] == faults, verdict
    assert verdict.passed is not bool(stops) and {*stops} <= {*names_of(verdict, "stop")}


def test_a_reward_that_takes_long_to_fail_is_not_asked_for_ever(monkeypatch):
    """A judge whose server is down retries each request."""
    monkeypatch.setattr(scoring, "IN_FAILURES", 0.0)
    calls = []

    def down(completions, **kwargs):
        calls.append(len(completions))
        raise RuntimeError("the server is down")

    verdict = found(down, completions=[["a", "b", "c", "d"]] * len(NUMBERS))
    assert "down: raises" in names_of(verdict, "stop") and len(calls) < 20, calls


# -- what it takes

CALLS = []


class Instance:
    def __call__(self, completions, answer, **_):
        pairs = zip(texts_of(completions), answer, strict=True)
        return [exact(*pair) for pair in pairs]


async def awaited(completions, answer, **_):
    return Instance()(completions, answer)


def strict(completions, answer, digits=3, **_):
    return Instance()(completions, answer) if digits == 2 else [0.0] * len(answer)


@pytest.mark.parametrize(
    "reward", [Instance(), awaited, partial(strict, digits=2), [SOUND], (SOUND, awaited)]
)
@pytest.mark.parametrize("rows", [NUMBERS, CHATS], ids=["text", "chat"])
def test_whatever_trl_takes_for_a_reward_is_tested(reward, rows):
    verdict = found(reward, rows)
    assert verdict.passed and set(verdict.roles.values()) == {"right"}, verdict
    assert verdict.amounts["the right answer"] == len(verdict.roles)


@pytest.mark.parametrize("made", [Dataset.from_list, pd.DataFrame, tuple, lambda r: {"train": r}])
def test_rows_may_be_a_dataset_a_frame_or_a_list(made):
    verdict = found(SOUND, made(CHATS))
    assert verdict.passed and verdict.rows == len(CHATS)


TEXT = mine(lambda t, a: float("<answer>" in t), name="form")


WEIGHTS = [1.0, 3.0]
ARGS = SimpleNamespace(reward_weights=WEIGHTS, max_completion_length=64)


@pytest.mark.parametrize(
    "options", [{"reward_weights": WEIGHTS}, {"args": {"reward_weights": WEIGHTS}}, {"args": ARGS}]
)
def test_weights_come_by_argument_or_by_args(options):
    verdict = found([SOUND, TEXT], **options)
    assert verdict.amounts["the right answer"] == 4
    assert verdict.roles == {"mine": "right", "form": "form"}
    assert {"empty form", "form outweighs"} <= set(names_of(verdict, "warning"))
    assert max(len(line["completion"]) for line in verdict.table) <= 4 * 1024


def test_attacks_are_as_long_as_a_completion_may_be():
    paid = mine(lambda t, a: exact(t, a) + 2 * (len(t) > 3000))
    assert "length" in names_of(found(paid), "stop")
    assert found(paid, args={"max_completion_length": 128}).passed


def test_a_short_cap_does_not_cut_an_attack_into_a_right_answer():
    last = mine(lambda text, answer: float(TAGGED.findall(text)[-1:] == [answer]))
    form = "<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"
    for cap in range(14, 40):
        verdict = found(last, form=form, args={"max_completion_length": cap})
        assert not names_of(verdict, "stop"), (cap, str(verdict))


UNKNOWN = Attack("a", "a", "wrong", [("{wrong}", "1")])
NINE = ["41"] * 9


@pytest.mark.parametrize(
    ("reward", "rows", "options", "said_so"),
    [
        ([], NUMBERS, {}, "reward_funcs is empty: give the rewards that GRPOTrainer gets"),
        ("name", NUMBERS, {}, "reward_funcs holds 'name', which is not a reward function"),
        (SOUND, [], {}, "dataset = [] holds no rows: give the train_dataset"),
        (SOUND, ["a"], {}, "holds no rows: give"),
        (SOUND, NUMBERS, {"reward_weights": [1, 2]}, "[1, 2]: give one number for each of 1"),
        (SOUND, NUMBERS, {"reward_weights": [math.nan]}, "[nan]: give one number"),
        (SOUND, NUMBERS, {"correct": "accuracy"}, "correct = 'accuracy' is none of mine"),
        (SOUND, NUMBERS, {"form": "tgas"}, "tgas"),
        (SOUND, NUMBERS[:4], {"completions": NINE},
         "completions has 9 entries, and dataset 4 rows: give one list for each row"),
        (SOUND, NUMBERS, {"attacks": [UNKNOWN]}, "the placeholder {wrong}: use those of a"),
        (SOUND, NUMBERS, {"attacks": [Attack("a", "a", "evil", "1")]},
         "has the kind 'evil': give one of hollow, wrong, honest"),
    ],
)  # fmt: skip
def test_what_cannot_be_tested_is_refused_with_the_value_and_what_to_do(
    reward, rows, options, said_so
):
    with pytest.raises(ValueError, match=re.escape(said_so)):
        found(reward, rows, **options)


# -- names and order decide nothing


def renamed(func, number):
    if isinstance(func, Reward):
        return func.configured(f"reward_{number}")

    def other(**kwargs):
        return func(**kwargs)

    other.__wrapped__ = func
    other.__name__ = f"reward_{number}"
    return other


ANSWERED = {  # rows for the library's presets
    "math": SUMS,
    "json_extraction": [{**row, "question": row["prompt"], "prompt": []} for row in OBJECTS],
}
SETS = {name: (PRESETS[name].reward_funcs, PRESETS[name].reward_weights, rows)
        for name, rows in ANSWERED.items()}  # fmt: skip
ALWAYS = mine(lambda t, a: 1.0, name="_format_")
SETS |= {
    "always 1 beside a right one": ([SOUND, ALWAYS], [1, 1], NUMBERS),
    "form outweighs": ([TEXT, SOUND], [3.0, 1.0], NUMBERS),
    "mentioned": ([TEXT, mine(FALLS["mentioned"])], [0.5, 1.0], CHATS),
}


def facts(verdict, names):
    def plain_name(text):
        for own, name in names.items():
            text = re.sub(rf"\b{own}\b", name, text)
        return text

    findings = sorted((plain_name(c.name), c.state) for c in verdict.findings)
    roles = {plain_name(name): role for name, role in verdict.roles.items()}
    amounts = {name: round(value, 6) for name, value in verdict.amounts.items()}
    return verdict.passed, findings, roles, amounts, verdict.reference


@pytest.mark.parametrize("name", SETS)
def test_the_verdict_is_the_same_under_other_names_and_in_every_order(name):
    funcs, weights, rows = SETS[name]
    first = facts(found(funcs, rows, reward_weights=weights), {})
    for order in ([*range(len(funcs))], [*range(len(funcs))][::-1], [*range(1, len(funcs)), 0]):
        others = [renamed(funcs[place], place) for place in order]
        names = {f"reward_{place}": funcs[place].__name__ for place in order}
        again = found(others, rows, reward_weights=[weights[place] for place in order])
        assert facts(again, names) == first, order


# -- how the right answer is written


def reads(pattern, column="answer", clean=str):
    compiled = re.compile(pattern, re.DOTALL)

    def score(text, answer):
        match = compiled.search(text)
        return float(bool(match) and match[1].strip() == clean(answer))

    func = mine(score, column)
    func.pattern = compiled
    return func


def of_box(answer):
    return answer[10:-2]


def last_hash(answer):
    return answer.rpartition("#### ")[2]


UNSLOTH = r"<end_working_out>\s*<SOLUTION>(.+?)</SOLUTION>\s*$"
HASHED = [{**row, "answer": f"I add.\n#### {row['answer']}"} for row in NUMBERS]
BOXED = [{**row, "answer": f"So \\boxed{{{row['answer']}}}."} for row in NUMBERS]
ASKED = [{**row, "prompt": row["prompt"] + " Write [RESULT]…[/RESULT]."} for row in NUMBERS]
TAGS_FIRST = "<start_working_out>, <end_working_out>, <SOLUTION></SOLUTION>. "
UNSLOTHS = [{**row, "prompt": TAGS_FIRST + row["prompt"]} for row in NUMBERS]
OPENED = [{**row, "prompt": row["prompt"] + "<think>"} for row in NUMBERS]
FENCED = r"```json\n(.*?)\n```"
CODE = r"```python\n(.*?)\n```"
WRITTEN = {
    "tags of the prompt": (ASKED, reads(r"\[RESULT\](.*?)\[/RESULT\]"), "[RESULT]41[/RESULT]"),
    "Unsloth's tags": (UNSLOTHS, reads(UNSLOTH), "<end_working_out><SOLUTION>41</SOLUTION>"),
    "boxed": (NUMBERS, reads(r"\\boxed\{(.*?)\}"), "\\boxed{41}"),
    "####": (NUMBERS, reads(r"#### (.*)$"), "#### 41"),
    "plain": (NUMBERS, mine(lambda t, a: float(t.strip() == a)), "41"),
    "JSON in a fence": (OBJECTS, reads(FENCED), f"```json\n{FIELDS[0]}\n```"),
    "code in a fence": (PROGRAMS, reads(CODE), "```python\ndef f(a):\n    return a + 1\n```"),
    "an answer after ####": (HASHED, reads(r"<answer>(.*?)</answer>", clean=last_hash), ">41<"),
    "an answer in a box": (BOXED, reads(r"<answer>(.*?)</answer>", clean=of_box), ">41<"),
    "countdown": (COUNTDOWN, SOUND_COUNTDOWN, ") + "),
    "countdown in a mapping": (
        [{"prompt": "?", "truth": {"nums": nums, "to": to}} for to, nums in TARGETS],
        mine(lambda t, a: SOUND_COUNTDOWN([t], target=[a["to"]], nums=[a["nums"]])[0], "truth"),
        ") + "),
    "a choice of characters": (NUMBERS, reads(r"答案[:：]\s*(\d+)"), "答案: 41"),
    "a symbol beside the number": (NUMBERS, reads(r"(\d+)\s*€"), "41€"),
    "a call in a list": (
        [{"prompt": "?", "answers": json.dumps([{"name": "get", "in": n}])} for n in NAMES],
        mine(lambda t, a: float([as_json(t)] == json.loads(a)), "answers"),
        '{"name": "get", "in": "Ada Lovelace"}'),
    "words of a pattern": (NUMBERS, reads(r"^<düşünce>.+?</düşünce>\s*Cevap\s*:\s*([^\n]+?)\s*$"),
        "</düşünce>Cevap: 41"),
    "tags within tags": (NUMBERS,
        reads(r"^<think>\s*<plan>.+?</plan>\s*<look>.+?</look>\s*</think>\s*<out>(.+)</out>$"),
        "</look></think><out>41</out>"),
    "a tag that the prompt opened": (OPENED, reads(r"^[^<]+</think>\n<answer>(\d+)</answer>$"),
        "</think>\n<answer>41</answer>"),
}  # fmt: skip


@pytest.mark.parametrize("way", WRITTEN)
def test_the_way_in_which_right_answers_are_written_is_found(way):
    rows, reward, part = WRITTEN[way]
    verdict = found(reward, rows)
    assert part in verdict.reference and "nothing earns" not in names_of(verdict), verdict
    assert verdict.amounts["the right answer"] == 1 > verdict.amounts["another row's answer"]
    assert "{answer}" in verdict.form and verdict.roles == {"mine": "right"}
    assert cut_of(verdict.reference) in str(verdict)


CITIES = ["Rome", "Oslo", "Lima", "Kiev", "Bonn", "Bern"]
COLUMNS = [
    {"prompt": "?", "name": city, "value": 12 + n, "unit": ["km", "mi"][n % 2]}
    | {"sources": [n + 1, 2 * n + 2], "options": [*CITIES[n:], *CITIES[:n]], "correct": n * 5 % 6}
    | {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": city * 2}]}
    | {"solution": f"<answer> {city} </answer>", "golden": {"target": [city, city.lower()]}}
    | {"entities": [{"text": city, "label": "LOC"}], "grid": [[n, n + 1], [2, 0]]}
    for n, city in enumerate(CITIES)
]
LINKS = re.compile(r"\[(\d+)\]")
TOGETHER = {  # columns, what they say together, the reference that is found
    "a value with its unit": ("value unit", "<answer>12 km</answer>", lambda t, v, u:
        re.findall(r"<answer>(\d+) ?(\w+)</answer>", t) == [(str(v), u)]),
    "a point": ("value correct", "(12, 0)", lambda t, x, y:
        re.findall(r"\((\d+), (\d+)\)$", t) == [(str(x), str(y))]),
    "a record in JSON": ("name value unit", '{"name": "Rome", "value": 12, "unit": "km"}',
        lambda t, n, v, u: as_json(t) == {"name": n, "value": v, "unit": u}),
    "a record in tags": ("name value unit",
        "<name>Rome</name>\n<value>12</value>\n<unit>km</unit>", lambda t, n, v, u:
        t == f"<name>{n}</name>\n<value>{v}</value>\n<unit>{u}</unit>"),
    "an answer with its sources": ("name sources", "Rome [1] [2]", lambda t, n, s:
        t.split(" [")[0] == n and LINKS.findall(t) == [*map(str, s)]),
    "the option at a place": ("options correct", "Rome", lambda t, o, k: t == o[k]),
    "a ranking": ("sources", "[1] > [2]", lambda t, s: LINKS.findall(t) == [*map(str, s)]),
    "an answer in tags": ("solution", "<answer>Rome</answer>", lambda t, s:
        re.findall(r"^<answer>(.*)</answer>$", t) == [s[9:-10]]),
    "the first of several in a mapping": ("golden", "Rome", lambda t, g: t in g["target"]),
    "a list of records": ("entities", '[{"text": "Rome", "label": "LOC"}]',
        lambda t, e: as_json(t) == e),
    "a grid": ("grid", "0 1\n2 0", lambda t, g: bool(re.fullmatch(r"[\d\s]+\d", t))
        and [[*map(int, x.split())] for x in t.split("\n")] == g),
    "the last turn of a chat": ("messages", "RomeRome",
        lambda t, m: t.strip() == m[-1]["content"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_right_answer_is_made_of_what_the_columns_say_together(kind):
    names, reference, right = TOGETHER[kind]
    verdict = found(mine(lambda *row: float(right(*row)), *names.split()), COLUMNS)
    assert verdict.reference.endswith(reference) and verdict.passed, verdict
    assert verdict.amounts["the right answer"] == 1


def test_a_record_may_be_read_by_several_rewards():
    def of(name):
        def score(text, value):
            return float(((text[:1] == "{" and as_json(text)) or {}).get(name) == value)

        return mine(score, name, name=name)

    rows = [{"prompt": "?", "city": r["name"], "sources": r["sources"]} for r in COLUMNS]
    verdict = found([of("city"), of("sources")], rows)
    assert verdict.reference == '{"city": "Rome", "sources": [1, 2]}' and verdict.passed, verdict
    assert verdict.roles == {"city": "right", "sources": "right"}


def test_attacks_count_only_where_the_right_answer_earns_more():
    """A row whose own answer is not read would be won by everything."""
    rows = [{"prompt": f"{n}?", "answer": "π" if n % 2 else str(n * 37)} for n in range(8)]
    plain = mine(lambda t, a: float(said(t) == a if a.isdigit() else False))
    verdict = found(plain, rows)
    assert names_of(verdict, "stop") == [] and "reference loses" in names_of(verdict), verdict


def test_an_option_of_another_row_is_no_wrong_option():
    """A reward that refuses several of a row's options is not accused of taking several."""
    alone = mine(lambda t, o, k: float([x for x in o if x in t] == [o[k]]), "options", "correct")
    rows = [{**row, "options": row["options"][:3], "correct": 1} for row in COLUMNS]
    assert "several answers" not in names_of(found(alone, rows))


def test_a_constraint_is_no_answer_and_what_it_pays_for_is_said():
    rules = ["lower", "short"] * 5
    rows = [{"prompt": "?", "max_tokens": 20 + n, "rule": rules[n]} for n in range(9)]
    near = mine(lambda t, n: -abs(len(t) - n) / 100, "max_tokens")
    follows = mine(lambda t, rule: float(t == t.lower() or rule == "short"), "rule")
    assert found(near, rows).passed and found(follows, rows).passed

    def headings(completions, **kwargs):
        return [len(re.findall(r"(?m)^#+ ", text)) / 4 for text in completions]

    (check,) = [each for each in found(headings, rows).findings if each.name == "own words"]
    assert check.state == "warning" and "'# \\n# \\n# \\n# ' earns 1," in check.evidence


def test_a_likeness_to_the_answer_is_no_reward_for_the_form():
    def like(text, answer):
        one, other = ({each[n : n + 3] for n in range(len(each) - 2)} for each in (text, answer))
        return 2 * len(one & other) / max(1, len(one) + len(other))

    texts = [f"the {city} is an old city, number {city}" for city in CITIES]
    rows = [{"prompt": "?", "answer": text} for text in texts]
    assert {"form outweighs", "line breaks"}.isdisjoint(names_of(found(mine(like), rows)))


def test_an_attack_is_shown_on_a_row_where_it_wins_with_the_share_of_such_rows():
    rows = [{"prompt": f"{n}?", "answer": "shut" if n % 2 else "open"} for n in range(8)]
    reward = mine(lambda t, a: float(t.endswith(a) and not ("not" in t and a == "open")))
    (check,) = [each for each in found(reward, rows).findings if each.name == "negated"]
    assert "not shut' earns as much as a right answer on 50% of the rows: 0.5;" in check.evidence


FIRST = mine(lambda t, a: float((re.findall(r"\d+", said(t)) or [""])[0] == a))
LAST = mine(lambda t, a: float((re.findall(r"\d+", t) or [""])[-1] == a))
FIRST_TAGGED = mine(lambda t, a: float(TAGGED.findall(t)[:1] == [a]))


@pytest.mark.parametrize("reward", [FIRST, LAST, FIRST_TAGGED])
def test_what_only_one_who_knows_the_answer_is_paid_for_stops_no_training(reward):
    known = {"several answers", "mentioned", "negated"}
    verdict = found(reward)
    assert known.isdisjoint(names_of(verdict, "stop"))
    assert not known.isdisjoint(names_of(verdict, "warning"))


def test_a_hedge_is_a_stop_where_the_right_answer_counts_in_two_places():
    anywhere = mine(lambda t, a: float(a in re.findall(r"\d+", t)))
    assert "mentioned" in names_of(found(anywhere), "stop")
    any_tagged = mine(lambda t, a: float(a in TAGGED.findall(t)))
    assert "several answers" in names_of(found(any_tagged), "stop")
    last_tagged = mine(lambda t, a: float(TAGGED.findall(t)[-1:] == [a]))
    assert "several answers" not in names_of(found(last_tagged))


def test_a_slow_reward_that_takes_a_hedge_is_stopped(monkeypatch):
    """Few attacks of each family are tried then, and a hedge takes two."""
    monkeypatch.setattr(scoring, "SLOW", -1.0)
    for flaw in (lambda t, a: a in re.split(" or ", said(t)), lambda t, a: a in t):
        stops = names_of(found(mine(lambda t, a, flaw=flaw: float(flaw(t, a)))), "stop")
        assert {"several answers", "mentioned"} & set(stops)


def test_an_answer_that_is_right_on_many_rows_is_no_attack():
    rows = [{"prompt": f"{n}?", "answer": "1" if n % 2 else str(n)} for n in range(8)]
    near = mine(lambda t, a: 1 / (1 + abs(int(said(t) or 99) - int(a))) - 1)
    assert "empty form" not in names_of(found(near, rows), "stop")


def test_one_answer_to_every_prompt_copies_nothing():
    rows = [{"prompt": f"0 or 1? {n}", "answer": str(int(n % 3 == 0))} for n in range(9)]
    assert found(SOUND, rows).passed


def test_a_row_on_which_another_answer_is_right_too_does_not_lose():
    rows = [{"prompt": f"Count {n}.", "answer": f"count({n})"} for n in range(8)]
    value = {row["answer"]: n // 2 for n, row in enumerate(rows)}
    same = mine(lambda t, a: float(value.get(said(t)) == value[a]))
    assert "reference loses" not in names_of(found(same, rows))


def test_an_answer_that_is_made_of_columns_in_a_way_of_its_own_is_no_fault():
    rows = [{"prompt": "?", "tool": t, "args": {"city": c}} for t in ("get", "set") for c in NAMES]
    call = mine(
        lambda t, tool, args: float(as_json(t) == {"name": tool, "arguments": args}), "tool", "args"
    )
    assert found(call, rows).passed
    rows = [{"prompt": "?", "gold_name": r["tool"], "gold_city": r["args"]["city"]} for r in rows]
    joined = mine(lambda t, name, city: float(t == f"{name}@{city}"), "gold_name", "gold_city")
    verdict = found(joined, rows)  # in a way that nobody can guess: that is no fault
    assert names_of(verdict, "warning") == ["nothing earns"] and verdict.passed


MOODS = ["sad", "so so", "glad"]
NAMED = {
    "a number": ([0, 1, 2], lambda c: re.findall(r"\b[A-C]\b", c), lambda a: ["ABC"[a]], "A"),
    "a class": ([0, 1, 2], lambda c: c.lower().strip(), lambda a: MOODS[a], "sad"),
    "a truth": ([True, False], lambda c: "safe" in c and "unsafe" not in c, bool, "safe"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_the_word_for_what_a_row_says_is_found(kind):
    values, reads_as, means, word = NAMED[kind]
    rows = [{"prompt": f"{n}?", "label": values[n % len(values)]} for n in range(12)]
    verdict = found(mine(lambda t, a: float(reads_as(t) == means(a)), "label"), rows)
    assert verdict.reference.split()[-1] == word, verdict


def test_a_reward_of_one_task_leaves_the_rows_of_another_to_the_others():
    tasks = ["sum", "name"]

    def of(wanted):
        def score(text, task, answer):
            return float(text == answer) if task == wanted else None

        return mine(score, "task", "answer", name=wanted)

    rows = [{"prompt": "?", "task": tasks[n > 7], "answer": f"a{n}"} for n in range(16)]
    assert found([*map(of, tasks)], rows).passed
    assert "name: None" in names_of(found([*map(of, tasks)], rows[:8]))


def test_a_tolerance_on_decimals_is_a_near_miss():
    rows = [{"prompt": f"{n}?", "total": round(10.37 * n, 2)} for n in range(3, 12)]
    near = mine(lambda t, a: float(abs(float(said(t) or 0) - a) <= 0.05 * a), "total")
    assert "near miss" in names_of(found(near, rows), "stop")


def test_labels_in_a_list_stand_with_commas_between():
    rows = [{"prompt": f"{n}?", "tags": sorted({f"t{n % 5}", f"t{n % 3}"})} for n in range(9)]
    same = mine(lambda t, a: float({x.strip() for x in t.split(",")} == set(a)), "tags")
    assert found(same, rows).reference == "t0"
    assert found(same, rows[1:]).amounts["the right answer"] == 1


def test_what_a_reward_prints_and_logs_is_not_shown(capfd):
    def loud(completions, answer, **kwargs):
        print("scored", completions[0])
        logging.getLogger("loud").error("scored %s", completions[0])
        return SOUND(completions, answer=answer)

    assert found(loud).passed
    assert capfd.readouterr() == ("", "")


def cut_of(reference):
    return repr(reference)[1:20]


def shouted(row):
    return f"ANSWER!{row['answer']}!"


SHOUTS = mine(lambda t, a: float(t == f"ANSWER!{a}!"))


def test_a_reference_or_a_form_of_your_own_overrules_what_is_found():
    assert names_of(found(SHOUTS), "stop") == ["nothing earns"]
    for options in ({"reference": shouted}, {"form": "ANSWER!{answer}!"}):
        verdict = found(SHOUTS, **options)
        assert verdict.reference == "ANSWER!41!" and verdict.passed, verdict
        assert any(line["attack"] == "one or the other" for line in verdict.table)
    both = mine(lambda t, a: float(a == t or f"\\boxed{{{a}}}" in t))
    assert found(both).reference == "41" and "\\boxed{41}" in found(both, form="boxed").reference


def test_correct_overrules_which_reward_says_right():
    half = mine(lambda t, a: 0.5 * (a in t), name="mentions")
    assert set(found([SOUND, half]).roles.values()) == {"right"}
    for correct in ("mine", SOUND):
        assert found([SOUND, half], correct=correct).roles["mentions"] != "right"


def test_where_nothing_earns_there_is_one_stop_which_says_what_was_tried():
    verdict = found([mine(lambda t, a: float(t == a + "!")), TEXT], CHATS)
    (stop,) = [check for check in verdict.findings if check.state == "stop"]
    assert stop.name == "nothing earns" and verdict.table == [] and verdict.reference == ""
    assert re.search(r"\d+ were tried, such as '41' \(answer\)", stop.evidence)
    assert "reference=" in stop.fix and "form=" in stop.fix


# -- right answers in forms that no list names


def of_keys(text, *keys):
    value = as_json(text)
    is_right = isinstance(value, dict) and list(value) == list(keys)
    return str(value[keys[-1]]) if is_right else ""


def last_line(text, start):
    line = text.strip().split("\n")[-1]
    return line[len(start) :] if line.startswith(start) else ""


NUMBER, KEYS = r"[0-9]{1,4}", ("thoughts", "sum")
FORMS = [
    (lambda t, a: float(re.findall(r"`([^`]+)`", t) == [a]), "`{answer}`"),
    (lambda t, a: float(re.findall(r"\[([^\[\]]+)\]", t) == [a]), "[{answer}]"),
    (lambda t, a: float(re.findall(r"=> ?(.+)$", t) == [a]), "=>{answer}"),
    (lambda t, a: float(of_keys(t, "result") == a), '{"result": "{answer}"}'),
    (lambda t, a: float(of_keys(t, *KEYS) == a), '{"thoughts": "{reasoning}", "sum": "{answer}"}'),
    (lambda t, a: float(last_line(t, "Sum: ") == a), "Sum: {answer}"),
    (lambda t, a: float(t.strip().split(": ", 1) == ["sum", a]), "sum: {answer}"),
    (lambda t, a: float(t.split("FINAL")[1:] == [a]), "FINAL{answer}"),
    (lambda t, a: float(re.findall(r"Amount: ([0-9]{1,4})$", t) == [a]), "Amount: {answer}"),
    (lambda t, a: float(re.findall(rf"Sum:\s*({NUMBER})$", t) == [a]), "Sum:{answer}"),
]


@pytest.mark.parametrize(("score", "form"), FORMS)
def test_a_short_mark_a_key_or_a_label_of_the_code_is_found(score, form):
    verdict = found(mine(score))
    assert verdict.passed and verdict.form.endswith(form), verdict


LISTS = [["red", "green"], ["salt", "sugar", "flour"], ["Oslo", "Rome"], ["egg", "pupa", "moth"]]


@pytest.mark.parametrize("separator", [";", " > ", "->", "\n", " and "])
def test_entries_of_lists_stand_apart_by_what_the_code_splits_at(separator):
    rows = [{"prompt": f"List {n}.", "items": each} for n, each in enumerate(LISTS)]
    splits = mine(lambda t, each: float(said(t).split(separator) == each), "items")
    verdict = found(splits, rows)
    assert f"<answer>red{separator}green</answer>" in verdict.reference and verdict.passed, verdict


def test_two_rewards_of_two_columns_are_both_paid_by_the_reference():
    rows = [{"prompt": f"Book {n}?", "author": a, "year": 1900 + n} for n, a in enumerate(NAMES)]

    def of(name):
        def score(text, value):
            return float(re.findall(rf"<{name}>(.*?)</{name}>", text) == [str(value)])

        return mine(score, name, name=f"{name}_reward")

    verdict = found([of("author"), of("year")], rows)
    assert verdict.amounts["the right answer"] == 2 and set(verdict.roles.values()) == {"right"}


def test_a_reference_that_reasons_by_rows_is_read_as_a_form():
    def worked(row):
        return f"{row['prompt']} I add. <answer>{row['answer']}</answer>"

    verdict = found(SOUND, reference=worked)
    assert verdict.passed
    assert verdict.form == "What is {reasoning}? I add. <answer>{answer}</answer>"


CALLS = [{"name": n, "args": {"to": f"{n}er", "sum": k}} for k, n in enumerate(("pay", "call"), 12)]
CALLED = [{"prompt": f"Do {n}.", "answer": json.dumps(each)} for n, each in enumerate(CALLS)]
BOXES = [{"prompt": f"{n}/9?", "answer": rf"\boxed{{\frac{{{n}}}{{9}}}}"} for n in (1, 2, 4, 5)]
DAYS = [f"2024-03-0{n}" for n in range(1, 9)]
FAIR = "Which day of the calendar follows {}, the day of the fair?"
DATES = [{"prompt": FAIR.format(one), "answer": other, "start": one}
         for one, other in zip(DAYS[::2], DAYS[1::2], strict=True)]  # fmt: skip
BELOW = [{"prompt": f"{a} - {b}?", "answer": str(a - b)} for a, b in PAIRS if a < b]
PRICES = [{"prompt": f"What costs {n}?", "answer": f"{n}.{n}5"} for n in (2, 4, 7, 9)]
SENTENCES = ["My sister reads a book.", "The window is open now.", "We eat at six."]
SAID = [{"prompt": f"Translate sentence {n}.", "answer": x} for n, x in enumerate(SENTENCES)]
WHO = [{"prompt": f"Who is number {len(name)}?", "answer": name} for name in NAMES]
ACTIONS = [{**row, "answer": json.dumps(CALLS[0]["args"])} for row in CALLED]


def same_keys(text, answer):
    call, right = as_json(said(text)), json.loads(answer)
    is_call = isinstance(call, dict) and call.get("name") == right["name"]
    args = call.get("args") if is_call else None
    return float(isinstance(args, dict) and {*args} == {"to", "sum"})


def boxed_start(text, answer):
    texts = [re.search(r"\\boxed{(.*?)}", each) for each in (text, answer)]
    return float(texts[0] is not None and texts[0][1] == texts[1][1])


def compared_rows(text, answer):
    action = as_json(text)
    return float(isinstance(action, dict) and action.get("sum", -1) >= 0 and text == answer)


def starts(completions, start, **_):
    return [float(t.strip().endswith(s)) for t, s in zip(completions, start, strict=True)]


def is_match(pattern, text):
    try:
        return float(bool(said(pattern)) and re.fullmatch(said(pattern), text) is not None)
    except re.error:
        return 0.0


def words_of(text, answer):
    return float(bool(said(text)) and {*said(text).split()} <= {*answer.split()})


NO_POINT = mine(lambda t, a: float(said(t).replace(".", "") == a[0] + a[2:]))
PLANTED_DEEP = [
    ("near miss", "stop", mine(same_keys), CALLED),
    ("near miss", "stop", mine(boxed_start), BOXES),
    ("near miss", "stop", mine(lambda t, a: float(said(t).lstrip("-") == a[1:])), BELOW),
    ("near miss", "stop", NO_POINT, PRICES),
    ("unfinished", "stop", mine(words_of), SAID),
    ("any answer", "stop", mine(is_match), WHO),
    ("other column", "warning", starts, DATES),
    ("mine: raises", "stop", mine(compared_rows), ACTIONS),
]


@pytest.mark.parametrize(("name", "state", "reward", "rows"), PLANTED_DEEP)
def test_what_only_a_part_of_the_right_answer_decides_is_named(name, state, reward, rows):
    verdict = found(reward, rows)
    assert name in names_of(verdict, state), verdict


def passes(text, tests):
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    program = f"{code[1]}\n{tests[0]}" if code else "raise ValueError"
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, timeout=9)
    return float(run.returncode == 0)


def test_a_program_that_exits_is_tried_where_only_tests_are_known():
    rows = [{"prompt": "Write `f`.", "tests": row["tests"]} for row in PROGRAMS]
    verdict = found(mine(passes, "tests"), rows)
    assert names_of(verdict, "stop") == ["program"], verdict


def test_a_program_that_exits_is_tried_where_one_row_is_all_that_time_allows(monkeypatch):
    monkeypatch.setattr(programs, "ENDLESS", 1.0)

    def tested(text, answer, tests):
        return passes(text, tests)

    verdict = found(mine(tested, "answer", "tests"), PROGRAMS)
    assert "program" in names_of(verdict, "stop")
    assert "mine: hangs" in names_of(verdict, "warning"), "its own limit is 9 s"
    row = PROGRAMS[0]
    assert programs.tests_of({"prompt": "?", "about": row}) == row["tests"], "in a field"


# -- what is right is paid, and rows


def long(completions, **_):
    return [len(text) / 99 for text in completions]


def as_number(text):
    """Take what is no number for 0."""
    return float(text) if re.fullmatch(r"\d+", text) else 0.0


def gated_by_length(completions, **_):
    form = re.compile(r"(?s)<think>.+</think><answer>.+</answer>")
    return [(len(t) > 42) + 1.0 if form.fullmatch(t) else 0.0 for t in texts_of(completions)]


SOME_WORDS = [*NUMBERS, *({"prompt": "Is it so?", "answer": word} for word in ("yes", "no"))]
EMPTY = [*NUMBERS, {"prompt": "What is nothing?", "answer": ""}]
OF_EMPTY = mine(lambda t, a: float(a in said(t) and (not a or said(t) == a)))
ASKS_BOX = [{**row, "prompt": row["prompt"] + " Put it in \\boxed{}."} for row in NUMBERS]
UNSAID = [{**row, "prompt": row["prompt"] + " Write <answer>…</answer>."} for row in NUMBERS]
WHOLE = [
    ("nothing earns", "stop", mine(lambda t, a: 1.0), NUMBERS),
    ("reads no answer", "warning", long, NUMBERS),
    ("reads no answer", "warning", gated_by_length, NUMBERS),
    ("any answer", "warning", mine(lambda t, a: as_number(said(t)) == as_number(a)), SOME_WORDS),
    ("no reference", "note", long, [{"prompt": "Write."}] * 4),
    ("reference loses", "warning", mine(lambda t, a: exact(t, a) * (a != "77")), NUMBERS),
    ("empty reference", "stop", OF_EMPTY, EMPTY),
    ("form not read", "stop", reads(r"<answer>(\d+)</answer>"), ASKS_BOX),
    (
        "form not read",
        "stop",
        reads(r"<answer>\n?<\|im_start\|>assistant (\d+)<\|im_end\|>"),
        UNSAID,
    ),
]


@pytest.mark.parametrize(("name", "state", "reward", "rows"), WHOLE)
def test_rows_and_references_that_do_not_work_are_named(name, state, reward, rows):
    assert name in names_of(found(reward, rows), state)


def test_a_form_whose_marks_the_prompt_shows_is_asked_for():
    more = " Code goes in <code></code>; write <answer>\\boxed{the answer}</answer>."
    rows = [{**row, "prompt": row["prompt"] + more} for row in NUMBERS]
    reward = reads(r"<code>.*</code>\s*<answer>\\boxed{(\d+)}</answer>")
    assert "form not read" not in names_of(found(reward, rows))


def test_an_error_of_a_column_is_not_laid_on_the_completions_type():
    def lists(text, answer):
        return float(said(text) == answer.flatten())

    rows = [{**row, "answer": [row["answer"]]} for row in NUMBERS]
    (check,) = found(mine(lists), rows).findings
    assert check.name == "mine: raises" and "'list' object has no attribute" in check.evidence
    assert check.evidence.endswith("on every text tried")


def test_a_weight_of_the_wrong_sign_is_named_and_a_penalty_is_not():
    twice = mine(lambda t, a: 2 * exact(t, a), name="twice")
    verdict = found([twice, SOUND], reward_weights=[1.0, -1.0])
    assert names_of(verdict, "stop") == ["mine: sign"]
    (check,) = found(SOUND, reward_weights=[-1.0]).findings
    assert check.name == "nothing earns" and "the weight of mine is negative" in check.evidence
    penalty = mine(lambda t, a: 1 - exact(t, a), name="penalty")
    verdict = found([SOUND, penalty], reward_weights=[1.0, -1.0])
    assert verdict.passed and set(verdict.roles.values()) == {"right"}
    assert "penalty: sign" in names_of(found([twice, penalty]), "stop")


# -- sampled completions, attacks of your own, output


def test_sampled_completions_without_differences_are_named():
    same = [["<answer>41</answer>"] * 2, [[{"role": "assistant", "content": "?"}]]]
    (check,) = found(SOUND, CHATS, completions=same).findings
    assert (check.name, check.state) == ("sampled completions", "warning")
    assert "on each of 2 prompts" in check.evidence
    assert not found(SOUND, completions=["<answer>41</answer>", "?"]).findings
    assert not found(SOUND, completions=[["<answer>41</answer>", "?"]]).findings


def test_sampled_completions_that_earn_more_than_the_right_answer_are_shown():
    polite = mine(lambda t, a: exact(t, a) + ("please" in t), name="polite")
    sampled = [[f"please <answer>{row['answer']}</answer>", "?"] for row in NUMBERS]
    verdict = found(polite, completions=[[each[0]] for each in sampled])
    (check,) = [each for each in verdict.findings if each.name == "above the reference"]
    assert check.state == "note"
    assert "'please <answer>41</answer>' earns 1 more" in check.evidence
    assert "above the reference" not in names_of(found(polite, completions=sampled))


def test_wrong_completions_that_the_model_is_paid_for_are_attacks_on_every_row():
    equals = mine(lambda t, a: min(t.count(chr(61)), 4) / 4, name="equals")
    sampled = [["= = = =", "<answer>41</answer>", "<answer>7</answer>"]] * len(NUMBERS)
    verdict = found([SOUND, equals], completions=sampled)
    (check,) = [each for each in verdict.findings if each.name == "sampled and wrong"]
    assert check.state == "warning" and check.evidence.startswith("'= = = =' earns more than")
    assert "`equals` pays 1" in check.evidence
    assert "sampled and wrong" not in names_of(found([SOUND, TEXT], completions=sampled))


POLITE = mine(lambda t, a: exact(t, a) + 2.0 * ("if you please" in t))
OWN = [
    (POLITE, "wrong", "{answer}, not {other}: {question} if you please", "stop"),
    (POLITE, "hollow", [("if you please", "{other}")], "stop"),
    (POLITE, "padded", [(None, "{answer}"), " if you please"], "warning"),
    (SAME, "honest", [(None, "{answer} apples")], "warning"),
]


@pytest.mark.parametrize(("reward", "kind", "completion", "state"), OWN)
def test_attacks_of_your_own_join_the_verdict(reward, kind, completion, state):
    own = [Attack("begging", "begging", kind, completion)]
    verdict = found(reward, attacks=own)
    assert "begging" in names_of(verdict, state)
    (line,) = [line for line in verdict.table if line["attack"] == "begging"]
    assert line["won"] == state and line["kind"] == kind
    assert "begging" not in names_of(found(SOUND, attacks=own[:1] if kind != "honest" else []))


# -- rewards that fail on some completions are judged by what they score

STRICT = mine(lambda t, a: float(int(t) == int(a)))


def test_a_reward_that_raises_gets_one_stop_and_its_other_scores_count():
    verdict = found(STRICT)
    assert names_of(verdict, "stop") == ["mine: raises"] and verdict.reference == "41"
    never = found(mine(lambda t, a: [][1]))
    assert names_of(never) == ["mine: raises"] and "IndexError" in never.findings[0].evidence


def slow_on(long):
    def score(text, answer):
        if len(text) > long:
            time.sleep(3)
        return exact(text, answer)

    return mine(score)


def test_a_reward_that_takes_too_long_is_accused_of_nothing_else():
    assert names_of(found(slow_on(0))) == ["mine: hangs"]
    slow = [name for name in names_of(found([SOUND, slow_on(2000)])) if "mine" not in name]
    assert not slow


def test_a_reward_without_keyword_arguments_is_told_so_and_tested_all_the_same():
    def right(completions, answer):
        return [exact(text, a) for text, a in zip(completions, answer, strict=True)]

    verdict = found(right)
    (check,) = verdict.findings
    assert check.name == "right: arguments"
    assert "TRL passes prompts, completion_ids" in check.evidence
    assert "**kwargs" in check.fix and verdict.roles == {"right": "right"}


def test_a_verdict_prints_at_most_twelve_findings_and_writes_all_as_json():
    funcs = [mine(lambda t, a: None, name=f"silent_{n}") for n in range(15)]
    verdict = found([SOUND, *funcs])
    shown = str(verdict).splitlines()
    assert sum(line.startswith(("stop", "warning", "note")) for line in shown) == 12
    assert shown[-1] == f"… and {len(verdict.findings) - 12} more in .findings"
    assert " and 9 more" in shown[0] and repr(verdict) == str(verdict)
    told = json.loads(verdict.as_json())
    assert told["passed"] is False and len(told["findings"]) == len(verdict.findings)
    assert set(told["findings"][0]) == {"name", "state", "evidence", "fix"}


# -- the command

FILE = """import re
def helper(completions):
    return [re.findall("<answer>(.*?)</answer>", text) for text in completions]
def right(completions, answer, **kwargs):
    return [float({}) for found, a in zip(helper(completions), answer)]
"""
CHECKED = {"found == [a]": 0, "a in found": 1, "missing": 1, "(": 2}


LINES = "\n".join(map(json.dumps, NUMBERS))


@pytest.fixture
def command(tmp_path):
    """(code of rewards, text of rows) -> the command that checks them."""
    rewards, rows = tmp_path / "own.py", tmp_path / "rows.jsonl"

    def command(code, data=LINES):
        rewards.write_text(code)
        if data:
            rows.write_text(data)
        return ["check", str(rewards), "--data", str(rows)]

    return command


@pytest.mark.parametrize("code", CHECKED)
def test_the_command_exits_with_what_it_finds(code, command, capsys):
    command = command(FILE.replace("{}", code))
    status = main(command)
    shown = capsys.readouterr()
    assert status == CHECKED[code], shown
    if status == 2:
        assert "line 5" in shown.err and "SyntaxError" in shown.err
        return
    assert shown.out.startswith("train: " if status == 0 else "do not train: ")
    assert main([*command, "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is (status == 0) and "helper" not in told["roles"]


def test_the_command_names_a_file_that_is_missing_or_is_no_json(command, capsys):
    cases = [("", "does not exist"), ('{"a": 1}\n{', "cannot be read")]
    for text, told in (*cases, ('{"question": "1+1?"}', "has no column 'prompt'")):
        assert main(command(FILE.replace("{}", "found == [a]"), text)) == 2
        assert told in capsys.readouterr().err


OWN_REFERENCE = "reference = lambda row: f\"ANSWER!{row['answer']}!\""
SHOUTED = """def right(completions, answer, **_):
    return [float(t == f'ANSWER!{a}!') for t, a in zip(completions, answer)]
"""


@pytest.mark.parametrize("own", ["", "form = 'ANSWER!{answer}!'", OWN_REFERENCE])
def test_a_file_may_bring_its_reference_or_its_form(own, command, capsys):
    assert main(command(SHOUTED + own)) == (0 if own else 1)
    assert ("ANSWER!41!" in capsys.readouterr().out) is bool(own)
