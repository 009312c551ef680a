"""Many notebooks, runs and machines: papermill, sweeps, Ray, and what checks the result.

`notebooks` reads run files and executes a run's four stages; `sweep` does so for many runs on this
machine, `cluster` on Ray; `launch` trains without a notebook; `app` serves the Reward Lab's page;
`checklist` judges a run, and `doctor` this machine.
"""
