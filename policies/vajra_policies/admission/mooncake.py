"""Mooncake's early rejection: requests that would miss their SLOs are refused on arrival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from vajra_policies.admission.saturation import replicaset_of
from vajra_py.contract import (
    ACCEPT,
    AdmissionDecision,
    AdmissionSpec,
    BatchFeatures,
    PolicyConfig,
    PolicyContext,
    PoolRole,
    Refuse,
    ReplicaId,
    ReplicaLoadView,
    ReplicasetView,
    RequestView,
)

_PREFILLS = (PoolRole.PREFILL.value, PoolRole.MIXED.value)
_DECODES = (PoolRole.DECODE.value, PoolRole.MIXED.value)


class MooncakeConfig(PolicyConfig):
    """Parameters of `mooncake`."""

    rule: Literal["request", "load", "predicted_load"] = Field(
        "request",
        description=(
            "request: this request's predicted TTFT and TBT (Algorithm 1); load: how full prefill and decode replicas are now; "
            "predicted_load: how full the decode replicas will be when its prompt is computed."
        ),
    )
    ttft_slo_s: float | None = Field(
        None, gt=0, description="TTFT SLO of requests that state none, seconds; null: none."
    )
    tbt_slo_s: float | None = Field(None, gt=0, description="TBT SLO of requests that state none, seconds; null: none.")
    decode_s: float = Field(20.0, gt=0, description="predicted_load: assumed decode time of every request, seconds.")


class Mooncake:
    """Refuses a request if its predicted TTFT or the predicted TBT exceeds its SLO.

    The predicted TTFT is the smallest T_queue + T_prefill of the replicas that compute prompts: T_queue is the total
    prefill time of the prompts queued there, and T_prefill is the time to compute the tokens of this prompt that are
    not cached there. The predicted TBT is the duration of a decode step of the least loaded replica that decodes, with
    this request added. Left out: copying the prefix from another replica, which Mooncake also considers.

    The rules `load` and `predicted_load` are the early rejections of Mooncake's arXiv version. `load` predicts TTFT and
    TBT from the present load, without this request. Since an accepted request reaches a decode replica only after its
    prefill, load oscillates under this rule. `predicted_load` predicts the decode replicas' load at the end of this
    request's prefill: it adds the requests that will have completed their prefill by then, and subtracts those that
    will have decoded for `decode_s` by then.

    Predictions are recorded among the run's emitted figures.

    Source: Mooncake (FAST'25), section 4.1 and Algorithm 1; arXiv 2407.00079, section on early rejection.
    """

    def __init__(self, config: MooncakeConfig, context: PolicyContext) -> None:
        self._config = config
        self._prefill_time = context.prefill_time
        self._latency = context.latency
        self._emit = context.emit
        self._prompts: dict[RequestView, float] = {}
        """Predicted end of prefill of each accepted request, seconds on the run's clock."""
        self._running_on: dict[RequestView, ReplicaId] = {}
        self._decided: tuple[RequestView, float] | None = None
        """(request of the last decision, predicted end of its prefill)."""

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Accept the request if its predicted latencies meet its SLOs."""
        replicas = [one for one in replicaset_of(request, replicasets).replicas if one.is_up]
        ttft_s = self._predicted_ttft_s(request, [one for one in replicas if one.role in _PREFILLS])
        decoding = [one for one in replicas if one.role in _DECODES]
        tbt_s = self._predicted_tbt_s(request, decoding, now + ttft_s)
        self._decided = (request, now + ttft_s)
        self._emit("predicted_ttft_s", ttft_s, now, request)
        self._emit("predicted_tbt_s", tbt_s, now, request)
        return self._judged(request, ttft_s, tbt_s)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Record accepted requests with the predicted end of their prefill."""
        for request in requests:
            if self._decided is not None and self._decided[0] is request:
                self._prompts[request] = self._decided[1]
        self._decided = None

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record the replica on which the request runs."""
        if request in self._prompts:
            self._running_on[request] = replica_id

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget requests that have left."""
        for request in requests:
            self._prompts.pop(request, None)
            self._running_on.pop(request, None)
        self._decided = None

    def _judged(self, request: RequestView, ttft_s: float, tbt_s: float) -> AdmissionDecision:
        for noun, predicted_s, stated_s, default_s in (
            ("TTFT", ttft_s, request.ttft_slo_s, self._config.ttft_slo_s),
            ("TBT", tbt_s, request.tbt_slo_s, self._config.tbt_slo_s),
        ):
            target_s = default_s if stated_s is None else stated_s
            if target_s is not None and predicted_s > target_s:
                return Refuse(f"its predicted {noun} exceeds its SLO")
        return ACCEPT

    # Prompts

    def _predicted_ttft_s(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> float:
        """Return the predicted seconds until the request's first token; 0 if there are no replicas. With the rule
        `load`, the request's own prefill time is not counted.
        """
        if not replicas:
            return 0.0
        queued_s = self._queued_prefill_s(request.replicaset)
        num_pending = sum(one.num_pending_tokens for one in replicas)
        return min(self._wait_s(one, queued_s, num_pending) + self._own_s(request, one) for one in replicas)

    def _queued_prefill_s(self, replicaset: str) -> float:
        """Return the sum of the predicted remaining prefill times of the replicaset's accepted requests without a first
        token.
        """
        remaining_s = self._prefill_time.remaining_s
        waiting = (one for one in self._prompts if one.replicaset == replicaset and not one.num_output_tokens)
        return sum(remaining_s(one.num_prompt_tokens, one.num_computed_tokens) for one in waiting)

    def _wait_s(self, replica: ReplicaLoadView, queued_s: float, num_pending: int) -> float:
        """Return a replica's share of `queued_s`, in proportion to the replica's tokens left to prefill."""
        return queued_s * replica.num_pending_tokens / num_pending if num_pending else 0.0

    def _own_s(self, request: RequestView, replica: ReplicaLoadView) -> float:
        if self._config.rule == "load":
            return 0.0
        num_cached = min(replica.prefix_hit_tokens(request), request.num_prompt_tokens - 1)
        return self._prefill_time.remaining_s(request.num_prompt_tokens, num_cached)

    # Decodes

    def _predicted_tbt_s(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], prompt_done_at: float
    ) -> float:
        """Return the predicted seconds of a decode step of the least loaded replica; 0 if there are no replicas. With
        the rule `predicted_load`, the step is that of a replica with the mean load predicted for the time
        `prompt_done_at`.
        """
        if not replicas:
            return 0.0
        if self._config.rule == "predicted_load":
            there = list(self._decoding_at(prompt_done_at, request.replicaset))
            num_replicas = len(replicas)
            num_decodes = -(-len(there) // num_replicas)
            context = sum(one.num_prompt_tokens + one.num_output_tokens for one in there) // num_replicas
            return self._step_s(num_decodes + 1, context + request.num_prompt_tokens)
        own = 1 if self._config.rule == "request" else 0
        return min(
            self._step_s(
                max(1, one.num_running - self._num_prefills(one, request.replicaset) + own),
                one.num_context_tokens + own * request.num_prompt_tokens,
            )
            for one in replicas
        )

    def _decoding_at(self, at: float, replicaset: str) -> Iterable[RequestView]:
        """Yield the replicaset's accepted requests that are predicted to decode at the time `at`."""
        decode_s = self._config.decode_s
        return (
            one
            for one, begun_at in self._prompts.items()
            if one.replicaset == replicaset and begun_at <= at < begun_at + decode_s
        )

    def _num_prefills(self, replica: ReplicaLoadView, replicaset: str) -> int:
        """Return the number of requests of the replicaset that run on the replica and have no output token yet."""
        if not replica.num_pending_tokens:
            return 0
        on = replica.replica_id
        return sum(
            where == on and one.replicaset == replicaset and one.is_resident and not one.num_output_tokens
            for one, where in self._running_on.items()
        )

    def _step_s(self, num_decodes: int, context_tokens: int) -> float:
        return self._latency.batch_time_s(BatchFeatures(num_decodes=num_decodes, decode_context_tokens=context_tokens))


SPEC = AdmissionSpec(
    name="mooncake",
    config=MooncakeConfig,
    build=Mooncake,
    summary=(
        "Refuses a request whose predicted TTFT or TBT exceeds its SLO; optionally by the predicted load of the "
        "decode replicas."
    ),
    source="Mooncake (FAST'25), Algorithm 1; arXiv 2407.00079",
    advice=(
        "Use it where a late answer is worthless, and a client should try another server immediately. Not for "
        "requests without SLOs, or with a latency model that has large errors."
    ),
)
