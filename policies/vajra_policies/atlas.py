"""Adaptive thread-level attained service: calls of the program whose longest chain has run least go first."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.attained_service import AttainedService, AttainedServiceConfig
from vajra_py.contract import Layer, PolicyContext, PolicySpec, ProgramView, RequestView


class AtlasConfig(AttainedServiceConfig):
    """Parameters of `atlas`."""


class Atlas(AttainedService):
    """Key = longest chain of running times in the program when the call arrived (or the queue that this falls into).

    A call that ends sets its program's service to max(service, service at its arrival + its running time). So calls side by side count once,
    by the longest, and the graph need not be known: a program is as far as its critical path, however wide it is.

    Source: Autellix (arXiv:2502.13965), Algorithm 1, ATLAS for programs of several threads.
    """

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config, self._chain_s)
        self._longest_s: dict[ProgramView, float] = {}

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Ended calls lengthen the chains of their programs."""
        for request in requests:
            program = request.program
            if program is not None and program.end_reason is None:
                longest_s = self._longest_s.get(program, 0.0)
                self._longest_s[program] = max(longest_s, self._service_s(request, now))
        super().on_departures(requests, now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget a program that has ended."""
        self._longest_s.pop(program, None)

    def _chain_s(self, request: RequestView) -> float:
        return 0.0 if request.program is None else self._longest_s.get(request.program, 0.0)


def _build(config: AtlasConfig, context: PolicyContext) -> Atlas:
    return Atlas(config)


SPEC = PolicySpec(
    name="atlas",
    layer=Layer.REQUEST_PRIORITIZER,
    config=AtlasConfig,
    build=_build,
    summary="Calls of the program with the shortest longest chain of served calls first.",
    source="Autellix (arXiv:2502.13965), ATLAS",
)
