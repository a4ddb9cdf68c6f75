"""Use this project's policies with vLLM: in vLLM, through a scheduler class, or in experiments whose steps vLLM
computes.

vLLM uses the scheduler if started with `vllm serve MODEL --scheduler-cls vajra_py.vllm.Scheduler`. Importing this
package imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vajra_py.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    if name == "Scheduler":
        from vajra_py.vllm.scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
