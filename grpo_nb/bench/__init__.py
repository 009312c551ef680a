"""The reward bench: tables, linter, probes, and the verdict that stage 03 asks for."""

from grpo_nb.bench.attacks import Attack, attacks
from grpo_nb.bench.cases import changed_cases, read_cases, save_case
from grpo_nb.bench.gate import (
    Verdict,
    adopt,
    cases_of,
    check,
    fingerprint,
    judge,
    save,
    write_weights,
)
from grpo_nb.bench.linter import Finding, lint
from grpo_nb.bench.probes import Probes, gold_report, probe
from grpo_nb.bench.table import Bench, explain, signal_table

__all__ = [
    "Attack",
    "Bench",
    "Finding",
    "Probes",
    "Verdict",
    "adopt",
    "attacks",
    "cases_of",
    "changed_cases",
    "check",
    "explain",
    "fingerprint",
    "gold_report",
    "judge",
    "lint",
    "probe",
    "read_cases",
    "save",
    "save_case",
    "signal_table",
    "write_weights",
]
