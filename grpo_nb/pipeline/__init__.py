"""Many notebooks, runs and machines: papermill, sweeps, Ray, servers, and what judges them.

`notebooks` reads run files and executes a run's four stages; `sweep` does so for many runs on this
machine, `cluster` on Ray; `launch` trains without a notebook; `serve` and `app` are servers,
`checklist` and `doctor` say what is in order.
"""
