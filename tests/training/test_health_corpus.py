"""What the alerts are worth, on the recorded runs; benchmarks/alarms.py records and reads them."""

import shutil
from collections import Counter

import pytest

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.training import health


@pytest.fixture(scope="module")
def alarms():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROJECT_ROOT / "benchmarks")
        import alarms
    return alarms


@pytest.fixture(scope="module")
def corpus(alarms):
    return alarms.read()


@pytest.fixture(scope="module")
def judged(alarms, corpus):
    return alarms.judge(corpus)


def test_the_corpus_holds_every_run_and_is_small(alarms, corpus):
    assert set(corpus) == {one.name for one in alarms.recipes()}
    assert sum(path.stat().st_size for path in alarms.CORPUS.iterdir()) < 5e6
    for one in corpus.values():
        steps = [line["step"] for line in one["lines"] if "reward" in line]
        assert steps == list(range(1, alarms.STEPS + 1))
        assert sum("true/accuracy" in line for line in one["lines"]) == 13
        assert {said["step"] for said in one["completions"]} == {1, 30, 60}


@pytest.mark.parametrize("name", ["runs", "metrics", "completions"])
def test_a_file_that_was_changed_is_refused(alarms, tmp_path, name):
    folder = tmp_path / "corpus"
    shutil.copytree(alarms.CORPUS, folder)
    path = folder / f"{name}.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match=rf"{name}.parquet was changed since it was recorded"):
        alarms.read(folder)


def test_the_rates_that_alerts_tell_are_those_of_the_corpus(alarms, judged):
    assert alarms.rates(judged) == health.RATES
    counts = Counter(one.recipe.kind for one in judged)
    assert [counts[kind] for kind in alarms.KINDS] == [*health.RATES["runs"].values()]


def test_clean_runs_are_quiet_and_hacks_are_named(judged):
    clean = [one for one in judged if one.recipe.kind == "clean"]
    assert sum(one.first is not None for one in clean) <= 1
    hacked = [one for one in judged if one.recipe.kind == "hacked"]
    assert len({one.recipe.what for one in hacked}) == 8
    missed = Counter(one.recipe.what for one in hacked if "reward hacking" not in one.alarms)
    assert missed == {"leak": 3}  # what is validated on leaks, too


def test_an_alert_tells_its_rates_where_they_were_measured():
    clean = health.RATES["alerts"]["reward hacking"]["clean"]
    text = health.rates("reward hacking")
    assert text.startswith(f"recorded tiny runs: {clean} of 20 clean, ") and "hacked" in text
    assert "; public runs: " in health.rates("spike") and " sound, " in health.rates("spike")
    assert health.rates("memory grows") == "error rate not measured"
