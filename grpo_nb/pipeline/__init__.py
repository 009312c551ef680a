"""Many notebooks, runs and machines: papermill, sweeps, Ray, servers, and what judges them.

`notebooks` executes a run's four stages; `batches` reads run files, `sweep` plans many runs and
`cluster` places them on Ray; `checklist`, `reproduce` and `leaderboard` read what runs left.
"""
