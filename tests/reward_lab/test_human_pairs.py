"""Human pairs: which are shown, what an answer belongs to, and when the verdict is a stop."""

import json
from collections import Counter
from itertools import combinations

import pytest
import scripted_judges as scripts
from hypothesis import given
from hypothesis import strategies as st
from scripted_judges import MATH, ROWS, a_test

from grpo_nb.reward_lab import Bench, human_pairs
from grpo_nb.rewards import reward_set
from grpo_nb.runs import Run, runs_root

JUDGE = scripts.InProcess("m", cache=False)


def table_of(judge=JUDGE, rows=ROWS, **about):
    test = a_test(rows, **about)
    return test._replace(bench=Bench(reward_set([*MATH.pairs, (judge, 0.25)], MATH))).table()


@pytest.fixture
def run(runs_dir):
    return Run("pairs")


@pytest.fixture(scope="module")
def table():
    return table_of()


def by_honest(pair):
    return "left" if pair.difference > 0 else "right"


def answer(run, table, clicks, says=by_honest, judge=JUDGE):
    for pair in human_pairs.pairs(run, judge, table)[:clicks]:
        human_pairs.store(run, pair, says(pair))


def verdict(run, table, judge=JUDGE):
    return human_pairs.check(judge, human_pairs.pairs(run, judge, table))


def test_forty_pairs_over_all_prompts_that_the_judge_scores_differently(run, table):
    pairs = human_pairs.pairs(run, JUDGE, table)
    assert len(pairs) == 40 and not any(pair.better for pair in pairs)
    assert all(abs(pair.difference) > 0.15 for pair in pairs)
    assert set(Counter(pair.question for pair in pairs).values()) == {2, 3}  # of 16 prompts
    scores = table.set_index(["question", "completion"])["group_judge"]
    for pair in pairs:
        left, right = (scores[pair.question, text] for text in (pair.left, pair.right))
        assert pair.difference == left - right
    better_is_left = sum(pair.difference > 0 for pair in pairs)
    assert 10 <= better_is_left <= 30, "the place says nothing"


def test_choice_and_places_depend_on_the_texts_alone(run, table):
    pairs = human_pairs.pairs(run, JUDGE, table)
    shuffled = table.groupby("question", sort=False).sample(frac=1, random_state=1)
    assert list(shuffled.index) != list(table.index)
    assert human_pairs.pairs(run, JUDGE, shuffled) == pairs
    mirrored = human_pairs.pairs(run, JUDGE, table.assign(group_judge=-table["group_judge"]))
    assert mirrored == [pair._replace(difference=-pair.difference) for pair in pairs]


def test_what_the_judge_did_not_score_is_not_shown(run, table):
    unscored = table.assign(group_judge=table["group_judge"].where(table.index >= 6))
    pairs = human_pairs.pairs(run, JUDGE, unscored)
    assert table["question"][0] not in {pair.question for pair in pairs} and len(pairs) == 40
    assert human_pairs.pairs(run, JUDGE, table.assign(group_judge=0.5)) == []


def test_answers_outlast_the_process_and_are_not_asked_again(run, table):
    pairs = human_pairs.pairs(run, JUDGE, table)
    answer(run, table, 3)
    again = human_pairs.pairs(Run("pairs"), JUDGE, table)
    assert [pair.better for pair in again[:4]] == [*map(by_honest, again[:3]), ""]
    assert {pair[:3] for pair in again} == {pair[:3] for pair in pairs}


def test_another_baseline_keeps_the_answers_that_it_can_use(run, table):
    answer(run, table, 16)  # one of each prompt
    other = table_of(rows=ROWS[8:])  # half of the prompts, and four new ones
    pairs = human_pairs.pairs(run, JUDGE, other)
    answered = [pair for pair in pairs if pair.better]
    assert len(answered) == 8 and pairs[:8] == answered
    assert {pair.question for pair in answered} == {row["question"] for row in ROWS[8:16]}
    assert len(human_pairs.pairs(run, JUDGE, table)) == 40, "nothing is lost"


def test_answers_of_pairs_that_the_judge_scores_alike_count_still(run, table):
    answer(run, table, 30)
    constant = scripts.InProcess("m", cache=False, script=scripts.constant)
    check = verdict(run, table_of(constant), constant)
    assert (check.state, check.evidence[:20]) == ("stop", "right on 0 of 30 pai")


@pytest.mark.parametrize(
    ("clicks", "says", "state", "evidence"),
    [
        (0, by_honest, "warning", "0 of 20 pairs have a person's answer"),
        (19, by_honest, "warning", "19 of 20 pairs have a person's answer"),
        (20, by_honest, "ok", "right on 20 of 20 pairs (84% to 100%, mark 70%)"),
        (40, lambda pair: "left", "stop", ""),  # a person to whom the judge's score says nothing
        (20, lambda pair: "equal", "warning", "none of 20 pairs was conclusive"),
    ],
)
def test_the_check_waits_for_twenty_answers(run, table, clicks, says, state, evidence):
    answer(run, table, clicks, says)
    check = verdict(run, table)
    assert check.name == "group_judge: human pairs" and check.state == state
    assert check.evidence.startswith(evidence) and bool(check.fix) == (state != "ok")


def test_a_stop_needs_the_whole_interval_below_the_mark(run, table):
    """22 of 40 have the interval 40 % to 69 %, 23 one up to 71 %."""
    for count, state in ((22, "stop"), (23, "warning"), (27, "warning"), (28, "ok")):
        pairs = human_pairs.pairs(run, JUDGE, table)
        answers = [
            pair._replace(better=by_honest(pair) if place < count else "right")
            if by_honest(pair) != "right" or place < count
            else pair._replace(better="left")
            for place, pair in enumerate(pairs)
        ]
        assert human_pairs.check(JUDGE, answers).state == state, count


@pytest.fixture(scope="module")
def written(table, tmp_path_factory):
    """What a click has written, byte by byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        answer(Run("written"), table, 3)
        return (runs_root() / "written" / human_pairs.FILE).read_bytes()


@given(kept=st.integers(min_value=0))
def test_a_process_that_is_killed_at_a_write_costs_at_most_that_click(
    written, table, tmp_path_factory, kept
):
    whole = written[: kept % (len(written) + 1)]
    run = Run(tmp_path_factory.mktemp("killed"))
    file = run / human_pairs.FILE
    file.parent.mkdir()
    file.write_bytes(whole)
    complete = whole.count(b"}")
    pairs = human_pairs.pairs(run, JUDGE, table)
    assert sum(pair.better != "" for pair in pairs) == complete
    human_pairs.store(run, pairs[complete], "equal")
    answers = [p for p in human_pairs.pairs(run, JUDGE, table) if p.better]
    assert len(answers) == complete + 1, "the next click does not join the half line"


def test_the_file_is_readable(written):
    first = json.loads(written.splitlines()[0])
    assert list(first) == ["question", "left", "right", "better"] and first["better"]
    texts = {first["left"], first["right"]}
    assert tuple(sorted(texts)) in combinations(sorted(set(table_of()["completion"])), 2)
