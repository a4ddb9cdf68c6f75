"""Adaptive thread-level attained service: calls of the program whose longest chain has run least go first."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.call_times import AttainedServiceConfig, CallTimes, motion_of
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, ProgramView, ReplicaId, RequestView


class AtlasConfig(AttainedServiceConfig):
    """Parameters of `atlas`."""


class Atlas:
    """Key = longest chain of running times in the program when the call arrived (or the queue that this falls into).

    A call that ends sets its program's service to max(service, service at its arrival + its running time). So calls side by side count once,
    by the longest, and the graph need not be known: a program is as far as its critical path, however wide it is.

    Source: Autellix (arXiv:2502.13965), Algorithm 1, ATLAS for programs of several threads.
    """

    def __init__(self, config: AtlasConfig) -> None:
        self._longest_s: dict[ProgramView, float] = {}
        self._times = CallTimes(config, self._inherited_s)
        self._motion = motion_of(config)

    @property
    def key_motion(self) -> KeyMotion:
        """Fixed at arrival; with queues it moves with the call's progress, and with time if calls can starve."""
        return self._motion

    def key(self, request: RequestView, now: float) -> float:
        """Attained service in seconds, or the number of the queue."""
        return self._times.key(request, now)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Calls inherit their programs' longest chains."""
        for request in requests:
            self._times.of(request)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A call begins to run."""
        self._times.admit(request, now)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A call waits again."""
        self._times.pause(request, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Ended calls lengthen the chains of their programs."""
        for request in requests:
            service_s = self._times.end(request, now)
            program = request.program
            if program is not None and program.end_reason is None:
                self._longest_s[program] = max(self._longest_s.get(program, 0.0), service_s)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget a program that has ended."""
        self._longest_s.pop(program, None)

    def _inherited_s(self, request: RequestView) -> float:
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
