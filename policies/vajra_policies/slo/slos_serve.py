"""SLOs-Serve: a plan of prompt tokens that meets the SLOs of all requests it admits, for as many requests as possible."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.search import most_that_fits
from vajra_policies.slo.prompt_plans import Prompt, most_in_time
from vajra_py.contract import (
    BatchBuilder,
    BatchFeatures,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
    fill,
)
from vajra_py.contract.fill import add_all_decodes


class SlosServeConfig(FixedChunkConfig):
    """Parameters of `slos_serve`."""

    step_s: float = Field(
        0.05,
        ge=1e-6,
        description="Predicted time of a step, seconds: the tightest TPOT SLO.",
    )


class SlosServe(FixedChunk):
    """Admits the largest set of arrived requests whose TTFT SLOs can all be met; the others are best effort.

    - A step takes at most `step_s`, to meet the TPOT SLOs, and therefore has at most B tokens by the latency model; n
      running requests get one token each. Until the deadline of a prompt there are floor(time / step_s) steps. Each has
      B - n tokens for prompts, less one token for each admitted prompt with an earlier deadline. `most_in_time` finds
      the largest set of prompts that fits; it includes requests admitted earlier.
    - Admitted prompts are computed in the order of their deadlines. Prompts of best-effort requests (declined ones, and
      those without an SLO) are computed only while no admitted prompt is left, so that they take nothing from a plan.

    Left out: values of requests other than 1, several TPOT tiers with their own batch sizes, speculative decoding, and
    a router that offers a declined request to the next replica. Memory is not planned. The plan follows a
    reimplementation's description; `step_s` is a round figure.

    Source: Chen et al., "SLOs-Serve: Optimized Serving of Multi-SLO LLMs" (arXiv:2504.08784).
    """

    traits = SchedulerTraits(is_work_conserving=True)

    def __init__(self, config: SlosServeConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._step_s = config.step_s
        self._latency = context.latency
        self._admitted: dict[RequestView, bool] = {}
        """True for each waiting or running request whose TTFT SLO the plan meets; False for best-effort requests."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes and admitted prompts by deadline; without admitted prompts, add best-effort prompts."""
        if replica.num_waiting:
            self._decide(replica, now)
        pending = [one for one in self._prompts(replica) if self._admitted.get(one)]
        if not pending:
            fill(replica, batch, self._next_chunk, self._mode)
            return
        add_all_decodes(replica, batch, self._mode)
        for request in sorted(pending, key=lambda one: (_due_at(one), one.index)):
            if batch.slots_left <= 0 or request in batch:
                continue
            num_tokens = self._within(request, min(batch.max_chunk(request), self._room(batch)), batch)
            if num_tokens < 1:
                break
            batch.add(request, num_tokens)
        if not batch.num_requests:
            fill(replica, batch, self._next_chunk, self._mode)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the number of tokens, at least 1, that a prompt alone on the replica computes within `step_s`."""

        def fits(num_tokens: int) -> bool:
            features = BatchFeatures().with_chunk(num_tokens, num_done_tokens)
            return self._latency.stage_time_s(features) <= self._step_s

        return max(most_that_fits(0, min(num_remaining_tokens, self._chunk_size) + 1, fits), 1)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._admitted.pop(request, None)

    def _prompts(self, replica: LocalReplicaView) -> list[RequestView]:
        waiting = replica.waiting() if replica.num_waiting else iter(())
        return [*replica.partial_prefills(), *waiting]

    def _decide(self, replica: LocalReplicaView, now: float) -> None:
        """Decide for every new request whether to admit it to the plan."""
        prompts = self._prompts(replica)
        new = [one for one in prompts if one not in self._admitted]
        self._admitted.update(dict.fromkeys(new, False))
        asked = [one for one in new if one.ttft_slo_s is not None and not one.num_output_tokens]
        if not asked:
            return
        known = [one for one in prompts if self._admitted[one] and not one.num_output_tokens]
        ordered = sorted((*known, *asked), key=lambda one: (_due_at(one), one.index))
        step_tokens = self._step_tokens(replica)
        plan = [
            Prompt(one.num_remaining_prompt_tokens, int((_due_at(one) - now) / self._step_s), self._admitted[one])
            for one in ordered
        ]
        running = replica.num_running - sum(one.is_resident for one in known)
        for request, is_in in zip(ordered, most_in_time(plan, step_tokens, running), strict=True):
            self._admitted[request] = is_in

    def _step_tokens(self, replica: LocalReplicaView) -> int:
        """Return B, the largest number of tokens, including those of decodes, in a step that takes at most `step_s`."""
        running = replica.running()
        decodes = BatchFeatures().with_decodes(len(running), sum(one.num_known_tokens for one in running))
        most = most_that_fits(
            0, self._chunk_size + 1, lambda num: self._latency.stage_time_s(decodes.with_chunk(num, 0)) <= self._step_s
        )
        return min(most + len(running), self._chunk_size)

    def _within(self, request: RequestView, num_tokens: int, batch: BatchBuilder) -> int:
        """Return the largest number of tokens, up to `num_tokens`, with which the step takes at most `step_s`; at least
        1 in an empty step.
        """
        most = most_that_fits(0, num_tokens + 1, lambda num: batch.predicted_time_with(request, num) <= self._step_s)
        return most if most or batch.num_requests else min(num_tokens, 1)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        num_tokens = super()._next_chunk(request, batch, replica)
        return num_tokens if num_tokens is None else self._within(request, num_tokens, batch) or None


def _due_at(request: RequestView) -> float:
    return request.arrived_at + (request.ttft_slo_s or 0.0)


SPEC = PolicySpec(
    name="slos_serve",
    layer=Layer.REPLICA_SCHEDULER,
    config=SlosServeConfig,
    build=SlosServe,
    summary="Admits the largest set of requests whose TTFT SLOs can all be met; the others are best effort.",
    source="SLOs-Serve (arXiv:2504.08784)",
    advice=(
        "Use it where bursts exceed the load that can be served in time: all admitted requests are in time. Not where "
        "many requests have no SLO: they wait for all that have one."
    ),
)
