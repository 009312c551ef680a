"""What the alerts are worth, on the recorded runs; benchmarks/alarms.py records and reads them."""

import shutil
from collections import Counter

import pytest

from grpo_nb.machine import PROJECT_ROOT


@pytest.fixture(scope="module")
def alarms():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROJECT_ROOT / "benchmarks")
        import alarms
    return alarms


@pytest.mark.parametrize("name", ["runs", "metrics", "completions"])
def test_a_file_that_was_changed_is_refused(alarms, tmp_path, name):
    folder = tmp_path / "corpus"
    shutil.copytree(alarms.CORPUS, folder)
    path = folder / f"{name}.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match=rf"{name}.parquet was changed since it was recorded"):
        alarms.read(folder)


def test_clean_runs_are_quiet_and_hacks_are_named(alarms):
    judged = alarms.judge(alarms.read())
    counts = alarms.rates(judged)
    assert counts["runs"] == {"clean": 20, "badly set": 25, "hacked": 22}
    clean = {rule: count["clean"] for rule, count in counts["alerts"].items() if count["clean"]}
    assert clean == {"nothing left to learn": 8}
    hacked = [one for one in judged if one.recipe.kind == "hacked"]
    assert len({one.recipe.what for one in hacked}) == 8
    missed = Counter(one.recipe.what for one in hacked if "reward hacking" not in one.alarms)
    assert missed == {"leak": 3}  # what is validated on leaks, too
