"""Many notebooks, runs and machines: papermill, sweeps, Ray, servers, and what judges them.

`notebooks` executes a run's four stages; `batches` reads run files, `trials` sweep files, which
`sweep` runs on this machine and `cluster` on Ray; `serve` and `app` are servers, `checklist` and
`doctor` say what is in order.
"""
