"""A bound on the load of each replicaset: requests that would exceed it are deferred or refused."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.admission.holding import Holding, HoldingConfig
from vajra_policies.admission.saturation import replicaset_of
from vajra_py.contract import AdmissionDecision, AdmissionSpec, PolicyContext, ReplicasetView, RequestView


class MaxLoadConfig(HoldingConfig):
    """Parameters of `max_load`; a replicaset's bound is the sum over its replicas that are up."""

    max_requests: int | None = Field(
        64, gt=0, description="Maximum number of requests that wait and run, for each replica; null: any number."
    )
    max_tokens: int | None = Field(
        None,
        gt=0,
        description="Maximum number of tokens that are in KV memory or left to prefill, for each replica; null: any number.",
    )


class MaxLoad(Holding):
    """Accepts a request while the load of its replicaset stays within the bound; an empty replicaset takes any request.

    Source: the limit on concurrent requests of serving gateways.
    """

    def __init__(self, config: MaxLoadConfig, context: PolicyContext) -> None:
        super().__init__(config, context.wake)
        self._config = config

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Defer or refuse the request if the load with it exceeds the bound, or a deferred request comes before it."""
        line, replicaset = self._line_of(request), replicaset_of(request, replicasets)
        if line.waits_behind(request) or not self._has_room(request, replicaset):
            return self._closed(line, request, now, f"replicaset {replicaset.name} is full")
        return self._open(line, request)

    def _has_room(self, request: RequestView, replicaset: ReplicasetView) -> bool:
        replicas = replicaset.replicas
        num_up = sum(one.is_up for one in replicas)
        running = sum(one.num_running for one in replicas)
        in_system = running + replicaset.num_queued
        if not in_system:
            return True
        config = self._config
        if config.max_requests is not None and in_system + 1 > config.max_requests * num_up:
            return False
        if config.max_tokens is None:
            return True
        held = sum(one.num_context_tokens for one in replicas)
        pending = sum(one.num_pending_tokens for one in replicas)
        return held + pending + request.num_prompt_tokens <= config.max_tokens * num_up


SPEC = AdmissionSpec(
    name="max_load",
    config=MaxLoadConfig,
    build=MaxLoad,
    summary=(
        "Limits the requests or tokens in a replicaset; when there is room again, the most urgent waiting request is "
        "accepted first."
    ),
    source="Concurrency limit of serving gateways",
    advice=(
        "Use it where a replica serves a limited number of requests well, and further requests should wait by "
        "priority, outside its queue. Not where requests differ widely in size, unless `max_tokens` is set too."
    ),
)
