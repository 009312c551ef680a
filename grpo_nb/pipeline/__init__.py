"""Many notebooks, runs and machines: papermill, sweeps, Ray, servers, and what judges them.

`notebooks` reads run files and executes a run's four stages; `trials` reads sweep files, which
`sweep` runs on this machine and `cluster` on Ray; `serve` and `app` are servers, `checklist` and
`doctor` say what is in order.
"""
