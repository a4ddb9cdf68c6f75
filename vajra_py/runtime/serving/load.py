"""Load of a replica, for replicaset schedulers and other policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vajra_py.contract import ReplicaLimits, ReplicaLoadView, ReplicaState, RequestView
from vajra_py.runtime.serving.content_feed import ContentFeed
from vajra_py.runtime.serving.replica import Replica


class LiveLoad:
    """`ReplicaLoadView` that reads the replica's present state."""

    __slots__ = (
        "age_s",
        "feed",
        "is_up",
        "limits",
        "max_batch_size",
        "max_loras",
        "num_blocks",
        "pool",
        "replica",
        "replica_id",
        "role",
        "state",
    )

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.replica_id = replica.replica_id
        self.pool = replica.parts.pool
        self.role = replica.parts.role.value
        self.limits = replica.limits
        self.set_state(ReplicaState.UP)
        self.num_blocks = replica.memory.num_blocks
        self.max_batch_size = replica.limits.max_batch_size
        self.max_loras = 0 if replica.adapters is None else replica.adapters.max_loras
        self.age_s = 0.0
        self.feed: ContentFeed | None = None
        """Source of prefix hits with a lag; None: hits are looked up in the replica's cache."""

    def set_state(self, state: ReplicaState) -> None:
        """Set the replica's state."""
        self.state = state
        self.is_up = state is ReplicaState.UP

    @property
    def num_running(self) -> int:
        """Number of running requests; waiting requests that hold KV blocks are not counted."""
        return self.replica.running_set.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests in the replica's own queue."""
        return self.replica.queue.num_requests

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens left to prefill, summed over waiting and running requests."""
        return self.replica.num_pending_tokens

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens whose KV is held for running requests."""
        return self.replica.num_context_tokens

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks."""
        return self.replica.memory.free_blocks

    def prefix_hit_tokens(self, request: RequestView) -> int:
        """Return the number of leading tokens of a request in this replica's prefix cache, now or (with a lag)
        according to the events delivered so far.
        """
        hashes = getattr(request, "hashes", None)
        if hashes is None:
            return 0
        if self.feed is not None:
            return self.feed.hit_tokens(self.replica_id, hashes, request.num_known_tokens)
        return self.replica.memory.lookup_prefix(hashes, request.num_known_tokens)

    def tier_hit_tokens(self, request: RequestView) -> Mapping[str, int]:
        """Return the number of leading tokens of a request in each memory of this replica now, by name; each token
        counts for the nearest memory that holds it. Empty without tiers.
        """
        hashes = getattr(request, "hashes", None)
        return {} if hashes is None else self.replica.memory.tier_hits(hashes, request.num_known_tokens)

    @property
    def loaded_adapters(self) -> Sequence[str]:
        """Names of the adapters that slots hold, the least recently used first."""
        adapters = self.replica.adapters
        return () if adapters is None else adapters.loaded()

    @property
    def waiting_adapters(self) -> Sequence[str]:
        """Names of the adapters of requests that wait on this replica, each once."""
        if self.replica.adapters is None:
            return ()
        names = dict.fromkeys(request.adapter for request in self.replica.queue)
        names.pop("", None)
        return tuple(names)

    @property
    def num_adapter_slots(self) -> int:
        """Number of slots that are free or hold an idle adapter."""
        adapters = self.replica.adapters
        return 0 if adapters is None else adapters.num_available()


_COLUMNS: dict[str, Callable[[list[Replica]], list[int]]] = {
    "num_running": lambda replicas: [one.running_set.num_running for one in replicas],
    "num_waiting": lambda replicas: [one.queue.num_requests for one in replicas],
    "num_pending_tokens": lambda replicas: [one.num_pending_tokens for one in replicas],
    "num_context_tokens": lambda replicas: [one.num_context_tokens for one in replicas],
    "free_blocks": lambda replicas: [one.memory.free_blocks for one in replicas],
}


_FIXED = frozenset({"replica_id", "num_blocks", "max_batch_size", "max_loras"})
"""Names of figures that do not change during a run."""


class LiveLoads(list[LiveLoad]):
    """`LoadColumns` of live loads: figures are read from the replicas, without a call for each view."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()
        """Ids of the replicas."""
        self._replicas: list[Replica] = []
        self._fixed: dict[str, NDArray[np.int64]] = {}
        self._are_plain = True
        """True if all loads are of class `LiveLoad`, so that figures can be read from the replicas."""

    def add(self, load: LiveLoad) -> None:
        """Add the load of another replica."""
        self.append(load)
        self.ids.add(load.replica_id)
        self._are_plain = self._are_plain and type(load) is LiveLoad
        self._replicas.append(load.replica)
        self._fixed.clear()

    def column(self, name: str) -> Any:
        """Return one figure of all replicas, in their order: as a list, or as an array if the figure never changes."""
        read = _COLUMNS.get(name)
        if read is not None and self._are_plain:
            return read(self._replicas)
        if name not in _FIXED:
            return [getattr(one, name) for one in self]
        if name not in self._fixed:
            self._fixed[name] = np.array([getattr(one, name) for one in self], dtype=np.int64)
            self._fixed[name].setflags(write=False)
        return self._fixed[name]


class LoadOnDemand:
    """`ReplicaLoadView` that applies ended steps before each read of a figure."""

    __slots__ = ("_live", "_sync")

    def __init__(self, live: LiveLoad, sync: Callable[[], None]) -> None:
        self._live = live
        self._sync = sync

    def __getattr__(self, name: str) -> Any:
        self._sync()
        return getattr(self._live, name)


@dataclass(slots=True)
class SnapshotLoad:
    """`ReplicaLoadView` with figures of an earlier time, as in a router that polls its replicas. Prefix hits are not
    part of the snapshot: they are those of the live load.
    """

    live: LiveLoad
    replica_id: int
    pool: str
    role: str
    limits: ReplicaLimits
    num_blocks: int
    max_batch_size: int
    max_loras: int
    state: ReplicaState = ReplicaState.UP
    is_up: bool = True
    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    free_blocks: int = 0
    num_adapter_slots: int = 0
    loaded_adapters: Sequence[str] = ()
    waiting_adapters: Sequence[str] = ()
    age_s: float = 0.0
    taken_at: float = float("-inf")

    @classmethod
    def of(cls, live: LiveLoad) -> SnapshotLoad:
        """Return a snapshot whose figures have not been read yet."""
        sizes = live.limits, live.num_blocks, live.max_batch_size, live.max_loras
        return cls(live, live.replica_id, live.pool, live.role, *sizes)

    def look(self, now: float, interval_s: float) -> SnapshotLoad:
        """Re-read the figures if they are at least as old as the interval; return the snapshot with its age set."""
        live = self.live
        # The state is read each time, because a router would notice at once that a replica is down: requests sent to
        # that replica would fail.
        self.state, self.is_up = live.state, live.is_up
        if now - self.taken_at >= interval_s:
            self.num_running = live.num_running
            self.num_waiting = live.num_waiting
            self.num_pending_tokens = live.num_pending_tokens
            self.num_context_tokens = live.num_context_tokens
            self.free_blocks = live.free_blocks
            if self.max_loras:
                self.num_adapter_slots = live.num_adapter_slots
                self.loaded_adapters, self.waiting_adapters = live.loaded_adapters, live.waiting_adapters
            self.taken_at = now
        self.age_s = now - self.taken_at
        return self

    def prefix_hit_tokens(self, request: RequestView) -> int:
        """See `LiveLoad`."""
        return self.live.prefix_hit_tokens(request)

    def tier_hit_tokens(self, request: RequestView) -> Mapping[str, int]:
        """See `LiveLoad`."""
        return self.live.tier_hit_tokens(request)


_MAX_GROUPS = 1000
"""Maximum number of groups of replicas whose loads are stored."""


class ReplicaViews:
    """Views of a replicaset's replicas for its scheduler: live loads, or snapshots that are renewed at an interval."""

    __slots__ = ("_groups", "_latest", "_live", "_snapshots", "interval_s")

    def __init__(self, live: LiveLoads, interval_s: float) -> None:
        """Create the views. `interval_s`: age in seconds at which a view is renewed; 0: views are live."""
        self._live = live
        self.interval_s = interval_s
        self._snapshots = [SnapshotLoad.of(one) for one in live] if interval_s > 0 else []
        self._groups: dict[tuple[Replica, ...], LiveLoads] = {}
        self._latest: dict[int, tuple[tuple[Replica, ...], LiveLoads]] = {}
        """Recently used groups, by the `id` of the tuple of replicas, because the cost of hashing a tuple grows with
        the number of replicas.
        """

    def all(self, now: float) -> Sequence[ReplicaLoadView]:
        """Return the views of all replicas, by id."""
        if self.interval_s > 0:
            return [one.look(now, self.interval_s) for one in self._snapshots]
        return cast(Sequence[ReplicaLoadView], self._live)

    def seen(self, loads: LiveLoads, now: float) -> Sequence[ReplicaLoadView]:
        """Return the views of these loads that policies get: the live loads themselves, or their snapshots."""
        if self.interval_s > 0:
            views = self.all(now)
            return [views[one.replica_id] for one in loads]
        return cast(Sequence[ReplicaLoadView], loads)

    def live_of(self, replicas: Sequence[Replica]) -> LiveLoads:
        """Return the live loads of these replicas; the result is stored, and returned again for the same replicas."""
        latest = self._latest.get(id(replicas))
        if latest is not None and latest[0] is replicas:
            return latest[1]
        key = tuple(replicas)  # `replicas` itself if it is a tuple
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            found = self._groups[key] = LiveLoads()
            for one in replicas:
                found.add(self._live[one.replica_id])
        if key is replicas:  # `replicas` is a tuple, which cannot change
            if len(self._latest) >= _MAX_GROUPS:
                self._latest.clear()
            self._latest[id(key)] = key, found
        return found
