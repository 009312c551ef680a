"""What the dashboard costs a step, in a notebook's kernel, which sends it to the browser.

    python benchmarks/dashboard.py           # seconds

STEPS steps with the metrics of a real training, and eight completions of CHARACTERS characters
each. The processor time of the first and the last hundred steps is given, and the bytes of a step.
"""

import nbformat
from nbclient import NotebookClient

from grpo_nb.machine import PROJECT_ROOT

STEPS, CHARACTERS = 2000, 1500
CELL = f"""
import json, time
from pathlib import Path
from grpo_nb.checks import Update
from grpo_nb.views import dashboard as module
module.EVERY = 0  # each step is sent, however fast they come
board = module.TrainingDashboard()
texts = Path("tests/healthy_metrics.jsonl").read_text(encoding="utf-8").splitlines()
lines = [json.loads(text) for text in texts]
sent, send = [], board._send


def counted(message, buffers=None):
    sent.append(len(json.dumps(message)))
    send(message, buffers)


board._send = counted
board.begin([], {STEPS}, 64)
seconds = []
for step in range(1, {STEPS} + 1):
    scores = {{"exact_match_reward": 1.0, "reward": 1.5, "advantage": 0.7}}
    texts = [chr(97 + n) * {CHARACTERS} for n in range(8)]
    group = [{{"question": "q", "completion": text, **scores}} for text in texts]
    line = lines[step % len(lines)] | {{"step": step}}
    begun = time.process_time()
    board.say(f"step {{step}}: generating", is_short=True)
    board.say(f"step {{step}}: updating", is_short=True)
    board(Update(line, {STEPS}, group, []))
    seconds.append(time.process_time() - begun)
assert not board.error, board.error
for part, name in ((seconds[:100], "first"), (seconds[-100:], "last")):
    print(f"{{10 * sum(part):.2f}} ms a step, mean of the {{name}} hundred")
print(f"{{sum(sent) / {STEPS} / 1000:.0f}} kB a step")
"""


if __name__ == "__main__":
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    resources = {"metadata": {"path": str(PROJECT_ROOT)}}
    NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    for output in notebook.cells[0].outputs:
        print(output.get("text", ""), end="")
