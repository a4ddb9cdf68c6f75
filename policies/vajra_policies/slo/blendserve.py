"""BlendServe: offline requests are ordered by the ratio of compute time to memory time, and admitted from both ends of
this order, so that computing and reading memory overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.size.lengths import LengthConfig, Lengths
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    Refusal,
    RequestView,
    SchedulerTraits,
    fill,
)
from vajra_py.contract.fill import add_all_decodes


class BlendserveConfig(FixedChunkConfig, LengthConfig):
    """Parameters of `blendserve`."""

    compute_tokens_per_s: float = Field(
        10_000.0, gt=0, description="Tokens a second that computing allows, as if memory cost nothing."
    )
    read_tokens_per_s: float = Field(
        5_000_000.0, gt=0, description="Tokens of context a second that decodes can read from KV memory."
    )


def left_share(rho_root: float, rho_left: float, rho_right: float) -> float:
    """Return M_L / M = (rho_root - rho_R) / (rho_L - rho_R): the left end's share of the memory M.

    With this share, both ends together have rho_root, the density of all requests. The share is clamped to 0 .. 1, and
    is 1 if rho_L <= rho_R.
    """
    if rho_left <= rho_right:
        return 1.0
    return min(max((rho_root - rho_right) / (rho_left - rho_right), 0.0), 1.0)


class Blendserve(FixedChunk):
    """Waiting requests are sorted by density rho = T_comp / T_mem, and admitted from both ends of this order.

    - T_comp is the time to compute p prompt tokens and d output tokens, without prompt tokens that other requests
      share. T_mem is the time to read p * d + d^2 / 2 tokens of context in the request's decodes. Requests with the
      same first block stay together, at their common density, so that prefixes are shared as in depth-first order.
    - The compute-bound end, of density rho_L, gets the part M_L = M * (rho_root - rho_R) / (rho_L - rho_R) of the KV
      memory M. The other end, of density rho_R, gets the rest. The requests admitted from both ends together then have
      about the density rho_root of all waiting requests.

    Left out: prefix trees deeper than one level and splitting of outliers, lengths from samples of 1 % (the backend's
    `output_length` takes their place), and chunks for each end. There is a gain only if a step takes max(compute time,
    memory time). Both rates are round figures for 7B models.

    Source: Zhao et al., "BlendServe: Optimizing Offline Inference for Auto-regressive Large Models with Resource-aware Batching"
    (arXiv:2411.16102).
    """

    traits = SchedulerTraits(is_work_conserving=True)

    def __init__(self, config: BlendserveConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._compute_rate, self._read_rate = config.compute_tokens_per_s, config.read_tokens_per_s
        self._lengths = Lengths(config, context.output_lengths)
        self._block_size = context.limits.block_size
        self._num_kv_tokens = context.limits.num_blocks * context.limits.block_size
        self._is_left: dict[RequestView, bool] = {}
        """True for each admitted request that came from the compute-bound end."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, prompts in progress, then waiting requests from both ends."""
        if replica.num_waiting:
            add_all_decodes(replica, batch, self._mode)
            for request in replica.partial_prefills():
                if request not in batch and batch.slots_left > 0 and self._room(batch) > 0:
                    batch.add(request, min(batch.max_chunk(request), self._room(batch)))
            if batch.slots_left > 0 and self._room(batch) > 0 and batch.free_blocks > 0:
                self._admit(replica, batch)
            if batch.num_requests:
                return
        fill(replica, batch, self._next_chunk, self._mode)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._is_left.pop(request, None)

    def by_density(self, waiting: Iterable[RequestView]) -> tuple[list[tuple[float, RequestView]], float]:
        """Return a tuple (pairs, rho_root): the pairs (rho, request) of the waiting requests, the densest first, and
        the density of all these requests together, which is 0 if none waits.
        """
        families: dict[Hashable, list[RequestView]] = defaultdict(list)
        for request in waiting:
            families[request.block_hashes()[0] if request.block_hashes() else request.index].append(request)
        ranked: list[tuple[float, list[RequestView]]] = []
        compute_s = read_s = 0.0
        for members in families.values():
            blocks = {one for request in members for one in request.block_hashes()}
            num_shared = sum(len(request.block_hashes()) for request in members) - len(blocks)
            times = [self._times(request) for request in members]
            own_read = sum(one[1] for one in times)
            own_compute = sum(one[0] for one in times) - num_shared * self._block_size / self._compute_rate
            ranked.append((own_compute / own_read, members))
            compute_s, read_s = compute_s + own_compute, read_s + own_read
        ranked.sort(key=lambda one: (-one[0], one[1][0].index))
        return [(rho, one) for rho, members in ranked for one in members], compute_s / read_s if ranked else 0.0

    def _times(self, request: RequestView) -> tuple[float, float]:
        prompt, output = request.num_prompt_tokens, max(self._lengths.total(request), 1.0)
        return (prompt + output) / self._compute_rate, output * (prompt + output / 2.0) / self._read_rate

    def _admit(self, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        line, rho_root = self.by_density(replica.waiting())
        held = {True: 0, False: 0}
        for one in replica.running():
            held[self._is_left.get(one, True)] += one.num_known_tokens
        left, right = 0, len(line) - 1
        while left <= right and batch.slots_left > 0 and self._room(batch) > 0:
            share = left_share(rho_root, line[left][0], line[right][0])
            is_left = held[True] < share * self._num_kv_tokens
            request = line[left if is_left else right][1]
            left, right = (left + 1, right) if is_left else (left, right - 1)
            refusal = batch.add(request, min(batch.max_chunk(request), self._room(batch)))
            if refusal is None:
                self._is_left[request] = is_left
                held[is_left] += request.num_known_tokens
            elif refusal in (Refusal.KV_BLOCKS, Refusal.WATERMARK):
                return


SPEC = PolicySpec(
    name="blendserve",
    layer=Layer.REPLICA_SCHEDULER,
    config=BlendserveConfig,
    build=Blendserve,
    summary=(
        "Offline requests from both ends of an order by arithmetic intensity, so that computing and reading memory "
        "overlap."
    ),
    source="BlendServe (ASPLOS'26, arXiv:2411.16102)",
    advice=(
        "Use it for offline requests of different prompt and output lengths on engines that overlap computing with "
        "reading memory. Not online: requests of medium density would wait for very long."
    ),
)
