"""Admission and scaling: two questions beside the three layers, one about arriving requests, one about the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from vajra_py.contract.requests import RequestView
from vajra_py.contract.views import PoolView, ReplicasetView


@dataclass(frozen=True, slots=True)
class Accept:
    """Let the request in; where a field is set, degraded."""

    max_tokens: int | None = None
    """Most output tokens, if fewer than it asked for."""
    slo_class: str | None = None
    """Another class of service."""
    replicaset: str | None = None
    """Another replicaset than the one that `select` names."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Turn the request away: shed by policy, which is counted apart from what can never run and from full queues."""

    reason: str
    retry_after_s: float | None = None
    """Seconds after which its client may try again."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Decide again later; the request waits outside every queue meanwhile, and may expire."""

    until: float | None = None
    """Seconds on the run's clock; None: when the policy is next woken, or when a request has ended."""
    reason: str = ""
    """Words for tables and reports."""


AdmissionDecision: TypeAlias = Accept | Refuse | Defer
ACCEPT = Accept()


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Lets requests in, or not. One instance serves the whole system; without one everything is accepted.

    It may listen to requests and ask to be woken as the policies of the layers do. Requests that can never run are refused without
    calling it.
    """

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Decide on a request that arrives, or that was deferred. `replicasets` are in the order of the file."""


@runtime_checkable
class Scaler(Protocol):
    """Sets the number of replicas of each pool of a replicaset. Without one, every replica is up from the start."""

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """Replicas, starting or up, that each pool should have, by its name; a pool left out keeps the number asked for last.

        At least `min_replicas` and at most `max_replicas` of the pool. Called at the start, when the scaler is woken
        (`PolicyContext.wake`), and when a replica has come, has gone or is lost.
        """
