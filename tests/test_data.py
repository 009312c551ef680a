import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb import data
from grpo_nb.config import DataConfig
from grpo_nb.numbers import parse_number
from grpo_nb.runs import Run


def words(prompt):
    return sum(len(message["content"].split()) for message in prompt)


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DataConfig(source=str(path), eval_rows=1)


def question(number, answer="#### 1"):
    return {"question": f"Question {number}?", "answer": answer}


def test_a_missing_or_empty_or_broken_file_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        data.read_rows(DataConfig(source=str(path)))
    path.write_text("")
    with pytest.raises(ValueError, match="holds no rows"):
        data.read_rows(DataConfig(source=str(path)))
    path.write_text('{"question": "a", "answer": "1"}\n{"question": ')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        data.read_rows(DataConfig(source=str(path)))
    path.write_text("[1, 2]\n")
    with pytest.raises(ValueError, match="line 1: expected an object"):
        data.read_rows(DataConfig(source=str(path)))


def test_an_unknown_source_gets_the_nearest_name():
    with pytest.raises(ValueError, match=r"'arithmetics': did you mean 'arithmetic'"):
        data.read_rows(DataConfig(source="arithmetics"))


def test_faulty_rows_are_named_by_number(tmp_path):
    config = write_jsonl(
        tmp_path / "rows.jsonl",
        question(1),
        {"answer": "2"},
        {"question": "Q?"},
        question(4, "about a dozen"),
        question(5, "#### "),
    )
    with pytest.raises(ValueError, match="4 of 5 rows") as caught:
        data.validate_rows(data.read_rows(config), config)
    message = str(caught.value)
    assert "row 2 has no 'question'" in message
    assert "row 3 has no 'answer'" in message
    assert "row 4: the gold 'about a dozen' is not a number" in message
    assert "row 5: the gold '#### ' is not a number" in message
    assert "data.question_column" in message


def test_other_column_names_are_a_setting(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "2 + 2?", "solution": 4}\n')
    config = DataConfig(source=str(path), question_column="problem", answer_column="solution")
    (row,) = data.validate_rows(data.read_rows(config), config)
    assert (row["question"], row["answer"]) == ("2 + 2?", "4")


def test_duplicates_never_reach_both_splits_and_are_reported(tmp_path):
    doubled = [question(i) for i in range(20)] + [
        {"question": f"  question   {i}? ", "answer": "1"} for i in range(20)
    ]
    config = write_jsonl(tmp_path / "rows.jsonl", *doubled).model_copy(update={"eval_rows": 7})
    train, held_out, report = data.prepare(config, seed=3, count_tokens=words)
    assert (len(train), len(held_out), report["duplicates_removed"]) == (13, 7, 20)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}


@given(st.lists(st.text(min_size=1, max_size=3), min_size=2), st.integers(0, 5))
def test_a_split_loses_and_repeats_nothing(questions, seed):
    rows = data.drop_duplicates([{"question": text} for text in questions])
    if len(rows) > 1:
        train, held_out = data.split_rows(rows, 1, seed)
        assert sorted(map(str, train + held_out)) == sorted(map(str, rows))
        assert data.split_rows(rows, 1, seed) == (train, held_out)


def test_long_prompts_are_dropped_and_counted(tmp_path):
    long = {"question": "why " * 50, "answer": "1"}
    config = write_jsonl(tmp_path / "rows.jsonl", question(1), question(2), long)
    config = config.model_copy(update={"max_prompt_tokens": 20})
    train, held_out, report = data.prepare(config, seed=0, count_tokens=words)
    assert report["too_long_removed"] == 1
    assert len(train + held_out) == 2
    with pytest.raises(ValueError, match="every prompt is longer"):
        data.prepare(config.model_copy(update={"max_prompt_tokens": 8}), 0, words)


def test_too_few_rows_to_hold_out(tmp_path):
    config = write_jsonl(tmp_path / "rows.jsonl", question(1))
    with pytest.raises(ValueError, match=r"1 rows are left and data.eval_rows = 1"):
        data.prepare(config, 0, words)


def test_a_local_copy_of_a_hub_dataset_loads_through_datasets(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    rows = data.read_rows(DataConfig(source=str(tmp_path)))
    assert rows == [{"question": "2 + 2?", "answer": "#### 4"}]


def test_a_hub_dataset_that_cannot_be_had_says_what_to_check(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    with pytest.raises(ValueError, match="Check the three names"):
        data.read_rows(DataConfig(source=str(tmp_path), split="nowhere"))


def test_rows_come_back_as_they_were_saved(runs_dir):
    config = DataConfig(max_rows=40, eval_rows=8)
    train, held_out, report = data.prepare(config, 0, words)
    run = Run("r")
    data.save(run, train, held_out, report)
    assert data.load(run, "train") == train
    assert data.load(run, "eval") == held_out


def test_every_built_in_problem_has_the_right_gold():
    for row in data.read_rows(DataConfig()):
        right = row["a"] + row["b"] if row["operator"] == "+" else row["a"] - row["b"]
        assert parse_number(row["answer"]) == right
        assert str(row["a"]) in row["question"]
        assert str(row["b"]) in row["question"]


def test_every_gold_of_gsm8k_parses(gsm8k_test_file):
    config = DataConfig(source=str(gsm8k_test_file), max_prompt_tokens=10_000)
    train, held_out, report = data.prepare(config, 0, words)
    assert report["rows_read"] == 1319
    assert report["duplicates_removed"] == 0
    assert all(parse_number(row["answer"]) is not None for row in train + held_out)
