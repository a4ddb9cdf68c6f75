"""Kinds of workload, each in a module of its own: its settings, and how to read or draw it. A file imports the one that it names."""

from __future__ import annotations

import importlib

from vajra_py.workload.options import WorkloadOptions

__all__ = ["kind_of_workload"]

_KINDS = {
    "agentic": ("agentic", "AgenticConfig"),
    "azure": ("azure", "AzureConfig"),
    "burstgpt": ("burstgpt", "BurstGptConfig"),
    "csv": ("csv_file", "CsvConfig"),
    "jsonl": ("jsonl", "JsonlConfig"),
    "lengths": ("lengths", "LengthsConfig"),
    "mooncake": ("mooncake", "MooncakeConfig"),
    "profile": ("profile", "ProfileConfig"),
    "program_file": ("program_file", "ProgramFileConfig"),
    "programs": ("programs", "ProgramsConfig"),
    "sessions": ("sessions", "SessionsConfig"),
    "synthetic": ("synthetic", "SyntheticConfig"),
}
"""Module and class of each `type`, except `merge`, which may hold all of them."""


def kind_of_workload(type_name: object) -> type[WorkloadOptions] | None:
    """Return the class of the workloads of this `type`; None if there is none here."""
    if not isinstance(type_name, str) or type_name not in _KINDS:
        return None
    module, name = _KINDS[type_name]
    kind: type[WorkloadOptions] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return kind
