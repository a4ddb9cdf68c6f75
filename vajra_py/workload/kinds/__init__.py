"""Kinds of workload, each a module with its settings and its source; a run imports only the kind that it uses."""

from __future__ import annotations

import importlib

from vajra_py.workload.options import WorkloadOptions

__all__ = ["kind_of_workload"]

_KINDS = {
    "agentic": "AgenticConfig",
    "azure": "AzureConfig",
    "burstgpt": "BurstGptConfig",
    "csv": "CsvConfig",
    "jsonl": "JsonlConfig",
    "lengths": "LengthsConfig",
    "mooncake": "MooncakeConfig",
    "profile": "ProfileConfig",
    "program_file": "ProgramFileConfig",
    "programs": "ProgramsConfig",
    "sessions": "SessionsConfig",
    "synthetic": "SyntheticConfig",
}
"""Name of the class for each `type`. The class is defined in the module named like the type; the class of `merge` is in
`vajra_py.workload.config`.
"""


def kind_of_workload(type_name: object) -> type[WorkloadOptions] | None:
    """Return the class of the workloads of this `type`; None for `merge` and for unknown types."""
    if not isinstance(type_name, str) or type_name not in _KINDS:
        return None
    kind: type[WorkloadOptions] = getattr(importlib.import_module(f"{__name__}.{type_name}"), _KINDS[type_name])
    return kind
