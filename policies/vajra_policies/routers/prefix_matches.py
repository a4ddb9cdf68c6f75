"""Producers of prefix matches: approximate ones, from the router's own choices, and precise ones, from the replicas'
caches.

Source: llm-d-router, `requestcontrol/dataproducer`: approximateprefix, preciseprefixcache.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.block_index import RecentBlocks
from vajra_policies.routers.figures import Floats, Integers
from vajra_py.contract import (
    PolicyConfig,
    PolicyContext,
    PrefixMatches,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

APPROXIMATE = "approx-prefix-cache-producer"
PRECISE = "precise-prefix-cache-producer"


class ApproximateConfig(PolicyConfig):
    """Parameters of `approx-prefix-cache-producer`."""

    auto_tune: bool = Field(
        True,
        description="Use the replicas' own block size and number of blocks in place of the next two parameters.",
    )
    block_size_tokens: int = Field(16, ge=1, description="Tokens of a block of the index.")
    lru_capacity_per_server: int = Field(31_250, ge=1, description="Blocks that the index keeps for each replica.")
    min_block_size_tokens: int = Field(64, ge=1, description="Smallest block size that is used, whatever is set.")
    max_prefix_tokens_to_match: int = Field(
        131_072, ge=0, description="Number of leading tokens to compare; 0: as the next parameter says."
    )
    max_prefix_blocks_to_match: int = Field(
        2048, ge=0, description="Number of leading blocks to compare where tokens are not limited; 0: all."
    )


class ApproximatePrefixMatches:
    """Index of the blocks of the prompts sent to each replica, up to the replica's assumed capacity.

    A block of the index consists of whole KV blocks of the replicas, and has at least `min_block_size_tokens` tokens.
    The index does not notice evictions and restarts of replicas.
    """

    def __init__(self, config: ApproximateConfig, context: PolicyContext) -> None:
        limits = context.limits
        wanted = limits.block_size if config.auto_tune else config.block_size_tokens
        self._group = -(-max(wanted, config.min_block_size_tokens) // limits.block_size)
        self.block_size = self._group * limits.block_size
        """Tokens per block."""
        capacity = limits.num_blocks if config.auto_tune else config.lru_capacity_per_server
        self._max_blocks = _max_blocks(config, self.block_size)
        self._sent = RecentBlocks(context.num_replicas, capacity)
        self._asked: tuple[RequestView, Integers] | None = None

    def num_blocks(self, request: RequestView) -> int:
        """Return the number of full blocks of the prompt that are compared with the index."""
        blocks = request.num_prompt_tokens // self.block_size
        return blocks if self._max_blocks is None else min(blocks, self._max_blocks)

    def matched_blocks(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of leading blocks of the prompt that were sent to each replica."""
        if self._asked is None or self._asked[0] is not request:
            self._asked = request, self._sent.counts(self._blocks(request))
        found: Sequence[int] = self._asked[1][figures.ids(replicas)]  # type: ignore[assignment]  # array as sequence
        return found

    def on_placement(self, request: RequestView, placements: Mapping[str, ReplicaLoadView], now: float) -> None:
        """Record that each chosen replica has the prompt's blocks."""
        blocks = self._blocks(request)
        for replica in placements.values():
            self._sent.add(blocks, replica.replica_id)
        self._asked = None

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Drop the counts kept for the latest request, since this request may have ended. The index is not changed."""
        self._asked = None

    def _blocks(self, request: RequestView) -> Sequence[Hashable]:
        hashes = request.block_hashes()
        return hashes[self._group - 1 :: self._group][: self._max_blocks]  # each hash covers all earlier blocks


def _max_blocks(config: ApproximateConfig, block_size: int) -> int | None:
    if config.max_prefix_tokens_to_match:
        return config.max_prefix_tokens_to_match // block_size
    return config.max_prefix_blocks_to_match or None


class PreciseConfig(PolicyConfig):
    """Parameters of `precise-prefix-cache-producer`, which has none: blocks are those of the replicas."""


class PrecisePrefixMatches:
    """Queries each replica's present prefix cache, like an index fed by KV events without delay."""

    def __init__(self, context: PolicyContext) -> None:
        self.block_size = context.limits.block_size
        """Tokens per block."""

    def num_blocks(self, request: RequestView) -> int:
        """Return the number of full blocks of the prompt."""
        return request.num_prompt_tokens // self.block_size

    def matched_blocks(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of leading blocks of the prompt in each replica's prefix cache."""
        size = self.block_size
        return [one.prefix_hit_tokens(request) // size for one in replicas]


def match_fractions(matches: PrefixMatches, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Floats:
    """Return the matched fraction of the prompt's full blocks on each replica; 0 for a prompt without a full block."""
    total = matches.num_blocks(request)
    if not total:
        return np.zeros(len(replicas))
    found: Floats = np.asarray(matches.matched_blocks(request, replicas), dtype=np.float64) / total
    return found


class OfPrefixProducer(PolicyConfig):
    """Parameter of parts that read prefix matches."""

    prefix_match_info_producer_name: str = Field(APPROXIMATE, description="Producer that knows the prefixes.")


def matches_of(context: RoutingContext, name: str) -> PrefixMatches:
    """Return the router's producer of this name. Raises `ValueError` if it does not match prefixes."""
    found = context.producer(name)
    if not isinstance(found, PrefixMatches):
        raise ValueError(f"producer {name!r} does not match prefixes; {APPROXIMATE} and {PRECISE} do")
    return found


def _approximate(config: ApproximateConfig, context: RoutingContext) -> ApproximatePrefixMatches:
    return ApproximatePrefixMatches(config, context.policy)


def _precise(config: PreciseConfig, context: RoutingContext) -> PrecisePrefixMatches:
    return PrecisePrefixMatches(context.policy)


SPECS = (
    RoutingPartSpec(
        name=APPROXIMATE,
        kind=RoutingPartKind.PRODUCER,
        config=ApproximateConfig,
        build=_approximate,
        summary="Prefixes of the prompts that this router has sent to each replica, in an LRU list of blocks.",
        source="llm-d approx-prefix-cache-producer",
    ),
    RoutingPartSpec(
        name=PRECISE,
        kind=RoutingPartKind.PRODUCER,
        config=PreciseConfig,
        build=_precise,
        summary="Prefixes that the replicas' caches hold now.",
        source="llm-d precise-prefix-cache-producer",
    ),
)
