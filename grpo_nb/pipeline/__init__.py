"""Execution of notebooks, runs and sweeps, on this machine or on a Ray cluster.

`notebooks` reads run files and executes a run's four stages with papermill; `sweep` does so for
many runs on this machine, and `cluster` on Ray. `stages` has what stages 01 to 03 do, a function
each; `launch` trains without a notebook, and `app` serves the Reward Lab. `checklist` examines a
run, and `doctor` the machine.
"""
