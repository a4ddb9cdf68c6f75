"""Rules of a replicaset's memory tiers: their links, and the loading of content from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from vajra_py.runtime.movement.links import LinkOptions

PrefetchRule: TypeAlias = Literal["wait_complete", "timeout", "best_effort"]
PrefetchStart: TypeAlias = Literal["arrival", "admission"]
LoadRule: TypeAlias = Literal["in_turn", "reserved"]
LoadOrder: TypeAlias = Literal["begin", "urgency"]


class TierMovesRules(Struct, frozen=True):
    """Links of the tiers, nearest first, and the rules of prefetches and loads; see `TiersConfig`."""

    links: Sequence[LinkOptions]
    bytes_per_block: int
    prefetch: PrefetchRule = "wait_complete"
    prefetch_from: PrefetchStart = "arrival"
    prefetch_timeout_s: float = 0.0
    prefetch_timeout_s_per_token: float = 0.0
    min_prefetch_tokens: int = 1
    min_load_tokens: int = 1
    loads: LoadRule = "in_turn"
    load_order: LoadOrder = "begin"
