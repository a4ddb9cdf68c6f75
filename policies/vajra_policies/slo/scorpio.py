"""SCORPIO: each decode runs as often as its TPOT SLO requires, and prompts that would be late are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.preemption import give_way
from vajra_policies.slo.targets import tpot_target_s
from vajra_py.contract import (
    BatchBuilder,
    BatchFeatures,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    Refusal,
    RequestView,
    SchedulerTraits,
    fill,
)
from vajra_py.contract.fill import add_prompts, least_urgent_victim

_WHOLE = 1.0 - 1e-9
"""Credit from which a decode runs: 1, less a tolerance for the rounding of sums of fractions."""


class ScorpioConfig(FixedChunkConfig):
    """Parameters of `scorpio`."""

    default_tpot_s: float = Field(
        0.1,
        gt=0,
        description="TPOT SLO of requests that state none, seconds; at least the loosest stated one.",
    )
    rejects: bool = Field(True, description="Refuse waiting requests that would miss their TTFT SLO.")


class Scorpio(FixedChunk):
    """Decodes with a credit of 1 run; every step adds TRP(r) = tightest TPOT SLO / TPOT SLO of r to each credit.

    - A request with twice the tightest TPOT SLO thus runs in every second step.
    - TPOT guard: the virtual batch size is the sum of TRP over the running requests and the waiting one. The waiting
      request is admitted if a decode step of this size is predicted to take at most the tightest TPOT SLO.
    - TTFT guard: in order of urgency, a waiting request is rejected if it would miss its TTFT SLO even directly after
      the prompts ahead of it. Use the prioritizer `edf` with `use_request_deadlines: true`; each step goes through all
      waiting requests.

    Left out: predicted output lengths, with which the paper bounds memory. Decodes that do not run keep their KV.

    Source: Tang et al., "SCORPIO: Serving the Right Requests at the Right Time for Heterogeneous SLOs" (arXiv:2505.23022).
    """

    traits = SchedulerTraits(is_work_conserving=True)
    """`repeats_decodes` is empty, since steps differ with the credits. The replica does not idle: the decode with the
    tightest SLO runs in each step, and if nothing runs, any request is admitted.
    """

    def __init__(self, config: ScorpioConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._default_tpot_s = config.default_tpot_s
        self._rejects = config.rejects
        self._latency = context.latency
        self._prefill_time = context.prefill_time
        self._credits: dict[RequestView, float] = {}
        self._tightest_s = config.default_tpot_s
        self._virtual_size = 0.0
        self._context_tokens = 0

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add the decodes with a credit of at least 1, then prompts by urgency."""
        running = replica.running()
        self._tightest_s = min((self._tpot_s(one) for one in running), default=float("inf"))
        self._virtual_size = sum(self._tightest_s / self._tpot_s(one) for one in running)
        self._context_tokens = sum(one.num_known_tokens for one in running)
        self._add_due(replica, batch)
        if self._rejects and replica.num_waiting:
            self._reject_late(replica, batch, now)
        add_prompts(replica, batch, self._next_chunk)
        if not batch.num_requests:  # partial prefills may hold all memory, and none can grow: `fill` preempts some
            fill(replica, batch, self._next_chunk, self._mode)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._credits.pop(request, None)

    def _tpot_s(self, request: RequestView) -> float:
        target_s = tpot_target_s(request)
        return self._default_tpot_s if target_s is None else target_s

    def _add_due(self, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        credits = self._credits
        for request in replica.decodes():
            credits[request] = credits.get(request, 0.0) + self._tightest_s / self._tpot_s(request)
        for request in sorted(replica.decodes(), key=replica.urgency):
            if credits[request] < _WHOLE or not request.is_resident:
                continue
            refusal = batch.add(request, 1)
            while refusal is Refusal.KV_BLOCKS:
                victim = least_urgent_victim(replica, request)
                if not give_way(batch, victim, self._mode):
                    break
                refusal = batch.add(request, 1) if victim is not request else None
            if refusal is None and request in batch:
                credits[request] -= 1.0

    def _reject_late(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        ahead_s = 0.0
        for request in list(replica.waiting()):
            prefill_s = self._prefill_time.remaining_s(request.num_prompt_tokens, batch.cached_tokens(request))
            target_s = request.ttft_slo_s
            is_new = not request.num_output_tokens and not request.num_preemptions
            if is_new and target_s is not None and now + ahead_s + prefill_s > request.arrived_at + target_s:
                batch.drop(request, f"its first token would miss its TTFT SLO of {target_s:g} s")
            else:
                ahead_s += prefill_s

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        if request.is_resident or self._room(batch) <= 0 or self._admits(request, replica):
            return super()._next_chunk(request, batch, replica)
        return 0

    def _admits(self, request: RequestView, replica: LocalReplicaView) -> bool:
        """Return True if the TPOT guard admits the request, and count it among the running requests in that case."""
        own_s = self._tpot_s(request)
        tightest_s = min(self._tightest_s, own_s)
        rescaled = 0.0 if not self._virtual_size else self._virtual_size * tightest_s / self._tightest_s
        size = rescaled + tightest_s / own_s
        num_context = self._context_tokens + request.num_known_tokens
        mean_context = num_context / (replica.num_running + 1)
        features = BatchFeatures().with_decodes(ceil(size - 1e-9), int(size * mean_context))
        if replica.num_running and self._latency.stage_time_s(features) > tightest_s:
            return False
        self._tightest_s, self._virtual_size, self._context_tokens = tightest_s, size, num_context
        return True


SPEC = PolicySpec(
    name="scorpio",
    layer=Layer.REPLICA_SCHEDULER,
    config=ScorpioConfig,
    build=Scorpio,
    summary=(
        "Decodes run as often as their TPOT SLOs require; requests are admitted if all SLOs still hold, and rejected "
        "if late."
    ),
    source="SCORPIO (arXiv:2505.23022)",
    advice=(
        "Use it with `edf` and `use_request_deadlines: true` in overload, for SLOs that differ much, and with chunks "
        "that take no longer than the tightest TPOT SLO. Not near full load: the exact spacing uses up all slack of "
        "requests with loose SLOs."
    ),
)
