"""Preemption mode: the parameter that Vajra's replica schedulers share, the check of this parameter, and preemption
with a fallback.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vajra_py.contract import BatchBuilder, PolicyConfig, PolicyContext, PreemptionMode, RequestView


class PreemptionConfig(PolicyConfig):
    """The parameter for the mode of preemption."""

    preemption: Literal["recompute", "swap"] = Field(
        "recompute",
        description=(
            "Treatment of a preempted request's KV: freed and recomputed, or swapped to host memory and back (freed where the host is full)."
        ),
    )


def preemption_mode(config: PreemptionConfig, context: PolicyContext) -> PreemptionMode:
    """Return the configured mode. Raises `ValueError` for swapping without host memory to swap to."""
    mode = PreemptionMode(config.preemption)
    if mode is PreemptionMode.SWAP and context.limits.host_blocks < 1:
        raise ValueError("preemption: swap needs host memory (replica.memory.host_blocks is 0)")
    return mode


def give_way(batch: BatchBuilder, victim: RequestView, mode: PreemptionMode) -> bool:
    """Preempt the victim in the given mode, or else by recompute; return False if neither is possible."""
    return batch.preempt(victim, mode) is None or batch.preempt(victim) is None
