"""Execute notebooks, runs and sweeps, on this machine or on a Ray cluster.

`notebooks` reads run files and executes a run's four stages with papermill; `sweep` does so for
many runs, on this machine or on Ray. `stages` has one function for each step of stages 01 to 03,
and `launch` trains without a notebook. `leaderboard` compares runs, and `caused` a run with its
placebo; `checklist` examines a run, and `doctor` the machine.
"""
