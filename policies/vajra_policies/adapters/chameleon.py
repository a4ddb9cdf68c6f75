"""Chameleon: queues by size with quotas of tokens, and a cache of adapters by frequency, recency and size."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import NamedTuple

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.preemption import preemption_mode
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

_ROUNDS = 100
"""Most rounds of k-means; it ends before, as a rule after a handful."""
_FIRST, _WINDOW = 16, 1000
"""Requests that are known when queues are first made, and most that are remembered."""


class ChameleonConfig(FixedChunkConfig, LengthConfig):
    """Parameters of `chameleon`."""

    prompt_weight: float = Field(0.4, ge=0, description="A: weight of the prompt in a request's size.")
    output_weight: float = Field(0.6, ge=0, description="B: weight of the predicted output in a request's size.")
    most_queues: int = Field(4, ge=1, description="K: most queues.")
    refresh_s: float = Field(
        300.0, gt=0, description="Time after which queues and quotas are made anew.", json_schema_extra={"unit": "s"}
    )
    slo_s: float = Field(
        5.0, gt=0, description="SLO: time that a request of any queue may take.", json_schema_extra={"unit": "s"}
    )
    frequency_weight: float = Field(0.45, ge=0, description="Weight of an adapter's uses in its score.")
    recency_weight: float = Field(0.1, ge=0, description="Weight of an adapter's last use in its score.")
    size_weight: float = Field(0.45, ge=0, description="Weight of an adapter's size in its score.")


def cuts_of(sizes: Sequence[float], most_queues: int) -> list[float]:
    """Sizes at which queues are cut: midpoints between neighbouring centroids of k-means, begun at quantiles."""
    points = sorted(sizes)
    count = min(most_queues, len(points))
    centroids = sorted({points[(2 * index + 1) * len(points) // (2 * count)] for index in range(count)})
    for _ in range(_ROUNDS):
        cuts = [(low + high) / 2.0 for low, high in pairwise(centroids)]
        groups: list[list[float]] = [[] for _ in centroids]
        for point in points:
            groups[bisect_right(cuts, point)].append(point)
        found = [fmean(group) for group in groups if group]
        if found == centroids:
            break
        centroids = found
    return [(low + high) / 2.0 for low, high in pairwise(centroids)]


def quotas_of(needs: Sequence[float], num_tokens: int) -> list[int]:
    """Return each queue's quota: its need, the first ones in full where not all can have it, and an equal share of what is left."""
    quotas, left = [], num_tokens
    for need in needs:
        quotas.append(min(ceil(need), left))
        left -= quotas[-1]
    return [quota + left // len(needs) for quota in quotas]


class _Facts(NamedTuple):
    """Tokens of the prompt and of the predicted output, blocks of the adapter, and arrival of a request."""

    prompt: float
    output: float
    adapter: float
    arrived_at: float

    @property
    def num_tokens(self) -> int:
        return ceil(self.prompt + self.output)


class Chameleon(FixedChunk):
    """WRS = (A p / p_max + B d / d_max) a / a_max: size of a request with p prompt, d predicted output tokens, and an adapter of size a.

    - K queues: k-means on the WRS of recent requests, cut midway between centroids.
    - Queue i needs S_i D_i (1 / SLO + lambda_i) tokens, of its largest request, mean duration and rate of arrivals. The smallest sizes
      have what they need of the KV memory first; what nobody needs is shared out equally.
    - Phase 1: each queue, the smallest sizes first, admits while p + d of those that it has admitted is within its quota; one that
      has nobody admits its first request, whatever its size. Phase 2: what queues leave in which nobody waits goes to the others,
      the smallest first. Tokens return to the queue that gave them when a request ends or is preempted. Steps are `fixed_chunk`'s.
    - The idle adapter goes with the least frequency f / f_max, recency (rank of the last use, 0 to 1) and size a / a_max, weighted.

    a and a_max are blocks (`num_blocks`); where adapters have none, a / a_max is 1, as for requests without one. Uses count half
    after each refresh. Queues are first made after 16 requests, and again whenever those known have doubled, until `refresh_s` counts.

    Left out: the choice of K by an elbow, prefetches for those that wait, memory for the cache beyond the slots, and the rule that
    a request may overtake one that waits for its adapter only if it ends before that is loaded (here every scheduler skips such a
    request). How the paper weighs what nobody needs, and what it does where needs exceed the memory, was not found.

    Source: Iliakopoulou et al., "Chameleon: Adaptive Caching and Scheduling for Many-Adapter LLM Inference Environments" (MICRO'25,
    arXiv:2411.17741); the weights of the score from secondary sources, which give 0.45 or 0.55 for size.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), is_work_conserving=True)
    """Queues are looked at only where somebody waits and the batch has room; one that has admitted nobody admits its first."""

    def __init__(self, config: ChameleonConfig, context: PolicyContext) -> None:
        super().__init__(config, preemption_mode(config, context))
        self._config = config
        self._lengths = Lengths(config, context.output_lengths)
        self._num_kv_tokens = context.limits.num_blocks * context.limits.block_size
        self._facts: dict[RequestView, _Facts] = {}
        self._recent: deque[_Facts] = deque(maxlen=_WINDOW)
        self._durations: deque[tuple[_Facts, float]] = deque(maxlen=_WINDOW)
        self._greatest = _Facts(1.0, 1.0, 1.0, 0.0)
        self._cuts: list[float] = []
        self.quotas: list[int] = [self._num_kv_tokens]
        """Tokens that each queue may have admitted, the smallest sizes first."""
        self._charges: dict[RequestView, tuple[float, list[tuple[int, int]]]] = {}
        """Time of admission, and (queue, tokens) that pay for it."""
        self.used: list[int] = [0]
        """Tokens of each queue that are given away."""
        self._num_seen, self._refresh_count, self._refresh_at = 0, _FIRST, float("inf")
        self._uses: defaultdict[str, float] = defaultdict(float)
        self._adapter_blocks: dict[str, float] = {}

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Decodes, prompts in progress, then waiting ones by queue and quota."""
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
        """The adapter with the least score; of equal ones the least recently used."""
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
        """Its tokens return; it waits in its queue again."""
        self._give_back(request)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Its tokens return."""
        self._give_back(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Tokens return, durations are learnt."""
        for request in requests:
            began_at = self._give_back(request)
            facts = self._facts.pop(request, None)
            if facts is not None and began_at is not None:
                self._durations.append((facts, now - began_at))

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        return super()._next_chunk(request, batch, replica) if request.is_resident else 0

    def _has_room(self, batch: BatchBuilder) -> bool:
        return batch.slots_left > 0 and self._room(batch) > 0

    # Admission

    def _admit(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        waiting = list(replica.waiting())
        for request in waiting:
            self._learn(request, replica)
        if now >= self._refresh_at or self._num_seen >= self._refresh_count:
            self._refresh(now)
        lines: list[deque[RequestView]] = [deque() for _ in self.quotas]
        for request in waiting:
            lines[self._queue_of(self._facts[request])].append(request)
        for queue, line in enumerate(lines):
            while line and self._has_room(batch):
                num_tokens = self._facts[line[0]].num_tokens
                if self.used[queue] and self.used[queue] + num_tokens > self.quotas[queue]:
                    break
                if not self._take(line.popleft(), [(queue, num_tokens)], batch, now):
                    return
        lenders = [queue for queue, line in enumerate(lines) if not line]
        for line in lines:
            while line and self._has_room(batch):
                charges = self._borrowed(self._facts[line[0]].num_tokens, lenders)
                if not charges:
                    break
                if not self._take(line.popleft(), charges, batch, now):
                    return

    def _borrowed(self, num_tokens: int, lenders: Sequence[int]) -> list[tuple[int, int]]:
        """(queue, tokens) of the lenders that make up so many tokens; empty if they have not as many left."""
        charges = []
        for queue in lenders:
            given = min(num_tokens, self.quotas[queue] - self.used[queue])
            if given > 0:
                charges.append((queue, given))
                num_tokens -= given
        return charges if num_tokens <= 0 else []

    def _take(self, request: RequestView, charges: list[tuple[int, int]], batch: BatchBuilder, now: float) -> bool:
        """Admit a request if it can be; False where memory is short, so that nobody else is tried."""
        num_tokens = min(batch.max_chunk(request), self._room(batch))
        refusal = batch.add(request, num_tokens)
        if refusal is None:
            self._charge(request, now, charges)
            self._uses[request.adapter] += 1
        return refusal not in (Refusal.KV_BLOCKS, Refusal.WATERMARK)

    def _charge(self, request: RequestView, now: float, charges: list[tuple[int, int]]) -> None:
        self._charges[request] = now, charges
        for queue, num_tokens in charges:
            self.used[queue] += num_tokens

    def _give_back(self, request: RequestView) -> float | None:
        """Return the time of admission, None for a request that was not admitted here."""
        charged = self._charges.pop(request, None)
        if charged is None:
            return None
        for queue, num_tokens in charged[1]:
            self.used[queue] -= num_tokens
        return charged[0]

    # Queues

    def _learn(self, request: RequestView, replica: LocalReplicaView) -> None:
        if request in self._facts:
            return
        blocks = float(replica.adapter_blocks(request.adapter))
        self._adapter_blocks[request.adapter] = blocks
        prompt, output = float(request.num_prompt_tokens), self._lengths.total(request)
        facts = self._facts[request] = _Facts(prompt, output, blocks, request.arrived_at)
        self._recent.append(facts)
        self._num_seen += 1

    def _size_of(self, facts: _Facts) -> float:
        """WRS."""
        config, most = self._config, self._greatest
        factor = facts.adapter / most.adapter if facts.adapter else 1.0
        return (
            config.prompt_weight * facts.prompt / most.prompt + config.output_weight * facts.output / most.output
        ) * factor

    def _queue_of(self, facts: _Facts) -> int:
        return bisect_right(self._cuts, self._size_of(facts))

    def _refresh(self, now: float) -> None:
        """Make queues and quotas anew from recent requests; those that run are charged to the queues that they belong to now."""
        recent = self._recent
        prompt, output, adapter = (max(1.0, *(one[index] for one in recent)) for index in range(3))
        self._greatest = _Facts(prompt, output, adapter, 0.0)
        self._cuts = cuts_of([self._size_of(one) for one in recent], self._config.most_queues)
        queues: list[list[_Facts]] = [[] for _ in range(len(self._cuts) + 1)]
        for one in recent:
            queues[self._queue_of(one)].append(one)
        times: list[list[float]] = [[] for _ in queues]
        for facts, duration_s in self._durations:
            times[self._queue_of(facts)].append(duration_s)
        mean_s = fmean(one for _, one in self._durations) if self._durations else 1.0
        span_s = max(one.arrived_at for one in recent) - min(one.arrived_at for one in recent) or 1.0
        needs = [
            max(one.num_tokens for one in members)
            * (fmean(durations) if durations else mean_s)
            * (1.0 / self._config.slo_s + len(members) / span_s)
            for members, durations in zip(queues, times, strict=True)
        ]
        self.quotas = quotas_of(needs, self._num_kv_tokens)
        self.used = [0] * len(queues)
        for request, (began_at, _) in self._charges.items():
            facts = self._facts[request]
            self._charge(request, began_at, [(self._queue_of(facts), facts.num_tokens)])
        for name in self._uses:
            self._uses[name] /= 2.0
        self._refresh_at = now + self._config.refresh_s
        self._refresh_count = 2 * self._num_seen


def _build(config: ChameleonConfig, context: PolicyContext) -> Chameleon:
    return Chameleon(config, context)


SPEC = PolicySpec(
    name="chameleon",
    layer=Layer.REPLICA_SCHEDULER,
    config=ChameleonConfig,
    build=_build,
    summary="Queues by predicted size with quotas of KV tokens, and adapters that stay loaded by use, recency and size.",
    source="Chameleon (Iliakopoulou et al., MICRO'25, arXiv:2411.17741)",
    advice=(
        "Use it where small requests wait behind large ones and many adapters share few slots. Not with equal sizes, or a batch "
        "that is full before memory is: quotas then bind nobody."
    ),
)
