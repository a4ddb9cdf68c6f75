"""Session affinity, as a scorer and as a filter: requests of a session go to the replica of its last request.

Source: llm-d-router, `scheduling/scorer/sessionaffinity` and `scheduling/filter/sessionaffinity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Floats
from vajra_py.contract import (
    PolicyConfig,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class SessionAffinityConfig(PolicyConfig):
    """Parameters of `session-affinity-scorer` and `session-affinity-filter`."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = Field(
        "encoded_endpoint_header",
        description=(
            "`encoded_endpoint_header`: the client stores its session's replica for good. `session_id`: the router "
            "stores the session's replica until the session has been unused for `eviction_ttl_seconds`."
        ),
    )
    profile_name: str = Field("", description="Profile whose replica is stored; empty: the profile for decodes.")
    eviction_ttl_seconds: float = Field(
        300.0, gt=0, description="Seconds after which an unused session is forgotten, with `session_id`."
    )


class _Sessions:
    """Bindings of sessions to replicas."""

    def __init__(self, config: SessionAffinityConfig) -> None:
        self._config = config
        self._bound: dict[str, tuple[ReplicaId, float]] = {}
        """(replica, time) of the last request of each session, the longest unused session first."""

    def replica_of(self, request: RequestView, now: float) -> ReplicaId | None:
        """Return the replica to which the request's session is bound; None without a binding."""
        bound = self._bound.get(request.session_id)
        return None if bound is None or self._is_over(bound[1], now) else bound[0]

    def on_placement(self, request: RequestView, placements: Mapping[str, ReplicaLoadView], now: float) -> None:
        """Bind later requests of the session to the replica of this request."""
        name = self._config.profile_name
        chosen = placements.get(name) if name else placements.get("decode", placements.get("default"))
        if request.session_id and chosen is not None:
            self._bound.pop(request.session_id, None)
            self._bound[request.session_id] = chosen.replica_id, now
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        over = []
        for session, (_, used_at) in self._bound.items():
            if not self._is_over(used_at, now):
                break
            over.append(session)
        for session in over:
            del self._bound[session]

    def _is_over(self, used_at: float, now: float) -> bool:
        return self._config.strategy == "session_id" and now - used_at > self._config.eviction_ttl_seconds


class SessionAffinityScorer(_Sessions):
    """Scores the session's replica 1, all others 0."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return scores; all are 0 if the request has no session, or if its session is not bound to a replica now."""
        bound = self.replica_of(request, now)
        if bound is None:
            return np.zeros(len(replicas))
        score: Floats = (figures.ids(replicas) == bound).astype(np.float64)
        return score


class SessionAffinityFilter(_Sessions):
    """Keeps only the session's replica if it is among the candidates."""

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the session's replica.

        Keeps all replicas if the request has no session, if its session is not bound to a replica now, or if the
        session's replica is not a candidate.
        """
        bound = self.replica_of(request, now)
        return [one for one in replicas if one.replica_id == bound] or replicas


def _scorer(config: SessionAffinityConfig, context: RoutingContext) -> SessionAffinityScorer:
    return SessionAffinityScorer(config)


def _filter(config: SessionAffinityConfig, context: RoutingContext) -> SessionAffinityFilter:
    return SessionAffinityFilter(config)


SPECS = (
    RoutingPartSpec(
        name="session-affinity-scorer",
        kind=RoutingPartKind.SCORER,
        config=SessionAffinityConfig,
        build=_scorer,
        summary="1 for the replica that took the session's last request.",
        source="llm-d session-affinity-scorer",
    ),
    RoutingPartSpec(
        name="session-affinity-filter",
        kind=RoutingPartKind.FILTER,
        config=SessionAffinityConfig,
        build=_filter,
        summary="Only the replica that took the session's last request, if it is a candidate.",
        source="llm-d session-affinity-filter",
    ),
)
