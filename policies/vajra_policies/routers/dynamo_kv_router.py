"""Dynamo's KV router: the replica with the least cost, counted in blocks to compute and blocks to hold.

Left out: host and disk tiers, Dynamo's router queue, and its expiry of stale bookings.

Source: Dynamo 1.6.1, `lib/kv-router/src/scheduling/selector/default.rs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.active_sequences import ActiveSequences
from vajra_policies.routers.block_index import ExpiringBlocks
from vajra_policies.routers.figures import Floats, Integers
from vajra_policies.routing import BindsOnArrival
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class CostRouterConfig(PolicyConfig):
    """Parameters of `dynamo_kv_router`, under Dynamo's names. The policy breaks ties with the random stream
    `dynamo_kv_router`.
    """

    overlap_score_credit: float = Field(1.0, ge=0, description="Credit of a cached block, blocks.")
    overlap_score_credit_decay: float = Field(
        0.0,
        ge=0,
        description=(
            "Decay of the credit for cached blocks on replicas that have more to compute than the least loaded one."
        ),
    )
    prefill_load_scale: float = Field(1.0, ge=0, description="Weight of blocks to compute relative to blocks to hold.")
    decode_active_request_weight: float = Field(0.0, ge=0, description="Blocks that each active request counts for.")
    router_temperature: float = Field(
        0.0,
        ge=0,
        description="Temperature of the choice; 0: the least cost; above: at random, in proportion to e^(-(cost - min) / ((max - min) * temperature)).",
    )
    router_track_prefill_tokens: bool = Field(
        True, description="Count blocks to compute; false: the credit is subtracted from the blocks to hold."
    )
    router_assume_kv_reuse: bool = Field(True, description="Count blocks that requests share once.")
    router_track_output_blocks: bool = Field(False, description="Count generated blocks.")
    use_kv_events: bool = Field(
        True, description="Use the replicas' own caches to count cached blocks; false: the prompts recently sent there."
    )
    router_ttl_secs: float = Field(
        120.0, gt=0, description="Time for which sent blocks count as cached, without events, seconds."
    )


class CostRouter(BindsOnArrival):
    """Binds on arrival to the replica with the least cost; ties are broken uniformly at random.

    cost = `prefill_load_scale` * max(blocks to compute - credit, 0) + blocks to hold + `decode_active_request_weight` *
    active requests. Blocks to compute are the active prompt tokens of the replica and the tokens of this prompt, in
    fractional blocks; the credit is `overlap_score_credit` for each block of this prompt that is cached there. Blocks
    to hold are the union of the full blocks of the replica's active requests and of this request. Without
    `router_track_prefill_tokens`, blocks to compute do not count, and the credit is subtracted from the blocks to hold.
    """

    def __init__(self, config: CostRouterConfig, context: PolicyContext) -> None:
        self._config = config
        self._block_size = context.limits.block_size
        self._stream = context.random_stream("dynamo_kv_router")
        self._sent = None if config.use_kv_events else ExpiringBlocks(context.num_replicas, config.router_ttl_secs)
        self.sequences = ActiveSequences(
            context.num_replicas,
            assume_reuse=config.router_assume_kv_reuse,
            track_prefill=config.router_track_prefill_tokens,
        )
        """Blocks and tokens that are active at each replica."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica with the least cost or, if `router_temperature` is above 0, a random replica; replicas
        with lower costs are more probable. None if no replica is up.
        """
        up = figures.those_up(replicas)
        if not up:
            return None
        self.sequences.note_first_tokens()
        if self._config.router_track_output_blocks:
            self.sequences.note_output_blocks(self._block_size)
        overlaps = self.overlaps(request, up, now)
        position = self._choice(self.costs(request, up, overlaps))
        chosen = up[position].replica_id
        blocks = request.block_hashes()
        tokens = max(request.num_prompt_tokens - int(overlaps[position]) * self._block_size, 0)
        self.sequences.book(request, chosen, blocks, request.num_prompt_tokens // self._block_size, tokens)
        if self._sent is not None:
            self._sent.add(blocks, chosen, now)
        return chosen

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record that the request may get its first token from now on."""
        self.sequences.admitted(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Remove the blocks and tokens of these requests."""
        for request in requests:
            self.sequences.free(request)

    def overlaps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Integers:
        """Return, for each replica, the number of the prompt's leading full blocks that the replica has cached. Without
        KV events, return the number of the prompt's leading full blocks that were sent to the replica within the last
        `router_ttl_secs`.
        """
        if self._sent is not None:
            return self._sent.counts(request.block_hashes(), now)[figures.ids(replicas)]
        size = self._block_size
        return np.array([one.prefix_hit_tokens(request) // size for one in replicas], dtype=np.int64)

    def costs(self, request: RequestView, replicas: Sequence[ReplicaLoadView], overlaps: Integers) -> Floats:
        """Return the cost of the request on each replica, in blocks."""
        config, size, sequences = self._config, self._block_size, self.sequences
        ids = figures.ids(replicas)
        tokens, prompt = sequences.prefill_tokens[ids], request.num_prompt_tokens
        blocks = sequences.potential_blocks(request.block_hashes(), prompt // size)[ids]
        credit: Floats = config.overlap_score_credit * overlaps.astype(np.float64)
        if config.overlap_score_credit_decay:
            excess = (tokens - tokens.min()) / size / max(-(-prompt // size), 1)
            credit = credit / (1.0 + config.overlap_score_credit_decay * excess)
        active = config.decode_active_request_weight * sequences.requests[ids]
        if not config.router_track_prefill_tokens:
            held: Floats = np.maximum(blocks - credit, 0.0) + active
            return held
        to_compute = np.maximum((tokens + prompt) / size - credit, 0.0)
        cost: Floats = config.prefill_load_scale * to_compute + blocks + active
        return cost

    def _choice(self, costs: Floats) -> int:
        low, high = costs.min(), costs.max()
        if not self._config.router_temperature or low == high:
            best = np.flatnonzero(costs == low)
            return int(best[0] if len(best) == 1 else best[int(self._stream.integers(0, len(best)))])
        weights = np.exp(-(costs - low) / ((high - low) * self._config.router_temperature))
        sums = np.cumsum(weights)
        drawn = np.searchsorted(sums, self._stream.random() * sums[-1], side="right")
        return min(int(drawn), len(costs) - 1)


SPEC = PolicySpec(
    name="dynamo_kv_router",
    layer=Layer.REPLICASET_SCHEDULER,
    config=CostRouterConfig,
    build=CostRouter,
    summary=(
        "Each arriving request to the replica with the least cost: blocks to compute, less cached ones, plus blocks "
        "to hold."
    ),
    source="NVIDIA Dynamo 1.6.1, KV router",
    advice=(
        "Use it to compare with Dynamo, and where one figure should combine cache hits and load. Not without prefix "
        "caches."
    ),
)
