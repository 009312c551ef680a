# ruff: noqa: F401 (what is imported here is what the room hands out)
"""Answers: how one is written in a completion, found there, read into a value, and compared.

A `Form` says how completions are written (`find_form`, `FORMS`); `find_answer` returns the words of
a completion that are its answer; `read_answer` and `read_reference` read such words into an
`Answer`; `compare_answers` says whether two are equal, and why. Rewards, reference answers of a
data set, validation and evaluation all go through here.
"""

from grpo_nb.answers.compare import HOW, compare_answers, same_number, unusable
from grpo_nb.answers.find import (
    boxes_of,
    extract_boxed,
    extract_hash_answer,
    extract_tag,
    find_answer,
)
from grpo_nb.answers.forms import FORMS, TAGS, Form, find_form
from grpo_nb.answers.read import Answer, parse_number, read_answer, read_reference
