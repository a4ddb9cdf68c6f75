"""Vajra: scheduling policies for LLM inference, written once, simulated and run unchanged.

`import vajra_py as vajra` gives access to experiments (`load`, `run`, `sweep`, `capacity`, `compare`, `open_runs`,
`report`, `figures`, `plots`), generation (`LLM`, `AsyncLLM`, `SamplingParams`) and the names of the contract for
authors of policies. Everything is imported on first use: importing this package loads nothing beyond the standard
library. `__init__.pyi` lists the names for type checkers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "engine",
    "CapacityAnswer": "api",
    "Comparison": "api",
    "ExperimentConfig": "api",
    "LLM": "engine",
    "RunData": "api",
    "SamplingParams": "engine",
    "SweepResult": "api",
    "capacity": "api",
    "compare": "api",
    "figures": "api",
    "load": "api",
    "load_workload": "api",
    "open_runs": "api",
    "plots": "api",
    "report": "api",
    "run": "api",
    "sweep": "api",
    "validate_measured": "api",
}
"""Module that each public name is imported from; the names in `contract.__all__` are offered as well."""


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage when it is first used (PEP 562)."""
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if not name.startswith("_"):
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        contract = importlib.import_module(f"{__name__}.contract")
        if name in contract.__all__:
            return getattr(contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that tab completion offers: the public interface."""
    contract = importlib.import_module(f"{__name__}.contract")
    return sorted({*_HOME, *contract.__all__, "__version__"})
