"""The reward files are data: pytest collects nothing of them."""

collect_ignore_glob = ["dev/*", "held_out/*", "verify.py", "truths.py"]
