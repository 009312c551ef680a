# ruff: noqa: F401 (the names that this package offers)
"""Find answers in completions, read them into values, and compare them.

A `Form` describes how completions are written (`find_form`, `FORMS`). `find_answer` returns the
words of a completion that state its answer. `read_answer` and `read_reference` read such words into
an `Answer`. `compare_answers` returns whether two are equal, and why. Rewards, reference answers of
a data set, validation and evaluation all use these functions.
"""

from grpo_nb.answers.compare import HOW, compare_answers, same_number, unusable
from grpo_nb.answers.find import extract_boxed, extract_hash_answer, extract_tag, find_answer
from grpo_nb.answers.forms import FORMS, TAGS, Form, find_form
from grpo_nb.answers.read import Answer, parse_number, read_answer, read_reference
