"""Continuum's pins: the content of a program stays while a fast tool runs."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.programs.tool_gaps import ToolGapConfig, ToolGaps
from vajra_policies.retention.recency import LeastRecentlyUsed
from vajra_py.contract import PolicyContext, ProgramView, RequestView, RetentionSpec


class ContinuumPinsConfig(ToolGapConfig):
    """Parameters of `continuum_pins`."""


class ContinuumPins(LeastRecentlyUsed):
    """Evicts the least recently used content first, and pins a program's content for `ttl_s` after each call but the
    last, unless the mean time of the tool that runs after the call is long.

    Companion of the prioritizer `continuum`, which serves calls with pinned content first.

    Source: Continuum (arXiv:2511.02230), the threshold rule of its code.
    """

    def __init__(self, config: ContinuumPinsConfig) -> None:
        self._gaps = ToolGaps(config)

    def pin_s(self, request: RequestView, now: float) -> float:
        """Return the seconds for which to pin a call's content. See `ToolGaps.ttl_s`."""
        return self._gaps.ttl_s(request)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the durations of the tools that ended before these calls."""
        self._gaps.arrive(requests, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the start of the tools that follow these calls."""
        self._gaps.depart(requests, now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program."""
        self._gaps.end(program)


def _build(config: ContinuumPinsConfig, context: PolicyContext) -> ContinuumPins:
    return ContinuumPins(config)


SPEC = RetentionSpec(
    name="continuum_pins",
    config=ContinuumPinsConfig,
    build=_build,
    summary="Least recently used first; a program's content is pinned while a tool runs whose mean time is short.",
    source="Continuum (arXiv:2511.02230)",
    follows_release=True,
    advice=(
        "Use it with the prioritizer `continuum` for agents whose tools are fast. Not for programs with minutes "
        "between their turns (`ttl`)."
    ),
)
