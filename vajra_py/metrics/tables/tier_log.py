"""Observer that records the use of memory tiers below the devices: prefix hits by request, and traffic on the tiers'
links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from vajra_py.contract import ReplicaId, RequestView
from vajra_py.contract.observer import Observer, TierTransfer
from vajra_py.metrics.definitions import Ints

if TYPE_CHECKING:
    from vajra_py.runtime.serving.controller import Controller

LOAD_TIME = "tier_load_s"
"""Name of the column with the seconds that a request waited for its prefix to be loaded to the device before its first
admission; NaN if nothing was loaded.
"""
_HITS = "hit_tokens_"


def hits_column(tier: str) -> str:
    """Return the name of the column with the number of prompt tokens that a request hit in this tier at its first
    admission; `tier` may also be "device".
    """
    return f"{_HITS}{tier}"


def is_of_tiers(column: str) -> bool:
    """Return True for a column of the requests table that only runs with memory tiers have."""
    return column == LOAD_TIME or column.startswith(_HITS)


class TierLink(Struct, frozen=True):
    """Link of one tier in one replicaset."""

    bandwidth: float
    """Bytes per second in each direction, available to all replicas together."""


def links_of(controller: Controller) -> dict[str, dict[str, TierLink]]:
    """Return, for each replicaset with tiers, the links of its tiers by tier name, with the nearest tier first."""
    found: dict[str, dict[str, TierLink]] = {}
    for name, replicaset in controller.replicasets.items():
        rules = replicaset.tiers
        owners = [one.memory.tiers for one in replicaset.replicas if one.memory.tiers is not None]
        if rules is None or not owners:
            continue
        links = {}
        for tier, link in zip(owners[0].names, rules.links, strict=True):
            limits = [len(owners) * (link.bandwidth or np.inf), link.shared_bandwidth or np.inf]
            links[tier] = TierLink(min(limits))
        found[name] = links
    return found


class Flow(Struct):
    """Total of transfers from one memory to another in one replicaset."""

    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """Sum of the transfers' durations."""


class TierLog(Observer):
    """Observer that collects hits by tier and request, and flows between tiers."""

    wants_step_ends = False

    def __init__(self, links: Mapping[str, Mapping[str, TierLink]]) -> None:
        self.links = links
        self.tiers: Sequence[str] = list(dict.fromkeys(tier for one in links.values() for tier in one))
        """Names of the tiers of all replicasets."""
        self.flows: dict[tuple[str, str, str], Flow] = {}
        """Flows by replicaset, source and target."""
        self._hits: dict[int, tuple[Mapping[str, int], float]] = {}
        """(Number of loaded tokens by tier, seconds that the request waited for them), by request index."""

    def on_tier_hit(
        self, request: RequestView, replica_id: ReplicaId, num_tokens: Mapping[str, int], load_s: float, now: float
    ) -> None:
        """Record the tier hits of a request, if the request has not been admitted before."""
        if request.admitted_index == 0:
            self._hits[request.index] = num_tokens, load_s

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        """Drop the hits of a waiting request whose loaded KV was given up before its first admission."""
        if request.admitted_index == 0:
            self._hits.pop(request.index, None)

    def on_tier_transfer(self, transfer: TierTransfer, now: float) -> None:
        """Count a transfer."""
        flow = self.flows.setdefault((transfer.replicaset, transfer.source, transfer.target), Flow())
        flow.num_transfers += 1
        flow.num_blocks += transfer.num_blocks
        flow.num_bytes += transfer.num_bytes
        flow.seconds += now - transfer.started_at

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns that this log adds to the requests table, in order."""
        return [hits_column("device"), *map(hits_column, self.tiers), LOAD_TIME]

    def columns_for(self, indices: Ints, num_cached_tokens: Ints) -> dict[str, Any]:
        """Return the values of `columns` for the requests with these indices."""
        hits = [self._hits.get(index) for index in indices.tolist()]
        found: dict[str, Any] = {
            hits_column(tier): np.array([0 if one is None else one[0].get(tier, 0) for one in hits], dtype=np.int64)
            for tier in self.tiers
        }
        loaded = sum(found.values(), np.zeros(len(indices), dtype=np.int64))
        found[hits_column("device")] = np.maximum(np.asarray(num_cached_tokens) - loaded, 0)
        found[LOAD_TIME] = np.array([np.nan if one is None else one[1] for one in hits])
        return found
