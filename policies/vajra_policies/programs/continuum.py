"""Continuum's order: calls of programs with pinned content first, then calls by the arrival of their programs."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.programs.tool_gaps import ToolGapConfig, ToolGaps
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, ProgramView, RequestView


class ContinuumConfig(ToolGapConfig):
    """Parameters of `continuum`; the retention policy `continuum_pins` should have the same values."""


class Continuum:
    """Key = (0 if the call came while its program's content was pinned, else 1; arrival of the program's first call).

    After a call that is not the program's last, the program's content is pinned for `ttl_s`, unless the mean time of
    the tool that runs next exceeds `max_mean_gap_s`. A call that arrives before the pin ends goes before all others and
    hits the pinned content. Other calls are served in order of their programs' arrival, so that a program keeps its
    position in the order while its tools run.

    The retention policy `continuum_pins` does the pinning, by the same rule. Left out: prolonging a pin that expires
    while its program's next call waits; and the paper's time to live, which maximises the expected gain over the
    distribution of the tool's durations. The rule above, with a threshold for the mean time, is that of the paper's
    code.

    Source: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live"
    (arXiv:2511.02230); its code for the rule.
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: ContinuumConfig) -> None:
        self._gaps = ToolGaps(config)
        self._pinned_until: dict[ProgramView, float] = {}
        self._came_in_time: dict[RequestView, bool] = {}

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return (0 if the call arrived while its program's content was pinned, else 1; arrival in seconds of its
        program, or of the call itself if it has no program).
        """
        since = request.arrived_at if request.program is None else request.program.arrived_at
        return (0.0 if self._came_in_time.get(request, False) else 1.0, since)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Record which calls arrived within the time to live, and how long the tools before them took."""
        for request in requests:
            program = request.program
            until = None if program is None else self._pinned_until.get(program)
            self._came_in_time[request] = until is not None and now <= until
        self._gaps.arrive(requests, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the times at which the pins of `continuum_pins` end, and the start of the tools that follow these
        calls.
        """
        for request in requests:
            self._came_in_time.pop(request, None)
            ttl_s = self._gaps.ttl_s(request)
            program = request.program
            if ttl_s > 0 and program is not None and program.end_reason is None:
                self._pinned_until[program] = now + ttl_s
        self._gaps.depart(requests, now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program."""
        self._pinned_until.pop(program, None)
        self._gaps.end(program)


def _build(config: ContinuumConfig, context: PolicyContext) -> Continuum:
    return Continuum(config)


SPEC = PolicySpec(
    name="continuum",
    layer=Layer.REQUEST_PRIORITIZER,
    config=ContinuumConfig,
    build=_build,
    summary="Calls whose program's content is still pinned first, then programs by their first arrival.",
    source="Continuum (arXiv:2511.02230)",
    advice=(
        "Use it with the retention policy `continuum_pins`, which pins by the same rule, for agents whose tools are "
        "fast. Not for programs with minutes between their turns."
    ),
)
