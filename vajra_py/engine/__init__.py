"""Run the scheduling mechanism on a real model.

The names below load what they need when they are first used; importing this package loads no tensor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vajra_py.engine.async_llm import AsyncLLM, StreamPart
    from vajra_py.engine.compute import SamplingParams, TokenLogprobs
    from vajra_py.engine.config import EngineConfig
    from vajra_py.engine.llm import LLM
    from vajra_py.engine.requests import RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamPart",
    "TokenLogprobs",
]

_HOMES = {
    "AsyncLLM": "vajra_py.engine.async_llm",
    "EngineConfig": "vajra_py.engine.config",
    "LLM": "vajra_py.engine.llm",
    "RequestMetrics": "vajra_py.engine.requests",
    "RequestOutput": "vajra_py.engine.requests",
    "SamplingParams": "vajra_py.engine.compute",
    "StreamPart": "vajra_py.engine.async_llm",
    "TokenLogprobs": "vajra_py.engine.compute",
}


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is asked for (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
