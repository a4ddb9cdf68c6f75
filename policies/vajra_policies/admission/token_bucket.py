"""Token buckets: each tenant, or class of service, has a rate and a burst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from vajra_py.contract import (
    ACCEPT,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    PolicyConfig,
    PolicyContext,
    Refuse,
    ReplicasetView,
    RequestView,
)
from vajra_py.contract.latency import LAST_S

_RESOLUTION_S = 1e-9
"""Longest computed wait in seconds that counts as no wait: it is a rounding error of the clock or of the refill."""


class BucketConfig(PolicyConfig):
    """Size and refill of one bucket, in prompt tokens or requests, depending on `cost` of `token_bucket`."""

    capacity: float = Field(10_000.0, gt=0, description="Capacity of the bucket.")
    refill_per_s: float = Field(1_000.0, gt=0, description="Refill of the bucket per second.")


class TokenBucketConfig(BucketConfig):
    """Parameters of `token_bucket`."""

    cost: Literal["prompt_tokens", "requests"] = Field("prompt_tokens", description="Unit that the bucket holds.")
    by: Literal["tenant", "slo_class", "all"] = Field("tenant", description="Group of requests that shares a bucket.")
    when_empty: Literal["defer", "refuse"] = Field(
        "refuse",
        description="Treatment of a request that the bucket does not cover: it waits for the refill, or is refused.",
    )
    buckets: dict[str, BucketConfig] = Field(
        default_factory=dict, description="Buckets by tenant or class, where size or refill differ."
    )


@dataclass(slots=True)
class _Bucket:
    """State of one bucket. Its level may be negative, since deferred requests are charged in advance."""

    capacity: float
    refill_per_s: float
    level: float
    filled_at: float = 0.0
    due: dict[str, float] = field(default_factory=dict)
    """Time at which each deferred request is accepted, by request id."""

    def fill(self, now: float) -> None:
        """Add the refill since the last call, up to the capacity."""
        self.level = min(self.capacity, self.level + (now - self.filled_at) * self.refill_per_s)
        self.filled_at = now


class TokenBucket:
    """Charges each request's cost to the bucket of its tenant or SLO class (`by`), which starts full.

    If the bucket holds less than a request's cost, the request is deferred until the bucket will hold enough, or it is
    refused (`when_empty`); a refusal states the seconds until the bucket would hold enough. A request is always refused
    if it costs more than a full bucket, or if the wait would last beyond the end of the run's clock. The cost of a
    deferred request is charged at once, so that later requests wait behind it. The cost is returned if the request
    leaves before it is accepted.

    Source: token bucket as in BLIS (`token-bucket`: capacity 10000, refill 1000/s, cost in prompt tokens, refusing).
    """

    def __init__(self, config: TokenBucketConfig) -> None:
        self._config = config
        self._buckets: dict[str, _Bucket] = {}

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Accept a request that its bucket covers; refuse or defer others."""
        bucket, cost = self._bucket_of(request, now), self._cost_of(request)
        due = bucket.due.get(request.request_id)
        if due is not None:
            if now < due:
                return Defer(due, self._used_up(request))
            del bucket.due[request.request_id]
            return ACCEPT
        if cost > bucket.capacity:
            return Refuse(
                f"{self._owner(request)} may use {bucket.capacity:g} at once, and this request needs {cost:g}"
            )
        bucket.fill(now)
        wait_s = (cost - bucket.level) / bucket.refill_per_s
        if now + wait_s <= now + _RESOLUTION_S:
            bucket.level -= cost
            return ACCEPT
        if self._config.when_empty == "refuse" or now + wait_s > LAST_S:
            return Refuse(self._used_up(request), wait_s)
        bucket.level -= cost
        bucket.due[request.request_id] = now + wait_s
        return Defer(now + wait_s, self._used_up(request))

    def _used_up(self, request: RequestView) -> str:
        return f"{self._owner(request)} has used up {self._unit()}"

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Refund to each bucket the costs of its deferred requests that have left."""
        for request in requests:
            bucket = self._bucket_of(request, now)
            if bucket.due.pop(request.request_id, None) is not None:
                bucket.fill(now)
                bucket.level += self._cost_of(request)

    def _bucket_of(self, request: RequestView, now: float) -> _Bucket:
        name = self._name_of(request)
        bucket = self._buckets.get(name)
        if bucket is None:
            sizes = self._config.buckets.get(name, self._config)
            bucket = self._buckets[name] = _Bucket(sizes.capacity, sizes.refill_per_s, sizes.capacity, now)
        return bucket

    def _name_of(self, request: RequestView) -> str:
        by = self._config.by
        return request.tenant if by == "tenant" else request.slo_class if by == "slo_class" else ""

    def _cost_of(self, request: RequestView) -> float:
        return float(request.num_prompt_tokens) if self._config.cost == "prompt_tokens" else 1.0

    def _owner(self, request: RequestView) -> str:
        by = self._config.by
        noun = {"tenant": "tenant", "slo_class": "class", "all": "everybody"}[by]
        return noun if by == "all" else f"{noun} {self._name_of(request)!r}"

    def _unit(self) -> str:
        return "its prompt tokens" if self._config.cost == "prompt_tokens" else "its requests"


def _build(config: TokenBucketConfig, context: PolicyContext) -> TokenBucket:
    return TokenBucket(config)


SPEC = AdmissionSpec(
    name="token_bucket",
    config=TokenBucketConfig,
    build=_build,
    summary="Limits the rate of prompt tokens or requests of each tenant or SLO class; excess is refused or deferred.",
    source="Token bucket, defaults of BLIS",
    advice=(
        "Use it where each tenant has bought a rate of tokens or requests. Not to protect replicas from overload: it "
        "does not read their load (`max_load`)."
    ),
)
