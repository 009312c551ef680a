"""Use the tools that need no trainer where neither torch nor TRL is installed."""

import json
import sys
from pathlib import Path

import grpo_nb


def right(completions, answer, **kwargs):
    """Pay for the answer wherever it stands."""
    return [float(a in text) for a, text in zip(answer, completions, strict=True)]


assert Path(grpo_nb.__file__).is_relative_to(sys.prefix)
rows = [{"prompt": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(10, 40)]
verdict = grpo_nb.check_rewards([right], rows)
assert "mentioned" in {check.name for check in verdict.findings if check.state == "stop"}

lines = [{"step": n, "reward": 0.0, "frac_reward_zero_std": 1.0} for n in range(200)]
diagnosis = grpo_nb.autopsy(lines)
assert [check.name for check in diagnosis.findings] == ["nothing learnt"]
assert "nothing learnt" in diagnosis.save("autopsy.html").read_text(encoding="utf-8")
rows = [{"question": row["prompt"], "answer": row["answer"]} for row in rows]
Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
prepared = grpo_nb.prepare("rows.jsonl")
assert len(prepared.rows["train"]) == 24 and "not measured" in str(prepared)
assert not {"torch", "trl", "transformers"} & sys.modules.keys()
print("check_rewards, autopsy and prepare passed")
