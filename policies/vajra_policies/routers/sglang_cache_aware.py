"""SGLang's cache-aware router: the replica with the longest common prefix, unless load is too uneven.

Left out: comparison of prompts by characters; whole KV blocks are compared instead.

Source: sglang-router 0.3.2, `sgl-model-gateway/src/policies/cache_aware.rs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.block_index import RecentBlocks
from vajra_policies.routers.figures import Integers
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


class CacheAwareConfig(PolicyConfig):
    """Parameters of `sglang_cache_aware`."""

    cache_threshold: float = Field(
        0.3,
        ge=0,
        le=1,
        description=("Fraction of the prompt above which the replica with the longest common prefix is chosen."),
    )
    balance_abs_threshold: int = Field(
        64,
        ge=0,
        description=(
            "Load is uneven only if the most loaded replica has over this many requests more than the least loaded one."
        ),
    )
    balance_rel_threshold: float = Field(
        1.5,
        ge=1,
        description=(
            "Load is uneven only if the most loaded replica also has more than this many times the least loaded one's "
            "requests."
        ),
    )
    max_tree_size: int = Field(
        2**26,
        ge=1,
        description=("Number of prompt tokens in the index of prefixes, for each replica (SGLang counts characters)."),
    )


class CacheAware(BindsOnArrival):
    """Binds on arrival to the replica with the longest common prefix if it is long enough and load is even, else to the
    least loaded replica.

    Load is the number of requests in flight; it is uneven if max - min > `balance_abs_threshold` and max >
    `balance_rel_threshold` * min. Prefixes are those of prompts sent before, compared by whole KV blocks (in SGLang by
    characters). Of several replicas with the longest prefix, the least loaded is chosen, as in SGLang's code (its
    comment names the smallest tree). Ties go to the lowest id.
    """

    def __init__(self, config: CacheAwareConfig, context: PolicyContext) -> None:
        self._config = config
        self._block_size = context.limits.block_size
        self._load: Integers = np.zeros(context.num_replicas, dtype=np.int64)
        self._replica_of: dict[RequestView, ReplicaId] = {}
        self._sent = RecentBlocks(context.num_replicas, max(config.max_tree_size // self._block_size, 1))

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica by the rule in the class docstring; None if no replica is up."""
        up = figures.those_up(replicas)
        if not up:
            return None
        ids = figures.ids(up)
        chosen = self._choice(request, ids, self._load[ids])
        self._take_back(request)
        self._load[chosen] += 1
        self._replica_of[request] = chosen
        self._sent.add(request.block_hashes(), chosen)
        return chosen

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Subtract ended requests from the loads."""
        for request in requests:
            self._take_back(request)

    def _choice(self, request: RequestView, ids: Integers, load: Integers) -> ReplicaId:
        config = self._config
        low, high = load.min(), load.max()
        if not (high - low > config.balance_abs_threshold and high > config.balance_rel_threshold * low):
            matched = self._sent.counts(request.block_hashes())[ids]
            longest = matched.max()
            if longest * self._block_size > config.cache_threshold * request.num_prompt_tokens:
                load = np.where(matched == longest, load, np.iinfo(np.int64).max)
        return int(ids[np.argmin(load)])

    def _take_back(self, request: RequestView) -> None:
        before = self._replica_of.pop(request, None)
        if before is not None:
            self._load[before] -= 1


SPEC = PolicySpec(
    name="sglang_cache_aware",
    layer=Layer.REPLICASET_SCHEDULER,
    config=CacheAwareConfig,
    build=CacheAware,
    summary="Each arriving request to the replica that got the longest common prefix, unless load is too uneven.",
    source="SGLang router 0.3.2, cache_aware",
    advice=(
        "Use it to compare with SGLang's router, or where replicas publish no KV events. Not where caches are small "
        "or are reset: it assumes that everything it has sent is still cached."
    ),
)
