# ruff: noqa: F401 (what is imported here is what the room hands out)
"""The reward bench: tables, linter, probes, and the verdict that stage 03 asks for."""

from grpo_nb.reward_lab.attacks import Attack, attacks
from grpo_nb.reward_lab.cases import changed_cases, read_cases, save_case
from grpo_nb.reward_lab.gate import (
    Verdict,
    cases_of,
    check,
    fingerprint,
    judge,
    save,
    write_weights,
)
from grpo_nb.reward_lab.linter import Finding, lint
from grpo_nb.reward_lab.own import adopt
from grpo_nb.reward_lab.probes import Probes, gold_report, probe
from grpo_nb.reward_lab.table import Bench, explain, signal_table
