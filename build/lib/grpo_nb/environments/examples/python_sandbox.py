"""Work with a tool that may fail: write a program, run it, read its output, correct it, submit it.

    user       Write f(numbers): the largest of those above 4, or 0. f([7, 2, 9]) is 9.
    assistant  run(code="… print(f([]))")     the program raised ValueError: max() …
    assistant  run(code="… print(f([]))")     0
    assistant  submit(code="…")               handed in

Programs run in the sandbox that `code_execution_reward` uses; the tests never enter it.
"""

from typing import Any

from grpo_nb import sandbox
from grpo_nb.environments import tool

SHOWN = 400  # characters shown of a program's output: its start and its end


class PythonSandbox:
    """Write the Python function. Try it out with run, and hand it in with submit."""

    max_turns = 6
    tool_seconds = 60.0  # the sandbox has its own limits, and a call may have to wait for it
    done: bool = True

    def reset(self, tests: str, **row: Any) -> None:
        """Begin with the tests of a task, in any of the shapes that the sandbox takes."""
        sandbox.choose_backend()
        self.tests, self.is_right, self.done = tests, False, False

    @tool
    def run(self, code: str) -> str:
        """Run a program and read what it prints. Each begins anew.

        Args:
            code: The whole program.
        """
        ended_well, output = sandbox.run_program(code)
        output = output.strip() or "nothing was printed"
        if len(output) > SHOWN:
            output = f"{output[: SHOWN // 2]} … {output[-SHOWN // 2 :]}"
        return output if ended_well else f"the program {output}"

    @tool
    def submit(self, code: str) -> str:
        """Hand the function in, which ends the episode.

        Args:
            code: The function, with all that it needs.
        """
        verdict = sandbox.run_tests(code, self.tests)
        if verdict.failure:
            raise RuntimeError(verdict.failure)
        self.is_right, self.done = verdict.passed == verdict.total, True
        return "handed in"

    def get_reward(self) -> float:
        """Return 1 for a program that passes every test; some tests can be passed by chance."""
        return float(self.is_right)

    @classmethod
    def solve(cls, answer: str, example: str, **row: Any) -> list[dict[str, Any]]:
        """Return the reference solution, tried on the example and submitted."""
        trial = f"{answer}\nprint({example})"
        return [
            {"name": "run", "arguments": {"code": trial}},
            {"name": "submit", "arguments": {"code": answer}},
        ]
