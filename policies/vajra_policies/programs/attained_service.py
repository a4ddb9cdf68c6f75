"""Order of calls by the service that their programs had attained when the calls arrived: in total (`plas`), or along
the longest chain of calls (`atlas`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ProgramView,
    ReplicaId,
    RequestView,
)


class AttainedServiceConfig(PolicyConfig):
    """Parameters of `plas` and `atlas`."""

    queue_bounds_s: tuple[float, ...] = Field(
        (),
        description=(
            "Service up to which a call belongs to each queue but the last, rising seconds; calls of one queue are served in order of "
            "arrival, and a call that runs beyond its bound moves on. Empty: least service first, exactly."
        ),
    )
    starvation_ratio: float | None = Field(
        None,
        gt=0,
        description=(
            "A call goes first once the call and its program have waited this many times as long as they have run; "
            "null: never. Unless it is null, keys are read again at each step."
        ),
    )

    @model_validator(mode="after")
    def _rising(self) -> AttainedServiceConfig:
        bounds = self.queue_bounds_s
        if any(later <= earlier for earlier, later in zip((0.0, *bounds), bounds, strict=False)):
            raise ValueError(f"queue_bounds_s are not ascending numbers above 0 ({bounds}). Allowed: ascending seconds")
        return self


@dataclass(slots=True)
class _Call:
    inherited_s: float
    run_s: float = 0.0
    admitted_at: float | None = None


class Plas:
    """Key of a call = its program's service at the call's arrival: the total running time of the calls that had ended.

    Short programs go before long ones, although their lengths are unknown: a program's urgency falls as it is served.
    With `queue_bounds_s`, the key is the number of a queue instead, chosen by the sum of that service and the call's
    own running time. A request without a program is its own program.

    Left out: Autellix's router (short calls to the least used replica, long ones to their program's), decisions only
    every few steps, and bulk swaps. The paper states no defaults for queues and ratio.

    Source: Autellix (arXiv:2502.13965), Algorithm 1, PLAS for programs of one thread.
    """

    def __init__(self, config: AttainedServiceConfig) -> None:
        self._bounds = config.queue_bounds_s
        self._ratio = config.starvation_ratio
        self._calls: dict[RequestView, _Call] = {}

    @property
    def key_motion(self) -> KeyMotion:
        """`STATIC`; `PROGRESS` with `queue_bounds_s`, and `ARBITRARY` with `starvation_ratio`."""
        if self._ratio is not None:
            return KeyMotion.ARBITRARY
        return KeyMotion.PROGRESS if self._bounds else KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> float:
        """Return the index of the call's queue. Without queues, return the service in seconds that the call's program
        had attained when the call arrived. A starving call gets -1, which is below all other keys.
        """
        if self._ratio is not None and self._starves(request, now):
            return -1.0
        if not self._bounds:
            return self._call(request).inherited_s
        service_s = self._service_s(request, now)
        return float(sum(service_s > bound for bound in self._bounds))

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Initialise new calls with the attained service of their programs."""
        for request in requests:
            self._call(request)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record the time at which a call begins to run."""
        self._call(request).admitted_at = now

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Add the call's time since its admission to its running time."""
        self._stop(request, now)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Add the call's time since its admission, the transfer included, to its running time."""
        self._stop(request, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget ended calls."""
        for request in requests:
            self._calls.pop(request, None)

    def _call(self, request: RequestView) -> _Call:
        """Return the record of a call; a call that arrived before this policy was in use is recorded now."""
        call = self._calls.get(request)
        if call is None:
            program = request.program
            call = self._calls[request] = _Call(0.0 if program is None else self._attained_s(program))
        return call

    def _stop(self, request: RequestView, now: float) -> None:
        call = self._call(request)
        if call.admitted_at is not None:
            call.run_s += now - call.admitted_at
            call.admitted_at = None

    def _attained_s(self, program: ProgramView) -> float:
        """Return the service in seconds that a program has attained."""
        return program.run_s

    def _service_s(self, request: RequestView, now: float) -> float:
        """Return the seconds of service that the program had attained when the call arrived, plus the call's own
        running time.
        """
        call = self._call(request)
        own_s = call.run_s if call.admitted_at is None else call.run_s + now - call.admitted_at
        return call.inherited_s + own_s

    def _starves(self, request: RequestView, now: float) -> bool:
        program = request.program
        own_run_s = self._service_s(request, now) - self._call(request).inherited_s
        run_s = own_run_s + (0.0 if program is None else program.run_s)
        wait_s = now - request.arrived_at - own_run_s + (0.0 if program is None else program.wait_s)
        return run_s > 0 and self._ratio is not None and wait_s >= self._ratio * run_s


class Atlas(Plas):
    """Key of a call = its program's service at the call's arrival, counted along the longest chain of ended calls.

    With `queue_bounds_s`, the key is a queue's number, as in `Plas`. When a call ends, its program's service becomes
    max(service, service at the call's arrival + the call's running time). Of parallel calls, only the longest thus
    counts: a program's service is the running time of its critical path. The graph of calls need not be known.

    Left out: as in `Plas`.

    Source: Autellix (arXiv:2502.13965), Algorithm 1, ATLAS for programs of several threads.
    """

    def __init__(self, config: AttainedServiceConfig) -> None:
        super().__init__(config)
        self._longest_s: dict[ProgramView, float] = {}

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Update the longest chain of each program with the program's ended calls."""
        for request in requests:
            program = request.program
            if program is not None and program.end_reason is None:
                self._longest_s[program] = max(self._attained_s(program), self._service_s(request, now))
        super().on_departures(requests, now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget a program that has ended."""
        self._longest_s.pop(program, None)

    def _attained_s(self, program: ProgramView) -> float:
        return self._longest_s.get(program, 0.0)


def _build_plas(config: AttainedServiceConfig, context: PolicyContext) -> Plas:
    return Plas(config)


def _build_atlas(config: AttainedServiceConfig, context: PolicyContext) -> Atlas:
    return Atlas(config)


PLAS = PolicySpec(
    name="plas",
    layer=Layer.REQUEST_PRIORITIZER,
    config=AttainedServiceConfig,
    build=_build_plas,
    summary="Calls of the program with the least attained service first.",
    source="Autellix (arXiv:2502.13965), PLAS",
    advice=(
        "Use it for programs whose calls follow one another: programs that have run little go first. Not for programs "
        "with parallel calls (`atlas`)."
    ),
)
ATLAS = PolicySpec(
    name="atlas",
    layer=Layer.REQUEST_PRIORITIZER,
    config=AttainedServiceConfig,
    build=_build_atlas,
    summary="Calls of the program whose longest chain of served calls is the shortest first.",
    source="Autellix (arXiv:2502.13965), ATLAS",
    advice=(
        "Use it for programs with parallel calls: only the longest chain counts. Not for single requests, which it "
        "serves in order of arrival."
    ),
)
