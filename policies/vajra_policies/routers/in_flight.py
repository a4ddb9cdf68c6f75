"""Producer of in-flight load: requests that this router has sent and that have not ended.

Source: llm-d-router, `requestcontrol/dataproducer/inflightload`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Integers
from vajra_policies.routers.prefix_matches import OfPrefixProducer, matches_of
from vajra_py.contract import (
    InFlightLoads,
    PolicyContext,
    PrefixMatches,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

IN_FLIGHT = "inflight-load-producer"
PREFILL = "prefill"
"""Name of the prefill profile. If a request has shares of other profiles too, its share of this profile is counted only
until the first token.
"""


class InFlightConfig(OfPrefixProducer):
    """Parameters of `inflight-load-producer`."""

    add_estimated_output_tokens: bool = Field(
        False, description="Count tokens to the end of the request, with an estimate of its output."
    )
    output_ratio: float = Field(1.5, ge=0, description="Estimated output tokens for each prompt token.")
    max_estimated_output_tokens: int | None = Field(None, ge=0, description="Maximum of the estimated output tokens.")


@dataclass(slots=True)
class _Share:
    """Share of a request that is counted at one replica."""

    replica_id: ReplicaId
    prompt_tokens: int
    output_tokens: int
    is_computing: bool = True
    """False once the first token has been generated."""


@dataclass(slots=True)
class _Sent:
    """Shares of a request in flight, by profile."""

    shares: dict[str, _Share] = field(default_factory=dict)


class InFlightLoad:
    """Counts requests until they end, and their uncached prompt tokens until the first output token.

    First tokens are detected when figures are read, by checking the admitted requests that had no token, so no step
    events are needed.
    """

    def __init__(self, config: InFlightConfig, context: PolicyContext, matches: PrefixMatches) -> None:
        self._config = config
        self._matches = matches
        self._requests: Integers = np.zeros(context.num_replicas, dtype=np.int64)
        self._tokens: Integers = np.zeros(context.num_replicas, dtype=np.int64)
        self._sent: dict[RequestView, _Sent] = {}
        self._admitted: dict[RequestView, None] = {}
        """Admitted requests whose first token has not been detected yet."""

    def num_requests(self, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of requests in flight at each replica."""
        self._note_first_tokens()
        return self._requests[figures.ids(replicas)]  # type: ignore[return-value]  # an array is a sequence of numbers

    def num_tokens(self, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of tokens in flight at each replica: the uncached prompt tokens of requests without a first
        token, plus the estimated outputs of all requests if these are counted.
        """
        self._note_first_tokens()
        return self._tokens[figures.ids(replicas)]  # type: ignore[return-value]

    def request_tokens(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return how many tokens the request would add at each replica: prompt tokens not cached there, plus its
        estimated output if that is counted.
        """
        return self._uncached(request, replicas) + self._output(request)  # type: ignore[return-value]

    def on_placement(self, request: RequestView, placements: Mapping[str, ReplicaLoadView], now: float) -> None:
        """Count the request at the replica of each profile."""
        sent = self._sent.setdefault(request, _Sent())
        for profile, replica in placements.items():
            self._take_back(sent.shares.pop(profile, None))
            prompt = int(self._uncached(request, [replica])[0])
            share = sent.shares[profile] = _Share(replica.replica_id, prompt, self._output(request))
            share.is_computing = not request.num_output_tokens
            self._requests[share.replica_id] += 1
            self._tokens[share.replica_id] += share.output_tokens + share.prompt_tokens * share.is_computing

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record that the request may produce its first token from now on."""
        if request in self._sent:
            self._admitted[request] = None

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Stop counting ended requests."""
        for request in requests:
            self._admitted.pop(request, None)
            sent = self._sent.pop(request, None)
            for share in () if sent is None else sent.shares.values():
                self._take_back(share)

    def _note_first_tokens(self) -> None:
        come = [request for request in self._admitted if request.num_output_tokens]
        for request in come:
            del self._admitted[request]
            sent = self._sent[request]
            self._take_back(sent.shares.pop(PREFILL, None) if len(sent.shares) > 1 else None)
            for share in sent.shares.values():
                self._tokens[share.replica_id] -= share.prompt_tokens * share.is_computing
                share.is_computing = False

    def _take_back(self, share: _Share | None) -> None:
        if share is not None:
            self._requests[share.replica_id] -= 1
            self._tokens[share.replica_id] -= share.output_tokens + share.prompt_tokens * share.is_computing

    def _uncached(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Integers:
        matched = np.asarray(self._matches.matched_blocks(request, replicas), dtype=np.int64)
        return np.maximum(request.num_prompt_tokens - matched * self._matches.block_size, 0)

    def _output(self, request: RequestView) -> int:
        if not self._config.add_estimated_output_tokens:
            return 0
        estimate = min(int(request.num_prompt_tokens * self._config.output_ratio + 0.5), request.max_tokens)
        most = self._config.max_estimated_output_tokens
        return estimate if most is None else min(estimate, most)


def loads_of(context: RoutingContext, name: str) -> InFlightLoads:
    """Return the router's producer of this name. Raises `ValueError` if it does not count in-flight load."""
    found = context.producer(name)
    if not isinstance(found, InFlightLoads):
        raise ValueError(f"producer {name!r} does not count requests in flight; {IN_FLIGHT} does")
    return found


def _build(config: InFlightConfig, context: RoutingContext) -> InFlightLoad:
    return InFlightLoad(config, context.policy, matches_of(context, config.prefix_match_info_producer_name))


SPECS = (
    RoutingPartSpec(
        name=IN_FLIGHT,
        kind=RoutingPartKind.PRODUCER,
        config=InFlightConfig,
        build=_build,
        summary="Requests and uncached prompt tokens that this router has in flight at each replica.",
        source="llm-d inflight-load-producer",
    ),
)
