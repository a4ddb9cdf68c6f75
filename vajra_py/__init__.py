"""Vajra: scheduling policies for LLM inference, written once, simulated and run unchanged.

Importing this package is cheap: it loads nothing beyond the standard library, and the public packages are imported when first used
(`vajra_py.workload` after a bare `import vajra_py` works, and costs then what it costs).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_LAZY_MODULES = frozenset(
    {
        "api",
        "cluster",
        "config",
        "contract",
        "engine",
        "errors",
        "experiment",
        "latency",
        "metrics",
        "plugins",
        "runtime",
        "serve",
        "sim",
        "testing",
        "workload",
    }
)

_LAZY_NAMES = {
    "LLM": "engine",
    "AsyncLLM": "engine",
    "SamplingParams": "engine",
}
"""What may be asked of this package itself, by the public package that has it."""


def __getattr__(name: str) -> Any:
    """Import a public package, or one of its names, the first time it is asked for (PEP 562)."""
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    if name in _LAZY_MODULES and _exists(name):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What tab completion offers: the loaded names and the packages that would load on use."""
    return sorted(set(globals()) | set(_LAZY_NAMES) | {name for name in _LAZY_MODULES if _exists(name)})


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{name}") is not None
