"""Protocols of admission policies, which decide on arriving requests, and of scalers, which set numbers of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from vajra_py.contract.requests import RequestView
from vajra_py.contract.views import PoolView, ReplicasetView


@dataclass(frozen=True, slots=True)
class Accept:
    """Decision to accept the request; each field that is set changes the request."""

    max_tokens: int | None = None
    """New limit on output tokens, used if it is below the request's own limit; None keeps the request's limit."""
    slo_class: str | None = None
    """New SLO class; None keeps the request's class."""
    replicaset: str | None = None
    """Replicaset to serve the request; None keeps the one chosen by `select` in YAML."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decision to refuse the request; results count it apart from refusals for other reasons, such as full queues."""

    reason: str
    retry_after_s: float | None = None
    """Seconds after which the client may retry; None: unknown."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Decision to decide again later; the request waits outside every queue meanwhile, and may expire."""

    until: float | None = None
    """Time of the next decision, seconds on the run's clock; None: the next decision is made when the policy is woken
    or any request ends.
    """
    reason: str = ""
    """Reason shown in tables and reports."""
    holds_rest: bool = False
    """True if the deferred requests behind this one wait until this one is no longer deferred.

    The requests behind this one are those of the same replicaset that follow by priority, then by submission. When the
    policy is woken or a request ends, the policy is called for this request. It is then called for the requests behind
    this one only if it no longer defers this one. No effect if `until` is set.
    """


AdmissionDecision: TypeAlias = Accept | Refuse | Defer
ACCEPT = Accept()


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Accepts, refuses or defers requests.

    One instance serves the whole system; without an admission policy, all requests are accepted. An admission policy
    may listen to requests and set wake-ups, like policies of the layers. Requests that can never run are refused
    without a call.
    """

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Return the decision on an arriving or deferred request; `replicasets` are in the order of the experiment
        file.
        """


@runtime_checkable
class Scaler(Protocol):
    """Sets the number of replicas of each pool of a replicaset.

    Without a scaler, all replicas are up from the start.
    """

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """Return the target number of replicas (starting or up) by pool name; a pool left out keeps its last target.

        A target is between `min_replicas` and `max_replicas` of the pool. Called at the start, when the scaler is woken
        (`PolicyContext.wake`), and after a replica comes up, goes down, is lost or is restored.
        """
