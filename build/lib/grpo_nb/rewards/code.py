"""Rewards for code. The code runs in the sandbox, and its results are compared outside of it."""

from typing import Any

from grpo_nb.answers.forms import FORMS, TAGS, Form
from grpo_nb.rewards.contract import Scored, reward
from grpo_nb.rewards.format import extract_code, no_syntax_error_reward, soft_format_reward


@reward(
    max_none_share=0.05, parallel=True, resists="printed verdicts, early exit, patched equality"
)
def code_execution_reward(
    response: str, tests: Any, *, seconds: float = 2.0, partial: bool = True, form: Form = TAGS
) -> Scored:
    """Pay the share of the tests that the code passes; `partial=False` pays all or nothing.

    The code is the last fenced block, or else the marked answer. The column `tests` contains calls
    with expected values, pairs of stdin and stdout, or asserts, in a format that
    `sandbox.run_tests` accepts.
    """
    from grpo_nb.sandbox import Limits, run_tests

    code = extract_code(response, form)
    if not code:
        return Scored(0.0, "no code in a fenced block or in the marks of the answer")
    verdict = run_tests(code, tests, limits=Limits(seconds=seconds))
    if verdict.failure:
        return Scored(None, verdict.failure)
    reason = next(filter(None, verdict.reasons), "")
    return Scored(verdict.share if partial else float(verdict.share == 1), reason)


@reward(max_none_share=0.05, parallel=True, resists="as code_execution_reward")
def code_generation_reward(response: str, tests: Any, *, form: Form = FORMS["code"]) -> Scored:
    """Pay 1/8 for one block of code, 1/8 if it parses, and 3/4 of the share of passed tests."""
    execution = code_execution_reward.score(response, tests, form=form)
    if execution.score is None:
        return execution
    well_formed = soft_format_reward.score(response, form=form)
    parses = no_syntax_error_reward.score(response, form=form).score
    return Scored(0.125 * (well_formed + parses) + 0.75 * execution.score, execution.reason)
