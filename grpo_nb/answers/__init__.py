# ruff: noqa: F401 (the imports below are the package's public names)
"""Find answers in completions, parse them into values, and compare them.

A `Form` describes how completions are written (`find_form`, `FORMS`). `find_answer` returns the
part of a completion that states its answer. `read_answer` and `read_reference` parse such a part
into an `Answer`. `compare_answers` returns whether an answer equals the reference, and the reason.
Rewards, validation, evaluation and the preparation of reference answers all use these functions.
"""

from grpo_nb.answers.compare import compare_answers, same_number, unusable
from grpo_nb.answers.find import extract_boxed, extract_hash_answer, extract_tag, find_answer
from grpo_nb.answers.forms import FORMS, TAGS, Form, find_form
from grpo_nb.answers.read import Answer, parse_number, read_answer, read_reference
