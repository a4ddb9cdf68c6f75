"""Chameleon: queues by size with quotas of tokens, and a cache of adapters by frequency, recency and size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pydantic import Field

from vajra_policies.adapters.size_queues import SizeFacts, SizeQueues
from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.size.lengths import LengthConfig, Lengths
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    Refusal,
    ReplicaId,
    RequestView,
    SchedulerTraits,
    SteadyState,
    add_all_decodes,
    fill,
)


class ChameleonConfig(FixedChunkConfig, LengthConfig):
    """Parameters of `chameleon`."""

    prompt_weight: float = Field(0.4, ge=0, le=1e9, description="A: weight of the prompt in a request's size.")
    output_weight: float = Field(
        0.6, ge=0, le=1e9, description="B: weight of the predicted output in a request's size."
    )
    most_queues: int = Field(4, ge=1, description="K: most queues.")
    refresh_s: float = Field(
        300.0,
        gt=0,
        description="Interval at which queues and quotas are recomputed, seconds.",
        json_schema_extra={"unit": "s"},
    )
    slo_s: float = Field(
        5.0, gt=0, description="SLO: maximum time of a request of any queue, seconds.", json_schema_extra={"unit": "s"}
    )
    frequency_weight: float = Field(0.45, ge=0, description="Weight of an adapter's uses in its score.")
    recency_weight: float = Field(0.1, ge=0, description="Weight of an adapter's last use in its score.")
    size_weight: float = Field(0.45, ge=0, description="Weight of an adapter's size in its score.")


class Chameleon(FixedChunk):
    """Sorts requests into queues by weighted request size, WRS = (A p / p_max + B d / d_max) a / a_max.

    A request has p prompt tokens, d predicted output tokens, and an adapter of size a; A and B are weights.

    - There are K queues. Their bounds are midway between the centroids of k-means on the WRS of recent requests.
    - Queue i needs S_i D_i (1 / SLO + lambda_i) tokens, with S_i the tokens of its largest request, D_i the mean
      duration of its requests, and lambda_i their arrival rate. Its quota of the KV memory is the tokens that it needs,
      plus an equal share of the tokens that no queue needs. If memory is short, the queues of the smallest sizes come
      first.
    - Phase 1: each queue, the smallest sizes first, admits while the sum of p + d of its admitted requests is within
      its quota; a queue with no admitted request admits its first request, whatever the request's size. Phase 2: queues
      in which no request waits lend their unused quotas to the other queues, which borrow in the same order. When a
      request ends or is preempted, its tokens return to the queues that were charged. Steps are formed as by
      `fixed_chunk`.
    - The idle adapter with the least score is evicted. The score is the weighted sum of frequency f / f_max, with f the
      number of uses, recency (rank of the last use, 0 to 1) and size a / a_max.

    a and a_max are in blocks (`num_blocks`); if adapters occupy none, a / a_max is 1, as for requests without an
    adapter. Queues are first built after 16 requests, and rebuilt each time `refresh_s` have passed or the number of
    requests seen has doubled. Each rebuild halves the numbers of uses of the adapters.

    Left out: the choice of K by the elbow method, prefetching of adapters for waiting requests, memory for the cache
    beyond the slots, and a limit on overtaking. In the paper, a request may overtake one that waits for its adapter
    only if it ends before this adapter is loaded; here, any request may. The paper's weights for dividing the memory
    that no queue needs, and its rule for needs that exceed the memory, were not found.

    Source: Iliakopoulou et al., "Chameleon: Adaptive Caching and Scheduling for Many-Adapter LLM Inference Environments" (MICRO'25,
    arXiv:2411.17741); the weights of the score from secondary sources, which give 0.45 or 0.55 for size.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), is_work_conserving=True)
    """Queues have no effect if no request waits or if the decodes fill the batch, so equal decode steps repeat. If
    nothing runs, no quota is in use: the first waiting request is admitted, so the replica does not idle.
    """

    def __init__(self, config: ChameleonConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._lengths = Lengths(config, context.output_lengths)
        num_tokens = context.limits.num_blocks * context.limits.block_size
        weights = config.prompt_weight, config.output_weight
        self.queues = SizeQueues(config.most_queues, weights, num_tokens, config.slo_s, config.refresh_s)
        self._uses: defaultdict[str, float] = defaultdict(float)
        self._adapter_blocks: dict[str, float] = {}

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, prompts in progress, then waiting requests by queue and quota."""
        if replica.num_waiting:
            add_all_decodes(replica, batch, self._mode)
            for request in replica.partial_prefills():
                if request not in batch and self._has_room(batch):
                    batch.add(request, min(batch.max_chunk(request), self._room(batch)))
            if self._has_room(batch) and batch.free_blocks > 0:
                self._admit(replica, batch, now)
            if batch.num_requests:
                return
        fill(replica, batch, self._next_chunk, self._mode)

    def evict_adapter(self, idle: Sequence[str], now: float) -> str:
        """Return the adapter with the least score; among equal ones, the least recently used."""
        config = self._config
        most_uses = max(*(self._uses[name] for name in idle), 1e-9)
        most_blocks = max(*(self._adapter_blocks.get(name, 0.0) for name in idle), 1.0)

        def score(index: int) -> float:
            size = self._adapter_blocks.get(idle[index], 0.0) / most_blocks
            recency = index / max(len(idle) - 1, 1)
            frequency = self._uses[idle[index]] / most_uses
            return config.frequency_weight * frequency + config.recency_weight * recency + config.size_weight * size

        return idle[min(range(len(idle)), key=score)]

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Return the request's tokens to the quotas; it waits in its queue again."""
        self.queues.give_back(request)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Return the request's tokens to the quotas."""
        self.queues.give_back(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Return the requests' tokens to the quotas, and record the requests' times from admission to end."""
        for request in requests:
            self.queues.forget(request, now)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        return super()._next_chunk(request, batch, replica) if request.is_resident else 0

    def _has_room(self, batch: BatchBuilder) -> bool:
        return batch.slots_left > 0 and self._room(batch) > 0

    # Admission

    def _admit(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        waiting, queues = list(replica.waiting()), self.queues
        for request in waiting:
            # A request whose replica was lost, or whose KV moved away, may still be charged for its earlier admission.
            queues.give_back(request)
            self._learn(request, replica)
        if queues.is_due(now):
            self._refresh(now)
        lines = queues.lines(waiting)
        for queue, line in enumerate(lines):
            while line and self._has_room(batch):
                num_tokens = queues.num_tokens_of(line[0])
                if not queues.has_quota(queue, num_tokens):
                    break
                if not self._take(line.popleft(), [(queue, num_tokens)], batch, now):
                    return
        lenders = [queue for queue, line in enumerate(lines) if not line]
        for line in lines:
            while line and self._has_room(batch):
                charges = queues.borrowed(queues.num_tokens_of(line[0]), lenders)
                if not charges:
                    break
                if not self._take(line.popleft(), charges, batch, now):
                    return

    def _take(self, request: RequestView, charges: list[tuple[int, int]], batch: BatchBuilder, now: float) -> bool:
        """Admit a request if possible. Return False if it lacks memory: no further request is then admitted."""
        num_tokens = min(batch.max_chunk(request), self._room(batch))
        refusal = batch.add(request, num_tokens)
        if refusal is None:
            self.queues.charge(request, now, charges)
            self._uses[request.adapter] += 1
        return refusal not in (Refusal.KV_BLOCKS, Refusal.WATERMARK)

    def _learn(self, request: RequestView, replica: LocalReplicaView) -> None:
        if request not in self.queues:
            blocks = float(replica.adapter_blocks(request.adapter))
            self._adapter_blocks[request.adapter] = blocks
            prompt, output = float(request.num_prompt_tokens), self._lengths.total(request)
            self.queues.learn(request, SizeFacts(prompt, output, blocks, request.arrived_at))

    def _refresh(self, now: float) -> None:
        """Rebuild the queues, and halve the counts of adapters' past uses."""
        self.queues.refresh(now)
        for name in self._uses:
            self._uses[name] /= 2.0


SPEC = PolicySpec(
    name="chameleon",
    layer=Layer.REPLICA_SCHEDULER,
    config=ChameleonConfig,
    build=Chameleon,
    summary="Queues by predicted size with quotas of KV tokens, and adapters that stay loaded by use, recency and size.",
    source="Chameleon (Iliakopoulou et al., MICRO'25, arXiv:2411.17741)",
    advice=(
        "Use it where small requests wait behind large ones and many adapters share few slots. Not where all requests "
        "have about the same size, or the batch is full before memory is: the quotas then have no effect."
    ),
)
