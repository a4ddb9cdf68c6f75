"""Scorers by prefix: prefer replicas that cache the prompt's prefix, and spread prompts that no replica has cached.

Source: llm-d-router, `scheduling/scorer`: prefix, nohitlru.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Floats
from vajra_policies.routers.prefix_matches import OfPrefixProducer, match_fractions, matches_of
from vajra_py.contract import (
    PrefixMatches,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class PrefixCacheConfig(OfPrefixProducer):
    """Parameters of `prefix-cache-scorer`."""

    match_length_weight: float = Field(
        0.0, ge=0, le=1, description="Weight of the length of the match beside the matched part of the prompt."
    )
    match_length_scale_tokens: int = Field(8192, ge=1, description="Length of a match that counts in full.")


class PrefixCacheScorer:
    """Scores (1 - w) * matched / total blocks + w * min(1, matched tokens / scale)^2.

    w is `match_length_weight`, scale is `match_length_scale_tokens`.
    """

    def __init__(self, config: PrefixCacheConfig, matches: PrefixMatches) -> None:
        self._config = config
        self._matches = matches

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return scores: 0 if nothing of the prompt is cached, 1 if all of it is (less for a short prompt if
        `match_length_weight` is set).
        """
        part = match_fractions(self._matches, request, replicas)
        weight = self._config.match_length_weight
        if not weight:
            return part
        tokens = part * self._matches.num_blocks(request) * self._matches.block_size
        length = np.minimum(1.0, tokens / self._config.match_length_scale_tokens)
        score: Floats = weight * length * length + (1.0 - weight) * part
        return score


class NoHitLruConfig(OfPrefixProducer):
    """Parameters of `no-hit-lru-scorer`."""

    lru_size: int = Field(1024, ge=1, description="Replicas whose order of use is remembered.")


class NoHitLruScorer:
    """Scores 1 - rank / (n - 1) for n candidates if none of them caches a part of the prompt, else 0.5 for all of them.

    Rank 0 is the best. A prompt that no replica has cached is a cold prompt. Replicas that have never received a cold
    prompt come first, in the order of the candidates. The others follow, in the order of the time of their last cold
    prompt, the earliest first. Cold prompts are thus spread over all caches.
    """

    def __init__(self, config: NoHitLruConfig, matches: PrefixMatches) -> None:
        self._size = config.lru_size
        self._matches = matches
        self._used: OrderedDict[ReplicaId, None] = OrderedDict()
        """Replicas that took a prompt without a hit, the least recent first."""
        self._asked: tuple[RequestView, bool] | None = None
        """(request scored last, True if no replica cached a part of its prompt)."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return the scores by the rule in the class docstring."""
        num = len(replicas)
        is_cold = not np.asarray(self._matches.matched_blocks(request, replicas)).any()
        self._asked = request, is_cold
        if not is_cold:
            return np.full(num, 0.5)
        if num == 1:
            return np.ones(1)
        ids = figures.ids(replicas).tolist()
        fresh = [one for one in ids if one not in self._used]
        ranks = {one: rank for rank, one in enumerate(fresh)}
        ranks |= {one: len(fresh) + position for position, one in enumerate(self._used)}
        score: Floats = np.maximum(1.0 - np.array([ranks[one] for one in ids], dtype=np.float64) / (num - 1), 0.0)
        return score

    def on_placement(self, request: RequestView, placements: Mapping[str, ReplicaLoadView], now: float) -> None:
        """Mark the replicas of a prompt without a hit as most recently used."""
        if self._asked is not None and self._asked[0] is request and self._asked[1]:
            for replica in placements.values():
                self._used[replica.replica_id] = None
                self._used.move_to_end(replica.replica_id)
                if len(self._used) > self._size:
                    self._used.popitem(last=False)
        self._asked = None

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Drop the result for the request scored last, if this request has left."""
        if self._asked is not None and self._asked[0] in requests:
            self._asked = None


def _prefix_cache(config: PrefixCacheConfig, context: RoutingContext) -> PrefixCacheScorer:
    return PrefixCacheScorer(config, matches_of(context, config.prefix_match_info_producer_name))


def _no_hit_lru(config: NoHitLruConfig, context: RoutingContext) -> NoHitLruScorer:
    return NoHitLruScorer(config, matches_of(context, config.prefix_match_info_producer_name))


SPECS = (
    RoutingPartSpec(
        name="prefix-cache-scorer",
        kind=RoutingPartKind.SCORER,
        config=PrefixCacheConfig,
        build=_prefix_cache,
        summary="The larger the part of the prompt that a replica has cached, the better.",
        source="llm-d prefix-cache-scorer",
    ),
    RoutingPartSpec(
        name="no-hit-lru-scorer",
        kind=RoutingPartKind.SCORER,
        config=NoHitLruConfig,
        build=_no_hit_lru,
        summary="Spreads prompts that no replica has cached: least recently used replica first.",
        source="llm-d no-hit-lru-scorer",
    ),
)
