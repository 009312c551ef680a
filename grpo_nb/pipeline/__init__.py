"""Execute notebooks, runs and sweeps, on this machine or on a Ray cluster.

`notebooks` reads run files and `--set`, executes a run's four stages with papermill, and trains
without a kernel (`train`); `sweep` executes many runs, on this machine or on Ray. `leaderboard`
compares runs, and `caused` makes a run's placebo and compares the two. `checklist` examines a run,
and its function `doctor` the machine. `elsewhere` writes a run's held-out rows as a task of lm-eval
and of Inspect. Nothing is exported: import these modules.
"""
