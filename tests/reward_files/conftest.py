"""The reward files are data: pytest collects nothing of them."""

collect_ignore_glob = ["judge.py", "dev/*", "held_out/*", "verify.py", "truths.py"]
