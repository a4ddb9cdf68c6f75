"""Run the scheduling mechanism on a real model.

Each name of this package is loaded when it is first used; importing the package loads no tensor library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vajra_py.lazy import lazy_names

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
    "AsyncLLM": "async_llm",
    "EngineConfig": "config",
    "LLM": "llm",
    "RequestMetrics": "requests",
    "RequestOutput": "requests",
    "SamplingParams": "compute",
    "StreamPart": "async_llm",
    "TokenLogprobs": "compute",
}


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
