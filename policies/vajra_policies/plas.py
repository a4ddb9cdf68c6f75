"""Program-level attained service: calls of the program that has run least so far go first."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.call_times import AttainedServiceConfig, CallTimes, motion_of
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, ReplicaId, RequestView


class PlasConfig(AttainedServiceConfig):
    """Parameters of `plas`."""


class Plas:
    """Key = running time of the program's ended calls when the call arrived (or the queue that this falls into).

    Short programs go before long ones, although nobody knows their lengths: a program sinks as it is served. With `queue_bounds_s` a
    call also sinks by its own running time. A request without a program is a program of its own.

    Source: Autellix (arXiv:2502.13965), Algorithm 1, PLAS for programs of one thread.
    """

    def __init__(self, config: PlasConfig) -> None:
        self._times = CallTimes(config, _attained_s)
        self._motion = motion_of(config)

    @property
    def key_motion(self) -> KeyMotion:
        """Fixed at arrival; with queues it moves with the call's progress, and with time if calls can starve."""
        return self._motion

    def key(self, request: RequestView, now: float) -> float:
        """Attained service in seconds, or the number of the queue."""
        return self._times.key(request, now)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Calls inherit what their programs have attained."""
        for request in requests:
            self._times.of(request)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A call begins to run."""
        self._times.admit(request, now)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A call waits again."""
        self._times.pause(request, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget ended calls; their programs know how long they have run."""
        for request in requests:
            self._times.end(request, now)


def _attained_s(request: RequestView) -> float:
    return 0.0 if request.program is None else request.program.run_s


def _build(config: PlasConfig, context: PolicyContext) -> Plas:
    return Plas(config)


SPEC = PolicySpec(
    name="plas",
    layer=Layer.REQUEST_PRIORITIZER,
    config=PlasConfig,
    build=_build,
    summary="Calls of the program with the least attained service first.",
    source="Autellix (arXiv:2502.13965), PLAS",
)
